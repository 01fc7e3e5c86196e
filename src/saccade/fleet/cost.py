"""Choose one of the workers that serve a model, by the prompt's work there and the work in flight."""

import math
import operator
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Literal, NamedTuple

from blake3 import blake3

Policy = Literal["auto", "cost", "round_robin", "least_load", "power_of_two", "consistent_hash"]
"""auto is cost if the contents of a worker's cache are reported or assumed, else least_load."""

RECOMPUTE_WEIGHT = 1.5
"""What a token weighs that the prompt makes a worker compute, against one that the prompt waits for.

Work that waits ends by itself, and half of the first waiting prompt is computed already, on average. A prompt that a
worker computes again delays every later prompt, and evicts the blocks of others. With 1, a holder loses its repeats to
idle workers while one new prompt waits there. `benchmarks.routing_simulation` compares weights.
"""


class WorkInFlight(NamedTuple):
    """The unfinished work that a gateway has sent to a worker. Ordered: fewer requests first, then fewer tokens.

    *prefill_tokens* is the work of requests without a first token, *decode_blocks* the blocks of the prompts of all
    others. The requests ask for *num_samples* answers together, of which *num_rows* may be computed at a time.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    prefill_tokens: int = 0
    decode_blocks: int = 0
    num_samples: int = 0
    num_rows: int = 0

    def plus(self, other: "WorkInFlight") -> "WorkInFlight":
        return WorkInFlight(*map(operator.add, self, other))

    def minus(self, other: "WorkInFlight") -> "WorkInFlight":
        """Return the work without *other*, which must be part of it."""
        return WorkInFlight(*map(operator.sub, self, other))


class Candidate(NamedTuple):
    """A worker that could take a prompt: its work in flight, and the prompt's tokens left to compute there.

    The worker has reported *overlap_tokens* of the prompt; *held_tokens* adds those that it is expected to hold soon.
    *prompt_tokens* follow these; *image_tokens* belong to images that must be encoded. By its own report,
    *foreign_requests* wait at the worker and *foreign_running* run there that this gateway process cannot have sent;
    *foreign_decode_blocks* are those of the latter, if each has as many as this prompt. A token left weighs
    *recompute_weight* tokens that wait.
    """

    name: str
    work: WorkInFlight = WorkInFlight()
    prompt_tokens: int = 0
    image_tokens: int = 0
    overlap_tokens: int = 0
    held_tokens: int = 0
    foreign_requests: int = 0
    foreign_running: int = 0
    foreign_decode_blocks: int = 0
    recompute_weight: float = RECOMPUTE_WEIGHT

    @property
    def left_tokens(self) -> int:
        return self.prompt_tokens + self.image_tokens

    @property
    def foreign_tokens(self) -> int:
        """Tokens of waiting requests from others, each as long as this prompt by assumption."""
        return self.foreign_requests * (self.prompt_tokens + self.held_tokens)

    @property
    def cost(self) -> float:
        """Work that the prompt makes, weighted, and work that it waits for, in prompt tokens.

        The sum has the terms of Dynamo's router (ai-dynamo 1.6.1): prefill to do, and blocks in decode. There a block
        in decode counts as much as a block of prefill, so a busy worker loses prompts that it holds to an idle one,
        which computes them again. Here a block in decode counts as one token: a step only reads it.
        """
        own_work = self.recompute_weight * self.left_tokens
        decode_blocks = self.work.decode_blocks + self.foreign_decode_blocks
        return own_work + self.work.prefill_tokens + decode_blocks + self.foreign_tokens

    @property
    def load(self) -> tuple[int, WorkInFlight]:
        """The key of least_load and power_of_two: requests of all senders, then this gateway's work."""
        return self.work.num_requests + self.foreign_requests + self.foreign_running, self.work


class Chooser:
    """Chooses by one *policy*; ties are broken at random. Only consistent_hash uses a prompt's *affinity*.

    With a *temperature* over 0, cost draws: the probability of a worker falls with its cost.
    """

    def __init__(self, policy: Policy, random: Random, temperature: float = 0.0) -> None:
        self.policy = policy
        self._temperature = temperature
        self._random = random
        # Each worker's last turn, because prefill and decode workers are chosen separately.
        self._turns: dict[str, int] = {}

    def effective(self, *, reported: bool) -> Policy:
        """Return the policy that decides: auto is cost or least_load."""
        if self.policy != "auto":
            return self.policy
        return "cost" if reported else "least_load"

    def choose(self, candidates: Sequence[Candidate], affinity: bytes = b"", *, reported: bool = False) -> Candidate:
        """Return one of *candidates*, one or more. *reported*: the contents of some caches are known."""
        if len(candidates) == 1:
            return candidates[0]
        match self.effective(reported=reported):
            case "cost":
                return self._by_cost(candidates)
            case "round_robin":
                chosen = min(candidates, key=lambda each: (self._turns.get(each.name, 0), each.name))
                self._turns[chosen.name] = max(self._turns.values(), default=0) + 1
                return chosen
            case "power_of_two":
                return self._least(self._random.sample(candidates, 2), operator.attrgetter("load"))
            case "consistent_hash":
                return max(candidates, key=lambda each: _rank(affinity, each.name))
            case _:
                return self._least(candidates, operator.attrgetter("load"))

    def _by_cost(self, candidates: Sequence[Candidate]) -> Candidate:
        if self._temperature <= 0:
            return self._least(candidates, operator.attrgetter("cost"))
        (chosen,) = self._random.choices(candidates, _weights([each.cost for each in candidates], self._temperature))
        return chosen

    def _least(self, candidates: Sequence[Candidate], measure: Callable[[Candidate], Any]) -> Candidate:
        measures = list(map(measure, candidates))
        least = min(measures)
        return self._random.choice([each for each, size in zip(candidates, measures, strict=True) if size == least])


def _weights(costs: Sequence[float], temperature: float) -> list[float]:
    """Return the softmax of -(cost - least) / ((most - least) * temperature), not normalised.

    The formula is that of Dynamo's router (ai-dynamo 1.6.1): costs are scaled, so that a temperature means the same for
    short and for long prompts.
    """
    least = min(costs)
    spread = max(costs) - least
    return [math.exp(-(cost - least) / (spread * temperature)) if spread else 1.0 for cost in costs]


def _rank(affinity: bytes, name: str) -> bytes:
    """Return the rank of a worker for *affinity*: a worker that comes or goes moves only its own prompts.

    Rendezvous hashing (Thaler and Ravishankar, 1998).
    """
    return blake3(len(affinity).to_bytes(8, "little") + affinity + name.encode()).digest()
