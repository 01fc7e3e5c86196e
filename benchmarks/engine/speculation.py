"""What it costs to verify proposed tokens, and what it gains: `python -m benchmarks.engine.speculation DIR`.

A script proposes tokens of answers that were computed before, each right with a probability; sequences never pause.
Prints for each number of proposals and each probability: the median decode step, as a multiple of one without
proposals, tokens a step and client, and the speed-up. The engine runs in this process. DIR holds any model;
`python -m benchmarks.engine.shape_2b DIR` makes one of the 2B release's shape.

In bfloat16 the best logit of several tokens at once may be another than that of one: the answers differ, and fewer
proposals are accepted than are right.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Mapping
from typing import NamedTuple

from saccade.engine import startup
from saccade.engine.config import EngineConfig
from saccade.engine.core.sequence import Sequence
from saccade.engine.core.speculation import Speculation
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


class Run(NamedTuple):
    """Answers by request_id, the median seconds of a decode step, tokens a step of all clients, and a second."""

    answers: dict[str, list[int]]
    step_seconds: float
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
    steps, num_decoded = [], 0
    while engine.has_work:
        is_decode = all(sequence.num_generated_tokens for sequence in engine.scheduler.running)
        is_decode = is_decode and len(engine.scheduler.running) == num_clients
        began = time.perf_counter()
        deltas = [delta for frame in engine.step().values() for delta in frame.deltas]
        if is_decode:
            steps.append(time.perf_counter() - began)
            num_decoded += sum(len(delta.token_ids) for delta in deltas)
        for delta in deltas:
            answers[delta.request_id] += delta.token_ids
    return Run(answers, statistics.median(steps), num_decoded / len(steps), num_decoded / sum(steps))


def main() -> None:
    """Measure the model that the first argument names, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=1)
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
    shape = options.clients, options.prompt, options.tokens
    run(engine, *shape, None)
    print("| proposals | right | step, ms | step / plain | tokens a step | speed-up |\n|---|---|---|---|---|---|")
    for num_proposed in options.proposals:
        for right in options.right:
            # Before each row, since the machine may become slower or faster.
            plain = run(engine, *shape, None)
            found = run(engine, *shape, Steady(Script(plain.answers, right), num_proposed))
            cost, gain = found.step_seconds / plain.step_seconds, found.tokens_per_second / plain.tokens_per_second
            per_step = found.tokens_per_step / options.clients
            cells = (num_proposed, right, f"{1000 * found.step_seconds:.2f}", f"{cost:.2f}", f"{per_step:.2f}")
            print(f"| {' | '.join(map(str, cells))} | {gain:.2f} |")
    engine.close()


if __name__ == "__main__":
    main()
