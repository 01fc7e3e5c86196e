"""Encode pictures on a thread of their own, beside the steps."""

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


class EncodeLane:
    """One job at a time, on *num_threads* of torch's. *keys* are the pictures of a job that was not taken yet."""

    def __init__(self, encode: Encode, num_threads: int) -> None:
        self.keys: frozenset[EncoderKey] = frozenset()
        self._encode = encode
        self._pool = ThreadPoolExecutor(1, "encode-lane", torch.set_num_threads, (num_threads,))
        self._job: Future[Encoded] | None = None

    def begin(self, pixels: Mapping[EncoderKey, bytes]) -> None:
        """Start to encode *pixels*. The job before must have been taken."""
        self.keys = frozenset(pixels)
        self._job = self._pool.submit(self._encode, pixels)

    def take(self, patience_seconds: float = 0.0) -> Encoded | None:
        """Return what the job gave, None where there is none or it is not done. Raises what the job raised."""
        if self._job is None or not wait([self._job], patience_seconds).done:
            return None
        job, self._job, self.keys = self._job, None, frozenset()
        return job.result()
