"""Encode images on a separate thread while steps run."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import torch

from saccade.engine.core.step import EncodeJob


class Encoded(NamedTuple):
    """Features by encoder output id, [tokens, width], each in separate storage; and the network's time.

    Images in *failed*, by encoder output id, have features of zeros.
    """

    features: dict[int, torch.Tensor]
    seconds: float
    failed: tuple[int, ...] = ()


Encode = Callable[[EncodeJob], Encoded]
"""Maps pixels to features, without side effects."""


class AsyncEncoder:
    """Runs jobs one after another, on *num_threads* of torch's threads."""

    def __init__(self, encode: Encode, num_threads: int) -> None:
        self._encode = encode
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(1, "async-encoder")
        self._jobs: deque[tuple[EncodeJob, Future[Encoded]]] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether a job is queued, running or not taken yet."""
        return bool(self._jobs)

    def begin(self, job: EncodeJob) -> None:
        """Queue *job* after the earlier jobs. If the thread cannot be started, the job fails."""
        try:
            future = self._pool.submit(self._run, job)
        except (RuntimeError, MemoryError) as error:
            # The pool has queued the job, and a later thread would run it. A new pool would not.
            self._pool = ThreadPoolExecutor(1, "async-encoder")
            future = Future()
            future.set_exception(error)
        self._jobs.append((job, future))

    def take(self, timeout_seconds: float = 0.0) -> tuple[EncodeJob, Future[Encoded]] | None:
        """Return the oldest job if it is done, else None. Its future raises the exception of the encoding."""
        if not self._jobs or not wait([self._jobs[0][1]], timeout_seconds).done:
            return None
        return self._jobs.popleft()

    def _run(self, job: EncodeJob) -> Encoded:
        # The query comes first: at a thread's first query or parallel call ATen takes the last number set anywhere.
        torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        return self._encode(job)
