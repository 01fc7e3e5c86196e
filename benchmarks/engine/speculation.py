"""What it costs to verify proposed tokens, and what it gains: `python -m benchmarks.engine.speculation DIR`.

A script proposes tokens of answers that were computed before, each right with a probability; sequences never pause.
Prints for each number of proposals and each probability: the median decode step, as a multiple of one without
proposals, tokens a step and client, and the speed-up. The engine runs in this process. DIR holds any model;
`python -m benchmarks.engine.shape_2b DIR` makes one of the 2B release's shape.

With --idle, it measures what speculation costs rows that get no proposals: prompt lookup that finds nothing, and rows
whose proposals were wrong and which pause. It measures an engine without speculation in turn.

In bfloat16 the best logit of several tokens at once may be another than that of one: the answers differ, and fewer
proposals are accepted than are right.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from typing import NamedTuple

from saccade.engine import startup
from saccade.engine.config import EngineConfig
from saccade.engine.core.sequence import Sequence
from saccade.engine.core.speculation import PromptLookup, Proposer, Speculation
from saccade.engine.loop import Engine
from saccade.protocol.request import EngineRequest, SamplingParams


class Script:
    """Proposes *answers* by request_id; each token is right with the probability *right*."""

    def __init__(self, answers: Mapping[str, list[int]], right: float) -> None:
        self._answers, self._right, self._rng = answers, right, random.Random(0)

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """Return the next tokens of the answer, or others."""
        following = self._answers[sequence.request_id][sequence.num_generated_tokens :][:most]
        return [token_id if self._rng.random() < self._right else token_id ^ 1 for token_id in following]


class Steady(Speculation):
    """Speculation that never pauses, so that wrong proposals show what they cost."""

    def note(self, sequence: Sequence, num_accepted: int) -> None:
        """Forget the step."""


class Nothing(PromptLookup):
    """Looks proposals up, and keeps them to itself."""

    def propose(self, sequence: Sequence, most: int) -> Ordered[int]:
        """Return nothing."""
        super().propose(sequence, most)
        return ()


class Run(NamedTuple):
    """Answers by request_id, tokens a step of all clients, and a second; medians of a decode step's seconds.

    *cpu_seconds* are those of all threads.
    """

    answers: dict[str, list[int]]
    step_seconds: float
    cpu_seconds: float
    tokens_per_step: float
    tokens_per_second: float


def run(engine: Engine, num_clients: int, num_prompt: int, num_tokens: int, speculation: Speculation | None) -> Run:
    """Decode the same prompts as every run."""
    engine.scheduler.speculation = speculation
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0)
    for number in range(num_clients):
        token_ids = [(7 * index + 31 * number) % 300 + 1 for index in range(num_prompt)]
        engine.requests.submit(0, EngineRequest(request_id=str(number), token_ids=token_ids, sampling=sampling))
    answers: dict[str, list[int]] = {str(number): [] for number in range(num_clients)}
    steps, cpu, num_decoded = [], [], 0
    while engine.has_work:
        is_decode = all(sequence.num_generated_tokens for sequence in engine.scheduler.running)
        is_decode = is_decode and len(engine.scheduler.running) == num_clients
        began, cpu_before = time.perf_counter(), time.process_time()
        deltas = [delta for frame in engine.step().values() for delta in frame.deltas]
        if is_decode:
            steps.append(time.perf_counter() - began)
            cpu.append(time.process_time() - cpu_before)
            num_decoded += sum(len(delta.token_ids) for delta in deltas)
        for delta in deltas:
            answers[delta.request_id] += delta.token_ids
    per_step, per_second = num_decoded / len(steps), num_decoded / sum(steps)
    return Run(answers, statistics.median(steps), statistics.median(cpu), per_step, per_second)


def measure_idle(engine: Engine, shape: tuple[int, int, int], num_proposed: int, num_repeats: int) -> None:
    """Print a row for each kind of speculation: CPU of a step beside that of one without, in turn *num_repeats* times.

    Pauses last for 64 tokens after eight wrong steps, so that most steps are within one.
    """
    answers = run(engine, *shape, None).answers
    kinds: Mapping[str, Proposer | None] = {"none": None, "finds nothing": Nothing(), "pauses": Script(answers, 0.0)}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(num_repeats):
        for name, proposer in kinds.items():
            speculation = None if proposer is None else Speculation(proposer, num_proposed)
            seconds[name].append(run(engine, *shape, speculation).cpu_seconds)
    for name in list(kinds)[1:]:
        ratios = [found / plain for found, plain in zip(seconds[name], seconds["none"], strict=True)]
        plain, found = (1000 * statistics.median(seconds[one]) for one in ("none", name))
        print(f"| {shape[0]} | {name} | {plain:.3f} | {found:.3f} | {statistics.median(ratios):.3f} |", flush=True)


def measure(engine: Engine, shape: tuple[int, int, int], proposals: list[int], rights: list[float]) -> None:
    """Print a row for each number of proposals and each probability."""
    for num_proposed in proposals:
        for right in rights:
            # Before each row, since the machine may become slower or faster.
            plain = run(engine, *shape, None)
            found = run(engine, *shape, Steady(Script(plain.answers, right), num_proposed))
            cost, gain = found.step_seconds / plain.step_seconds, found.tokens_per_second / plain.tokens_per_second
            cells = (shape[0], num_proposed, right, f"{1000 * found.step_seconds:.2f}", f"{cost:.2f}")
            print(f"| {' | '.join(map(str, cells))} | {found.tokens_per_step / shape[0]:.2f} | {gain:.2f} |")


def main() -> None:
    """Measure the model that the first argument names, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, nargs="+", default=[1])
    parser.add_argument("--idle", type=int, metavar="REPEATS", help="measure rows without proposals, this many times")
    parser.add_argument("--proposals", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--right", type=float, nargs="+", default=[0.0, 0.5, 0.8, 1.0])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    options = parser.parse_args()
    config = EngineConfig(
        options.model, "benchmark", device=options.device, dtype=options.dtype, threads=options.threads,
        enable_prefix_caching=False, kv_cache_bytes=1 << 29,
        speculative_config=json.dumps({"num_speculative_tokens": max(options.proposals)}),
    )  # fmt: skip
    engine = startup.start(config, lambda *_: None)
    shapes = [(num_clients, options.prompt, options.tokens) for num_clients in options.clients]
    run(engine, *shapes[0], None)
    heads: tuple[str, ...] = ("rows", "speculation", "CPU a step without, ms", "with, ms", "ratio")
    if not options.idle:
        heads = ("rows", "proposals", "right", "step, ms", "step / plain", "tokens a step", "speed-up")
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for shape in shapes:
        if options.idle:
            measure_idle(engine, shape, max(options.proposals), options.idle)
        else:
            measure(engine, shape, options.proposals, options.right)
    engine.close()


if __name__ == "__main__":
    main()
