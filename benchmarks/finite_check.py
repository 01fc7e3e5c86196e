"""What the search for NaN and infinity costs a step: `python -m benchmarks.finite_check MODEL_DIR [--threads 1]`.

MODEL_DIR is a model of the 2B shape (`python -m benchmarks.engine.shape_2b MODEL_DIR [--half]`). Steps with the sums of
executor.finite and steps without them take turns in one engine, in this process. Times are processor time, which other
programs of the machine change less. With fewer layers the sums are a larger share of the step.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.measured import commit, machine
from saccade.engine.config import EngineConfig
from saccade.engine.executor import finite
from saccade.engine.loop import Engine
from saccade.engine.startup import start
from saccade.protocol.request import EngineRequest, SamplingParams

SUMS = ("sums_of_rows", "sums_of_chunks", "sums_of_all")


class Check:
    """The functions of executor.finite, timed, or without their work while *is_on* is False."""

    def __init__(self) -> None:
        self.is_on, self.seconds, self._depth = True, 0.0, 0
        for name in SUMS:
            setattr(finite, name, self._timed(name, getattr(finite, name)))

    def _timed(self, name: str, work: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def timed(x: Any, *others: Any) -> torch.Tensor:
            if not self.is_on:
                return torch.zeros(len(others[0]) if name == "sums_of_chunks" else len(x))
            began = time.process_time()
            self._depth += 1
            try:
                return work(x, *others)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.process_time() - began

        return timed


def submit(engine: Engine, name: str, num_prompt: int, num_answer: int, seed: int) -> None:
    """Queue a greedy request whose prompt no other has."""
    token_ids = [seed % 97, *((seed * 31 + index) % 400 for index in range(num_prompt - 1))]
    sampling = SamplingParams(max_tokens=num_answer, temperature=0)
    engine.requests.submit(0, EngineRequest(request_id=f"{name} {seed}", token_ids=token_ids, sampling=sampling))


def timed_step(engine: Engine, check: Check, is_on: bool) -> tuple[float, float]:
    """Return the processor time of a step, and of the sums in it."""
    check.is_on, check.seconds = is_on, 0.0
    began = time.process_time()
    engine.step()
    return time.process_time() - began, check.seconds


def decode(engine: Engine, check: Check, num_rows: int, num_steps: int) -> str:
    """Measure decodes of *num_rows* sequences."""
    for row in range(num_rows):
        submit(engine, f"decode {num_rows}", 64, 2 * num_steps + 8, row)
    while engine.scheduler.waiting or any(one.num_pending_tokens > 1 for one in engine.scheduler.running):
        engine.step()
    steps = [(number % 2 == 0, timed_step(engine, check, number % 2 == 0)) for number in range(2 * num_steps)]
    engine.requests.hangup(0)
    while engine.has_work:
        engine.step()
    return row_of(f"{num_rows} decodes", steps)


def prefill(engine: Engine, check: Check, num_tokens: int, num_steps: int) -> str:
    """Measure prompts of *num_tokens*, each in one step."""
    steps = []
    for number in range(2 * num_steps):
        submit(engine, f"prefill {num_tokens}", num_tokens, 1, number + 1)
        steps.append((number % 2 == 0, timed_step(engine, check, number % 2 == 0)))
        while engine.has_work:
            engine.step()
    return row_of(f"a prompt of {num_tokens} tokens", steps)


def row_of(name: str, steps: list[tuple[bool, tuple[float, float]]]) -> str:
    """Return a row of the table: medians in milliseconds, their ratio, and the share of the sums."""
    on, off = ([times for is_on, times in steps if is_on == wanted] for wanted in (True, False))
    step_on, step_off = (1000 * statistics.median(step for step, _ in times) for times in (on, off))
    share = sum(sums for _, sums in on) / sum(step for step, _ in on)
    sums = 1000 * statistics.median(sums for _, sums in on)
    return f"| {name} | {step_on:.2f} | {step_off:.2f} | {step_on / step_off:.4f} | {sums:.3f} | {share:.3%} |"


def main() -> None:
    """Print the table of *model*."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    config = EngineConfig(
        str(options.model), "benchmark", device=options.device, dtype=options.dtype, threads=options.threads,
        max_num_seqs=8, num_blocks=256, max_model_len=1024, enable_prefix_caching=False,
    )  # fmt: skip
    engine, check = start(config, lambda *_: None), Check()
    print(f"Machine: {machine()}; {options.threads} threads, {options.dtype}  \nCommit: {commit()}  ")
    print(f"Command: python -m benchmarks.finite_check MODEL_DIR --dtype {options.dtype} --steps {options.steps}\n")
    print("| step | with the sums, ms | without, ms | ratio | the sums, ms | their share |\n|---|---|---|---|---|---|")
    for num_rows in (1, 8):
        print(decode(engine, check, num_rows, options.steps), flush=True)
    for num_tokens in (64, 512):
        print(prefill(engine, check, num_tokens, max(2, options.steps // 4)), flush=True)


if __name__ == "__main__":
    main()
