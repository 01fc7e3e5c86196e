"""Chooses one of the workers that serve a model, by the prompt's work there and the work in flight."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

Policy = Literal["auto", "cost", "round_robin", "least_load", "power_of_two", "consistent_hash"]
"""auto is cost if the contents of a worker's cache are reported or assumed, else least_load."""

RECOMPUTE_WEIGHT = 1.5
"""What a token weighs that the prompt makes a worker compute, against one that the prompt waits for.

Work that waits ends by itself, and half of the first waiting prompt is computed already, on average. A prompt that a
worker computes again delays every later prompt, and evicts the blocks of others. With 1, a holder loses its repeats to
idle workers while one new prompt waits there. `benchmarks.routing_simulation` compares weights.
"""


OFFLOADED_SHARE = 0.25
"""What a token in a CPU's memory saves, of what one saves that the worker holds: to load it takes time, too."""

NUM_REQUESTS, PREFILL_TOKENS, DECODE_BLOCKS, NUM_SAMPLES, NUM_ROWS = 0, 2, 3, 4, 5
"""Places of fields of WorkInFlight."""

HASH_BITS = 53
"""A float has room for all of them."""


class WorkInFlight(NamedTuple):
    """The unfinished work that a gateway has sent to a worker. Ordered: fewer requests first, then fewer tokens.

    *prefill_tokens* is the work of requests without a first token, *decode_blocks* the number of blocks in the prompts
    of all others. The requests ask for *num_samples* answers in all, of which *num_rows* may be computed at a time.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    prefill_tokens: int = 0
    decode_blocks: int = 0
    num_samples: int = 0
    num_rows: int = 0


@dataclass(frozen=True)
class Candidates:
    """The workers that could take a prompt, and the terms of its cost there: arrays with an element for each worker.

    Each worker has its own number in *rows* and in *seeds*. *work* is the work in flight, as an array for each field of
    WorkInFlight. The workers have reported *overlap_tokens* of the prompt; *held_tokens* adds those that they are
    expected to hold soon, and a share of those in their CPU's memory. *prompt_tokens* follow these; *image_tokens*
    belong to images that must be encoded. By the workers' reports, *foreign_requests* wait and *foreign_running* run
    that this gateway process cannot have sent. *foreign_decode_blocks* are the blocks of the running ones if each has
    as many as this prompt. A worker of weight 2 in *weights* is taken to be twice as fast as one of weight 1. A token
    that must be computed weighs as much as
    *recompute_weight* tokens that wait.
    """

    rows: IntArray
    seeds: NDArray[np.uint64]
    work: IntArray
    prompt_tokens: IntArray
    image_tokens: IntArray
    overlap_tokens: IntArray
    held_tokens: IntArray
    foreign_requests: IntArray
    foreign_running: IntArray
    foreign_decode_blocks: IntArray
    weights: FloatArray
    recompute_weight: float = RECOMPUTE_WEIGHT

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def left_tokens(self) -> IntArray:
        return self.prompt_tokens + self.image_tokens

    @property
    def foreign_tokens(self) -> IntArray:
        """Tokens of waiting requests from others, each of which is assumed to be as long as this prompt."""
        return self.foreign_requests * (self.prompt_tokens + self.held_tokens)

    @property
    def costs(self) -> FloatArray:
        """The work that the prompt makes, weighted, plus what it waits for, in prompt tokens of a worker of weight 1.

        The sum has the terms of Dynamo's router (ai-dynamo 1.6.1): prefill to do, and blocks in decode. There, a block
        in decode counts as much as a block of prefill. So a busy worker loses prompts that it holds to an idle one,
        which computes them again. Here, a block in decode counts as one token, because a step only reads it.
        """
        waiting = self.work[PREFILL_TOKENS] + self.work[DECODE_BLOCKS] + self.foreign_decode_blocks
        costs: FloatArray = self.recompute_weight * self.left_tokens + waiting + self.foreign_tokens
        return costs / self.weights

    @property
    def loads(self) -> Iterable[FloatArray]:
        """Yield the keys of least_load and power_of_two: requests of all senders, then this gateway's work.

        The request to place counts among the former, as in Envoy's least-request policy. Else a slow worker without
        requests would equal a fast one.
        """
        yield (self.work[NUM_REQUESTS] + self.foreign_requests + self.foreign_running + 1) / self.weights
        yield from self.work / self.weights


class Chooser:
    """Chooses by one *policy*. Ties in cost or load are broken at random. Only consistent_hash uses *affinity*.

    With a *temperature* over 0, the cost policy draws at random: a worker's probability falls with its cost.
    """

    def __init__(self, policy: Policy, random: Random, temperature: float = 0.0) -> None:
        self.policy = policy
        self._temperature = temperature
        self._random = random
        # What each worker is owed, by row: prefill and decode workers are chosen separately.
        self._credits = np.zeros(0, np.float64)

    def copy(self) -> "Chooser":
        """Return a chooser that makes the next choice as this one will."""
        return copy.deepcopy(self)

    def forget(self, row: int) -> None:
        """Owe nothing to the worker at *row*, which has left."""
        self._credits[row : row + 1] = 0

    def effective(self, *, reported: bool) -> Policy:
        """Return the policy that decides: auto is cost or least_load."""
        if self.policy != "auto":
            return self.policy
        return "cost" if reported else "least_load"

    def choose(self, candidates: Candidates, affinity: bytes = b"", *, reported: bool = False) -> int:
        """Return the place of one of several *candidates*. *reported*: the contents of some caches are known."""
        match self.effective(reported=reported):
            case "cost":
                return self._by_cost(candidates.costs)
            case "round_robin":
                return self._next(candidates)
            case "power_of_two":
                return self._least(candidates, np.array(self._random.sample(range(len(candidates)), 2), np.int64))
            case "consistent_hash":
                return int(_distances(affinity, candidates.seeds, candidates.weights).argmin())
            case _:
                return self._least(candidates, np.arange(len(candidates), dtype=np.int64))

    def _by_cost(self, costs: FloatArray) -> int:
        if self._temperature <= 0:
            return self._one_of((costs == costs.min()).nonzero()[0])
        (chosen,) = self._random.choices(range(len(costs)), _weights(costs, self._temperature).tolist())
        return chosen

    def _next(self, candidates: Candidates) -> int:
        """Return the place of the worker that is owed most; each gains its weight, and the chosen one pays for all.

        Smooth weighted round robin (nginx, ngx_http_upstream_round_robin.c): with equal weights the workers take turns.
        """
        rows = candidates.rows
        if (num_missing := int(rows.max()) + 1 - len(self._credits)) > 0:
            self._credits = np.pad(self._credits, (0, num_missing))
        self._credits[rows] += candidates.weights
        chosen = int(self._credits[rows].argmax())
        self._credits[rows[chosen]] -= candidates.weights.sum()
        return chosen

    def _least(self, candidates: Candidates, places: IntArray) -> int:
        """Return one of the *places* with the least load."""
        for load in candidates.loads:
            of_places = load[places]
            places = places[of_places == of_places.min()]
            if len(places) == 1:
                break
        return self._one_of(places)

    def _one_of(self, places: IntArray) -> int:
        return int(places[0 if len(places) == 1 else self._random.randrange(len(places))])


def _weights(costs: FloatArray, temperature: float) -> FloatArray:
    """Return the softmax of -(cost - least) / ((most - least) * temperature), not normalised.

    The formula is that of Dynamo's router (ai-dynamo 1.6.1): costs are scaled, so that a temperature means the same for
    short and for long prompts.
    """
    least = costs.min()
    spread = costs.max() - least
    return np.exp(-(costs - least) / (spread * temperature)) if spread else np.ones_like(costs)


def seed_of(content: bytes) -> int:
    """Return a hash of *content*, 64 bits."""
    return int.from_bytes(blake3(content).digest(8), "little")


def _distances(affinity: bytes, seeds: NDArray[np.uint64], weights: FloatArray) -> FloatArray:
    """Return how far each worker is from *affinity*, over 0; the nearest one gets the prompt.

    A worker that comes or goes moves only its own prompts, and a worker gets as much as its weight among all. Weighted
    rendezvous hashing by logarithms (Schindelhauer and Schomaker, Weighted Distributed Hash Tables, 2005). A worker's
    hash of a prompt is SplitMix64's output function (Steele, Lea and Flood, Fast Splittable Pseudorandom Number
    Generators, 2014) of both their seeds.
    """
    mixed = seeds ^ np.uint64(seed_of(affinity))
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    distances: FloatArray = -np.log(((mixed >> np.uint64(64 - HASH_BITS)) + 0.5) / (1 << HASH_BITS)) / weights
    return distances
