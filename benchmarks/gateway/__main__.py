"""Measure both gateways in turn: `python -m benchmarks.gateway --smg PATH --turbojpeg FOLDER`, from the repository.

SMG is not installed by Saccade: make a virtual environment, `pip install smg==1.13.0 smg-grpc-proto`, and give its
`bin/smg`. Its wheel has no libturbojpeg: `apt-get download libturbojpeg0 && dpkg -x *.deb tj`, and give
`tj/usr/lib/x86_64-linux-gnu`. Without --smg only our own rows are measured.
"""

import argparse
import itertools
import json
import os
import subprocess
import tempfile
from pathlib import Path

from benchmarks.gateway.cases import CASES, Case
from benchmarks.gateway.model_folder import write_model
from benchmarks.gateway.rows import measure
from benchmarks.gateway.systems import SMG, SYSTEMS, Setup, running
from benchmarks.measured import end_with_what_was_started, write


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    path, environment = Path, os.environ
    parser.add_argument("--smg", type=path, default=environment.get("SACCADE_BENCHMARK_SMG"), help="SMG's executable")
    parser.add_argument("--turbojpeg", type=path, help="the folder of libturbojpeg.so.0, for SMG")
    parser.add_argument("--work", type=path, default=Path(tempfile.gettempdir()) / "saccade-benchmark-gateway")
    parser.add_argument("--out", type=path, default=Path("gateway.json"))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="how long, against the rows as they are written")
    parser.add_argument("--only", default="", help="run the rows whose name holds this")
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--gateway-argument", action="append", default=[], help="for our gateway, as --flag=value")
    return parser.parse_args()


def main() -> None:
    """Measure, print every row as it comes, and write JSON."""
    options = arguments()
    end_with_what_was_started()
    systems = [system for system in options.systems if system != SMG or options.smg]
    cases = [case for case in CASES if options.only in case.name]
    options.work.mkdir(parents=True, exist_ok=True)
    setup = Setup(options.smg, options.turbojpeg, options.work, tuple(options.gateway_argument))
    rows = []
    for repeat in range(options.repeats):
        # The order changes with every repeat, so that neither side always runs on a warmer or fresher machine.
        for family, caches in dict.fromkeys((case.family, case.caches) for case in cases):
            folder = write_model(options.work / family, family)
            own = [case for case in cases if (case.family, case.caches) == (family, caches)]
            for system in systems if repeat % 2 == 0 else reversed(systems):
                rows += run(system, setup, folder, own, options, repeat)
    write(options.out, "benchmarks.gateway", rows, smg=smg_version(options.smg) if options.smg else "not measured")


def run(
    system: str, setup: Setup, folder: Path, cases: list[Case], options: argparse.Namespace, repeat: int
) -> list[dict[str, object]]:
    """Start *system* once and measure *cases* on it."""
    rows = []
    with running(system, setup, folder, caches=cases[0].caches) as started:
        for case in cases:
            figures = measure(case, system, started, options.work, options.scale)
            rows.append({"case": case.name, "system": system, "repeat": repeat, **figures})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def smg_version(executable: Path) -> str:
    """Return what SMG calls itself."""
    output = subprocess.run([executable, "--version"], capture_output=True, text=True, check=False).stdout.split("\n")
    return next(itertools.chain((line.strip() for line in output if line.strip()), ["unknown"]))


if __name__ == "__main__":
    main()
