"""A simulated fleet: a clock, workers, and the router that places prompts at them."""

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np

from benchmarks.routing_simulation.worker import BlockCache, Prompt, SimulatedSequence, Speed, Worker
from saccade.fleet.cost import Policy
from saccade.fleet.index import BlockIndex, Partition
from saccade.fleet.lookup import LocalLookup, Targets
from saccade.fleet.router import Option, RoutedPrompt, Router
from saccade.protocol.kv_events import KvEvent, KvEvents

EVENT_SECONDS = 0.005
"""From the end of a step until the gateway knows what the worker stored."""

GATEWAY_SECONDS = 0.005
"""From the arrival of a prompt until it is placed."""


@dataclass(frozen=True)
class Fleet:
    """*num_workers* workers, each with a cache of *num_blocks* blocks and of *num_images* encoder outputs."""

    num_workers: int
    num_blocks: int
    num_images: int
    block_size: int
    speed: Speed


class Simulation:
    """Runs prompts over a fleet, placed by *policy* with *recompute_weight*."""

    def __init__(self, fleet: Fleet, policy: Policy, recompute_weight: float, seed: int) -> None:
        self.finished: list[SimulatedSequence] = []
        self._partition = Partition(bytes(32), fleet.block_size)
        index = BlockIndex(1 << 40)
        self._router = Router(policy, index, Random(seed), recompute_weight=recompute_weight)
        self._lookup = LocalLookup(index)
        self._now = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        names = [f"worker {number}" for number in range(fleet.num_workers)]
        self._workers = {
            name: Worker(
                name,
                BlockCache(fleet.num_blocks),
                fleet.speed,
                fleet.block_size,
                fleet.num_images,
                self._call_later,
                self._publish,
                self._note_first_token,
                self._note_end,
            )
            for name in names
        }
        self._targets = Targets(names, [self._partition] * len(names))
        self._rows = np.array([self._router.describe(Option(name, self._partition)) for name in names])
        for name in names:
            index.begin(name, self._partition, resumes_at_states=False)
            index.take(name, KvEvents(0, [], snapshot=True))

    def run(self, arrivals: Iterable[tuple[float, Prompt]]) -> Sequence[SimulatedSequence]:
        """Place each prompt at its time, in seconds; return the sequences when all have ended."""
        for seconds, prompt in arrivals:
            self._call_later(seconds + GATEWAY_SECONDS, partial(self._place, prompt, seconds))
        while self._calls:
            self._now, _, call = heapq.heappop(self._calls)
            call()
        return self.finished

    def _call_later(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._calls, (self._now + seconds, next(self._numbers), call))

    def _publish(self, worker: str, events: list[KvEvent]) -> None:
        self._call_later(EVENT_SECONDS, lambda: self._router.index.take(worker, KvEvents(1, events)))

    def _place(self, prompt: Prompt, arrived_at: float) -> None:
        reusable = prompt.keys[: (prompt.num_tokens - 1) // self._partition.block_size]
        routed = RoutedPrompt(prompt.num_tokens, {self._partition: reusable}, prompt.images)
        workers = self._workers.values()
        have_images = [[not one.must_encode(image.key) for one in workers] for image in prompt.images]
        overlaps = self._lookup.find(self._targets, routed.keys)._replace(
            have_images=np.array(have_images, np.bool_).reshape(-1, len(workers))
        )
        booking = self._router.book(routed.among(self._rows, overlaps), self._now)
        self._workers[booking.worker].start(SimulatedSequence(prompt, arrived_at, booking))

    def _note_first_token(self, sequence: SimulatedSequence) -> None:
        sequence.first_token_at = self._now
        sequence.booking.first_token()

    def _note_end(self, sequence: SimulatedSequence) -> None:
        sequence.booking.close(self._now)
        self.finished.append(sequence)
