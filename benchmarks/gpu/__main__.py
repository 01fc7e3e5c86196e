"""Check and time on a GPU what only a GPU can run, and write the figures to benchmarks/results/gpu.md.

    python -m benchmarks.gpu --model DIR [--dtype auto] [--patches 256 1024 4096 64 576] [--rows 1 8 64]

Exit status: 0, 1 if a check failed, 2 on a machine without CUDA or with a model that cannot be loaded. It has never run
on a GPU.
"""

import argparse
import gc
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch

from benchmarks.gpu import checks
from benchmarks.gpu.checks import Check
from benchmarks.gpu.subject import load
from benchmarks.gpu.timings import Timing, all_timings
from benchmarks.measured import ROOT, commit
from saccade.engine.config import Dtype, EngineConfig
from saccade.errors import StartupError

RESULTS = ROOT / "benchmarks" / "results" / "gpu.md"


def main() -> int:
    """Run everything on the model that --model names."""
    arguments = _parser().parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu needs a GPU: torch finds no CUDA device here.", file=sys.stderr)
        return 2
    config = EngineConfig(
        arguments.model, "benchmark", device="cuda", dtype=arguments.dtype, max_num_seqs=max(arguments.rows)
    )
    try:
        results, timings = measure(config, arguments.patches, tuple(arguments.rows))
    except StartupError as error:
        print(error.message, file=sys.stderr)
        return 2
    gc.collect()
    torch.cuda.empty_cache()
    results.append(checks.contexts(replace(config, tensor_parallel_size=2, num_blocks=256)))
    RESULTS.write_text(report(_machine(), arguments.model, results, timings))
    print(RESULTS.read_text())
    return 1 if checks.has_failed(results) else 0


@torch.inference_mode()
def measure(
    config: EngineConfig, patches: Sequence[int], num_rows: tuple[int, ...]
) -> tuple[list[Check], list[Timing]]:
    """Return the checks of one device, and the times. Raises StartupError for a model that cannot be loaded."""
    subject = load(config, patches)
    results = [*checks.decoder_backends(subject), *checks.vision_backends(subject)]
    return results, list(all_timings(subject, num_rows))


def report(machine: str, model: str, results: Sequence[Check], timings: Sequence[Timing]) -> str:
    """Return the page of results."""
    return "\n".join(
        [
            "# On a GPU",
            "",
            f"Machine: {machine}",
            f"Commit: {commit()}",
            f"Command: `python -m benchmarks.gpu --model {Path(model).name}`",
            "",
            "| check | result | |",
            "|---|---|---|",
            *(f"| {check.name} | {check.result} | {check.detail.replace('|', '/')} |" for check in results),
            "",
            "| call | median ms |",
            "|---|---|",
            *(f"| {timing.name} | {timing.milliseconds:.3f} |" for timing in timings),
            "",
        ]
    )


def _machine() -> str:
    name, count = torch.cuda.get_device_name(), torch.cuda.device_count()
    return f"{count} x {name}, torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder with the model's files")
    parser.add_argument("--dtype", default="auto", choices=get_args(Dtype))
    parser.add_argument("--patches", type=int, nargs="+", default=[256, 1024, 4096, 64, 576], help="of each image")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64], help="of each decode step that is timed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
