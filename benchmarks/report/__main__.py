"""Measure the figures of docs/figures.md and write the page: `make report`, or `python -m benchmarks.report`.

    python -m benchmarks.report --vllm VENV --smg SMG --vllm-router ROUTER --turbojpeg FOLDER
    python -m benchmarks.report --only "ttft: Saccade" accuracy
    python -m benchmarks.report --trial --state trial.json --page trial.md
    python -m benchmarks.report --only-page

Each part is a program, and takes at most twenty minutes. Its rows are in the state file as soon as it has ended, so a
report that was interrupted goes on when it is started again. Parts of another commit are measured again, unless --keep
is given. A part whose peers are not given is left out, and keeps its rows. Nothing else should run on the machine.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.measured import ROOT, commit, end_with_what_was_started
from benchmarks.report.page import write_page
from benchmarks.report.parts import PART_SECONDS, PARTS, Part, Peers, flag

STATE = ROOT / "benchmarks/results/report.json"
PAGE = ROOT / "docs/figures.md"


def arguments(names: list[str]) -> argparse.Namespace:
    """Return what the command line says about the parts with these *names*."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="an environment with vLLM, as `make peers` makes")
    parser.add_argument("--smg", type=Path, help="the smg program")
    parser.add_argument("--vllm-router", type=Path, help="the vllm-router program")
    parser.add_argument("--turbojpeg", type=Path, help="the folder of libturbojpeg.so.0, for SMG")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--keep", action="store_true", help="measure only parts that the state file does not have")
    parser.add_argument("--trial", action="store_true", help="few requests, to see that every part runs")
    parser.add_argument("--only-page", action="store_true", help="measure nothing")
    parser.add_argument("--state", type=Path, default=STATE)
    parser.add_argument("--page", type=Path, default=PAGE)
    return parser.parse_args()


def main() -> int:
    """Run the parts that are not in the state file, write the page, return the exit status."""
    names = [part.name for part in PARTS]
    chosen = arguments(names)
    end_with_what_was_started()
    state: dict[str, Any] = json.loads(chosen.state.read_text()) if chosen.state.exists() else {}
    peers, failed = Peers(chosen.vllm, chosen.smg, chosen.vllm_router, chosen.turbojpeg), []
    for part in PARTS:
        is_measured = part.name in state and (chosen.keep or state[part.name]["commit"] == commit())
        if chosen.only_page or is_measured or part.name not in chosen.only:
            continue
        if missing := part.missing(peers):
            print(f"{part.name}: left out; it needs {' and '.join(map(flag, missing))}", flush=True)
            continue
        print(f"{part.name}: begins at {datetime.now(UTC):%H:%M:%S}", flush=True)
        result = run(part, peers, is_trial=chosen.trial)
        if result is None:
            failed.append(part.name)
            continue
        state[part.name] = result
        chosen.state.write_text(json.dumps(state, indent=1) + "\n")
    write_page(state, chosen.page)
    if failed:
        print(f"failed: {', '.join(failed)}; run the same command again", file=sys.stderr)
    return 1 if failed else 0


def run(part: Part, peers: Peers, *, is_trial: bool) -> dict[str, Any] | None:
    """Run *part* and return what it wrote, None if it failed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, *part.words(peers, is_trial=is_trial), "--out", str(out)]
        began = time.monotonic()
        with subprocess.Popen(command, cwd=ROOT, env=environment) as process:
            try:
                status = process.wait(PART_SECONDS)
            except subprocess.TimeoutExpired:
                status = -signal.SIGTERM
            finally:
                process.terminate()  # it ends what it started
        if status or not out.exists():
            print(f"{part.name}: it ended with {status} after {time.monotonic() - began:.0f} s", file=sys.stderr)
            return None
        result = json.loads(out.read_text())
    if isinstance(result, list):  # rows that each have their facts
        result = {**{name: result[0][name] for name in ("machine", "commit")}, "rows": result}
    words = part.words(Peers(*(path and Path(path.name) for path in vars(peers).values())), is_trial=is_trial)
    result["command"] = " ".join(["python", *(f'"{word}"' if " " in word else word for word in words)])
    return {**result, "seconds": round(time.monotonic() - began), "date": f"{datetime.now(UTC):%Y-%m-%d}"}


if __name__ == "__main__":
    sys.exit(main())
