"""How long `saccade serve` takes until it is ready, by number format: `python -m benchmarks.engine.starts DIR`.

DIR holds a model, such as one of the 2B release's shape (`python -m benchmarks.engine.shape_2b DIR`); --copy DIR names
one that `saccade quantize` rounded. Each form starts in turn, with the model's files in the page cache. Prints seconds
of the clock and of all cores until the first answer, and the most memory that a process of the server took.
"""

import argparse
import multiprocessing
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import saccade
from benchmarks.measured import MIB, answers, commit, machine


class Start(NamedTuple):
    """Seconds of the clock until the first answer, seconds of all cores until the end, and MiB of the largest process.

    MiB count pages of files that are mapped, too.
    """

    wall: float
    cpu: float
    mib: float


def measured_start(model: str, quantization: str | None) -> Start:
    """Serve *model* until it has answered once. Run it in a process of its own: the largest child counts."""
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with saccade.serve(model, quantization=quantization, served_model_name="tiny-vlm") as server:
        if not answers(server.url.removesuffix("/v1")):
            raise SystemExit("the server does not answer")
        wall = time.monotonic() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Start(wall, cpu, after.ru_maxrss * 1024 / MIB)


def forms(model: str, copy: str | None) -> Iterator[tuple[str, str, str | None]]:
    """Yield each form's name, its model and its --quantization."""
    yield "bfloat16", model, None
    yield "int8", model, "int8"
    yield "int4", model, "int4"
    if copy is not None:
        yield "a rounded copy", copy, None


def main() -> None:
    """Start each form in turn, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--copy", help="a folder that `saccade quantize` wrote")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    print(f"{machine()}; commit {commit()}\n")
    starts: defaultdict[str, list[Start]] = defaultdict(list)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as processes:
        for _ in range(arguments.rounds):
            for name, model, quantization in forms(arguments.model, arguments.copy):
                starts[name].append(processes.submit(measured_start, model, quantization).result())
    print("| form | ready, s | of all cores, s | MiB at most |\n|---|---|---|---|")
    for name, found in starts.items():
        wall, cpu, mib = (statistics.median(figures) for figures in zip(*found, strict=True))
        print(f"| {name} | {wall:.1f} | {cpu:.1f} | {mib:,.0f} |")


if __name__ == "__main__":
    main()
