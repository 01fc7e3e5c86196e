"""Encode pictures on a thread of their own, beside the steps."""

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import torch

from saccade.engine.encoder_cache import EncoderKey


class Encoded(NamedTuple):
    """Features by key, [tokens, width], each in storage of its own; and how long the network took."""

    features: dict[EncoderKey, torch.Tensor]
    seconds: float


Encode = Callable[[Mapping[EncoderKey, bytes]], Encoded]
"""Pixels to features; changes nothing else."""


Keys = frozenset[EncoderKey]


class Job(NamedTuple):
    """Pictures under way together, and what will come of them."""

    keys: Keys
    outcome: Future[Encoded]


class EncodeLane:
    """Jobs one after the other, on *num_threads* of torch's."""

    def __init__(self, encode: Encode, num_threads: int) -> None:
        self._encode = encode
        self._pool = ThreadPoolExecutor(1, "encode-lane", torch.set_num_threads, (num_threads,))
        self._jobs: deque[Job] = deque()

    @property
    def in_flight(self) -> tuple[Keys, ...]:
        """The pictures of each job that was not taken yet, the oldest first."""
        return tuple(job.keys for job in self._jobs)

    def begin(self, pixels: Mapping[EncoderKey, bytes]) -> None:
        """Encode *pixels* together, when the jobs before are done."""
        self._jobs.append(Job(frozenset(pixels), self._pool.submit(self._encode, pixels)))

    def take(self, patience_seconds: float = 0.0) -> Job | None:
        """Return the oldest job if it is done, else None. Its outcome raises what encoding raised."""
        if not self._jobs or not wait([self._jobs[0].outcome], patience_seconds).done:
            return None
        return self._jobs.popleft()
