"""Whole requests about images by backends of the vision encoder, in turn.

    python -m benchmarks.engine.vision_backends DIR --quantization int8

DIR holds a Qwen3-VL of the 2B release's shape (`python -m benchmarks.engine.shape_2b DIR`). One engine in this process
answers. Prints seconds of the clock and of all cores until the last token, and the ratios of both
to those of the first backend, medians of the rounds.
"""

import argparse
import statistics
import time
from dataclasses import replace

import torch

from benchmarks.engine.in_process import request
from benchmarks.measured import commit, machine
from saccade.engine import startup
from saccade.engine.config import EngineConfig
from saccade.engine.executor.local import LocalExecutor
from saccade.engine.loop import Engine
from saccade.nn.backends import Workload, load_vision_backend

ROWS = (((448, 448), 24), ((1280, 960), 8))
"""Size of the image, and tokens of the answer."""


def measured(engine: Engine, number: int, size: tuple[int, int], num_tokens: int) -> tuple[float, float]:
    """Return the seconds of a request, and those of all cores."""
    engine.requests.submit(0, request(number, size, num_tokens))
    began, used = time.perf_counter(), time.process_time()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - began, time.process_time() - used


def main() -> None:
    """Measure the backends that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--backends", nargs="+", default=["onednn", "openvino"])
    parser.add_argument("--quantization")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    config = EngineConfig(
        arguments.model, "benchmark", device="cpu", dtype="bfloat16", quantization=arguments.quantization,
        max_num_seqs=4, threads=2, enable_prefix_caching=False, kv_cache_bytes=1 << 29, max_inter_token_latency=0,
    )  # fmt: skip
    engine = startup.start(config, lambda *_: None)
    if not isinstance(engine.executor, LocalExecutor):
        raise SystemExit("The engine has several processes.")
    runner = engine.executor.runner
    workload = Workload(dtype=torch.bfloat16)
    backends = {name: load_vision_backend(name, workload) for name in arguments.backends}
    print(f"{machine()}; commit {commit()}; {arguments.quantization or 'bfloat16'}\n", flush=True)
    numbers = iter(range(1, 10_000))
    print("| image, tokens | backend | s | of all cores, s | ratio | of all cores |")
    print("|---|---|---|---|---|---|", flush=True)
    for size, num_tokens in ROWS:
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in backends}
        for turn in range(1 + arguments.rounds):
            for name, backend in backends.items():
                runner.encoder = replace(runner.encoder, backend=backend)
                taken = measured(engine, next(numbers), size, num_tokens)
                times[name] += [taken] if turn else []
        first = times[arguments.backends[0]]
        for name, taken in times.items():
            seconds = [statistics.median(column) for column in zip(*taken, strict=True)]
            pairs = zip(taken, first, strict=True)
            ratios = [[one / other for one, other in zip(*pair, strict=True)] for pair in pairs]
            wall, cpu = (statistics.median(column) for column in zip(*ratios, strict=True))
            figures = " | ".join(f"{figure:.2f}" for figure in (*seconds, wall, cpu))
            print(f"| {size[0]}x{size[1]}, {num_tokens} | {name} | {figures} |", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
