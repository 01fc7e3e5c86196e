"""Pick one of the workers that serve a model: by the work that a prompt would be there and the work already there."""

import operator
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Literal, NamedTuple

from blake3 import blake3

Policy = Literal["auto", "cost", "round_robin", "least_load", "power_of_two", "consistent_hash"]
"""auto is cost where a worker reports what it holds, else least_load."""


class WorkInFlight(NamedTuple):
    """What a gateway has sent to a worker and not yet got back. Ordered: fewer requests first, then fewer tokens.

    *prefill_tokens* is the work of requests without a first token, *decode_blocks* the blocks of the prompts of all
    others.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    prefill_tokens: int = 0
    decode_blocks: int = 0

    def plus(self, other: "WorkInFlight") -> "WorkInFlight":
        """Return both together."""
        return WorkInFlight(*map(operator.add, self, other))

    def minus(self, other: "WorkInFlight") -> "WorkInFlight":
        """Return the work without *other*, which must be part of it."""
        return WorkInFlight(*map(operator.sub, self, other))


class Candidate(NamedTuple):
    """A worker that could take a prompt: its work in flight, and the tokens that the prompt leaves to compute there.

    *overlap_tokens* is what it has reported to hold of the prompt, *held_tokens* that or more, with what it is expected
    to hold soon. *prompt_tokens* stand after these; *picture_tokens* are those of pictures that must be encoded.
    """

    name: str
    work: WorkInFlight = WorkInFlight()
    prompt_tokens: int = 0
    picture_tokens: int = 0
    overlap_tokens: int = 0
    held_tokens: int = 0

    @property
    def left_tokens(self) -> int:
        return self.prompt_tokens + self.picture_tokens

    @property
    def cost(self) -> int:
        """Work before the first token, in prompt tokens.

        The sum has the terms of Dynamo's router (ai-dynamo 1.6.1): prefill to do, and blocks in decode. There a block
        in decode counts as much as a block of prefill, so that a busy worker loses prompts that it holds to an idle
        one, which computes them again. Here a block in decode counts as one token: a step only reads it.
        """
        return self.left_tokens + self.work.prefill_tokens + self.work.decode_blocks


class Chooser:
    """Chooses by one *policy*; ties are broken at random. *affinity* of a prompt matters to consistent_hash alone."""

    def __init__(self, policy: Policy, random: Random) -> None:
        self.policy = policy
        self._random = random
        self._turn = 0

    def choose(self, candidates: Sequence[Candidate], affinity: bytes = b"", *, reported: bool = False) -> Candidate:
        """Return one of *candidates*, of which there is at least one. *reported*: some say what they hold."""
        if len(candidates) == 1:
            return candidates[0]
        match self.policy:
            case "cost" | "auto" if self.policy == "cost" or reported:
                return self._least(candidates, lambda each: each.cost)
            case "round_robin":
                self._turn += 1
                return sorted(candidates)[(self._turn - 1) % len(candidates)]
            case "power_of_two":
                return self._least(self._random.sample(candidates, 2), lambda each: each.work)
            case "consistent_hash":
                return max(candidates, key=lambda each: _rank(affinity, each.name))
            case _:
                return self._least(candidates, lambda each: each.work)

    def _least(self, candidates: Sequence[Candidate], measure: Callable[[Candidate], Any]) -> Candidate:
        least = min(map(measure, candidates))
        return self._random.choice([each for each in candidates if measure(each) == least])


def _rank(affinity: bytes, name: str) -> bytes:
    """Return the rank of a worker for *affinity*: a worker that comes or goes moves only prompts of its own.

    Rendezvous hashing (Thaler and Ravishankar, 1998).
    """
    return blake3(len(affinity).to_bytes(8, "little") + affinity + name.encode()).digest()
