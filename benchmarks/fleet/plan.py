"""What is asked, in which order, and what each policy should make of it."""

import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

NUM_SIMULATIONS = 200


@dataclass(frozen=True)
class Plan:
    """Every one of *num_images* images is asked about *num_asks* times: once first, then all others in a shuffle.

    *size* is width and height in pixels; *num_clients* ask at the same time.
    """

    num_images: int = 200
    num_asks: int = 5
    num_clients: int = 16
    size: tuple[int, int] = (448, 448)
    seed: int = 0

    @property
    def first(self) -> list[int]:
        """The numbers of the images, in the order of the first asks."""
        return self._shuffled(1, self.seed)

    @property
    def repeats(self) -> list[int]:
        """The numbers of the images, in the order of the other asks."""
        return self._shuffled(self.num_asks - 1, self.seed + 1)

    def round_robin_rate(self, num_workers: int, hit: float, miss: float) -> float:
        """Return the mean rate of the repeats where workers take turns.

        A repeat counts *hit* where its worker has seen the image before, else *miss*. With several clients the order
        of arrival is not that of the plan, so this is the mean over many orders.
        """
        rates = []
        for seed in range(NUM_SIMULATIONS):
            order = [*self._shuffled(1, 2 * seed), *self._shuffled(self.num_asks - 1, 2 * seed + 1)]
            hits = repeats_found(order, self.num_images, num_workers)
            rates.append(statistics.mean(hit if one else miss for one in hits))
        return statistics.mean(rates)

    def _shuffled(self, times: int, seed: int) -> list[int]:
        numbers = [*range(self.num_images)] * times
        random.Random(seed).shuffle(numbers)
        return numbers


def repeats_found(order: Sequence[int], num_first: int, num_workers: int) -> list[bool]:
    """Return for each ask after the first *num_first* whether its turn falls on a worker that knows its image."""
    seen: defaultdict[int, set[int]] = defaultdict(set)
    hits = []
    for turn, number in enumerate(order):
        worker = turn % num_workers
        hits.append(number in seen[worker])
        seen[worker].add(number)
    return hits[num_first:]
