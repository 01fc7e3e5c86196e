"""What it costs to verify proposed tokens, and what it gains: `python -m benchmarks.engine.speculation DIR`.

A script proposes tokens of answers that were computed before, each right with a probability. Prints for each number of
clients, of proposals, and each probability: tokens a step and client, the CPU time of a decode step, and that of all
answers, as multiples of those without proposals, which are measured in turn. The engine runs in this process. DIR holds
any model; `python -m benchmarks.engine.shape_2b DIR` makes one of the 2B release's shape.

With --steady, proposals never pause, so that wrong ones show what they cost. With --idle, it measures what speculation
costs rows that get no proposals: prompt lookup that finds nothing.

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
from saccade.engine.core.proposal_prices import Prices, StepTimes
from saccade.engine.core.sequence import Sequence
from saccade.engine.core.speculation import PromptLookup, Speculation
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


class Nothing(PromptLookup):
    """Looks proposals up, and keeps them to itself."""

    def propose(self, sequence: Sequence, most: int) -> Ordered[int]:
        """Return nothing."""
        super().propose(sequence, most)
        return ()


class Free(StepTimes):
    """Makes proposals free, so that they never pause."""

    def prices(self, num_rows: int, num_tokens: int) -> Prices:
        """Return prices of nothing."""
        return Prices(self, num_rows, num_tokens, 0.0, 0.0, 0.0)


class Shape(NamedTuple):
    """How many clients ask, each with a prompt of *num_prompt* tokens, for *num_tokens*."""

    num_clients: int
    num_prompt: int
    num_tokens: int


class Run(NamedTuple):
    """Answers by request_id; the CPU seconds of all threads in all decodes, and in the median step; tokens a step."""

    answers: dict[str, list[int]]
    cpu_seconds: float
    step_seconds: float
    tokens_per_step: float


def run(engine: Engine, shape: Shape, speculation: Speculation | None) -> Run:
    """Decode the same prompts as every run."""
    engine.scheduler.speculation = speculation
    sampling = SamplingParams(max_tokens=shape.num_tokens, min_tokens=shape.num_tokens, temperature=0)
    for number in range(shape.num_clients):
        token_ids = [(7 * index + 31 * number) % 300 + 1 for index in range(shape.num_prompt)]
        engine.requests.submit(0, EngineRequest(request_id=str(number), token_ids=token_ids, sampling=sampling))
    answers: dict[str, list[int]] = {str(number): [] for number in range(shape.num_clients)}
    steps, num_decoded = [], 0
    while engine.has_work:
        is_decode = any(answers.values())
        began = time.process_time()
        deltas = [delta for frame in engine.step().values() for delta in frame.deltas]
        if is_decode:
            steps.append(time.process_time() - began)
            num_decoded += sum(len(delta.token_ids) for delta in deltas)
        for delta in deltas:
            answers[delta.request_id] += delta.token_ids
    return Run(answers, sum(steps), statistics.median(steps), num_decoded / len(steps))


def measure(
    engine: Engine, shape: Shape, speculations: Mapping[str, Speculation], repeats: int
) -> dict[str, tuple[float, float, float]]:
    """Return what *repeats* runs of each of *speculations* took: tokens a step, and ratios of CPU time.

    Each run is next to one without speculation. The ratios are those of a median step, and of all decodes.
    """
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in speculations}
    for _ in range(repeats):
        for name, speculation in speculations.items():
            plain, other = run(engine, shape, None), run(engine, shape, speculation)
            ratios = other.step_seconds / plain.step_seconds, other.cpu_seconds / plain.cpu_seconds
            found[name].append((other.tokens_per_step / shape.num_clients, *ratios))
    return {
        name: tuple(statistics.median(column) for column in zip(*rows, strict=True)) for name, rows in found.items()
    }  # type: ignore[misc]


def main() -> None:
    """Measure the model that the first argument names, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steady", action="store_true", help="never pause proposals")
    parser.add_argument("--idle", action="store_true", help="measure rows without proposals")
    parser.add_argument("--proposals", type=int, default=4)
    parser.add_argument("--right", type=float, nargs="+", default=[0.0, 0.3, 0.6, 1.0])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    options = parser.parse_args()
    config = EngineConfig(
        options.model, "benchmark", device=options.device, dtype=options.dtype, threads=options.threads,
        quantization=options.quantization, enable_prefix_caching=False, kv_cache_bytes=1 << 29,
        speculative_config=json.dumps({"num_speculative_tokens": options.proposals}),
    )  # fmt: skip
    engine = startup.start(config, lambda *_: None)
    columns = ("clients", "right", "tokens a step and client", "CPU of a step, ratio", "CPU of all answers, ratio")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    times = Free() if options.steady else StepTimes()
    for num_clients in options.clients:
        shape = Shape(num_clients, options.prompt, options.tokens)
        answers = run(engine, shape, None).answers
        rights = {} if options.idle else {f"{right:g}": Script(answers, right) for right in options.right}
        speculations = {name: Speculation(script, options.proposals) for name, script in rights.items()}
        if options.idle:
            speculations["finds nothing"] = Speculation(Nothing(), options.proposals)
        for speculation in speculations.values():
            speculation.times = times
        for name, cells in measure(engine, shape, speculations, options.repeats).items():
            print(f"| {num_clients} | {name} | {' | '.join(f'{cell:.3f}' for cell in cells)} |", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
