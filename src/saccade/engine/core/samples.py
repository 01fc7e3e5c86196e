"""The samples of one request: live, not started yet, or parked until others end."""

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Self

import msgspec

from saccade.engine.core.sequence import Sequence


@dataclass(slots=True)
class Samples:
    """The *live* samples by index, the indices of samples that have not started, and the *parked* samples.

    No more than *num_at_once* run at a time.
    """

    live: dict[int, Sequence]
    unstarted: list[int]
    num_at_once: int
    parked: deque[Sequence] = field(default_factory=deque)

    @classmethod
    def of_sequence(cls, sequence: Sequence) -> Self:
        """Return the samples of the request that *sequence*, the first one, belongs to.

        A transfer of state needs all samples at once.
        """
        request = sequence.request
        num_at_once = request.num_at_once
        if num_at_once is msgspec.UNSET or request.kv_transfer is not None:
            num_at_once = request.num_samples
        return cls({0: sequence}, list(range(1, request.num_samples)), num_at_once)

    def begin_samples(self, sequence: Sequence) -> list[Sequence]:
        """Turn the samples that have not started into live sequences like *sequence*, and return them."""
        samples = [sequence.sample(index) for index in self.unstarted]
        self.live.update((sample.index, sample) for sample in samples)
        self.unstarted.clear()
        return samples

    def next_of(self, parked: Container[Sequence]) -> Sequence | None:
        """Remove and return the next parked sample that is still in the scheduler's *parked*, or None."""
        while self.parked:
            sample = self.parked.popleft()
            if sample in parked:
                return sample
        return None
