"""Settings of what a gateway knows of its workers: where they come from, and how much they get at a time."""

from dataclasses import dataclass
from pathlib import Path

INDEX_BYTES = 512 << 20
"""Of the index of what workers hold: about 4 million blocks, each counted once for every worker that holds it."""


@dataclass(frozen=True)
class DispatchLimits:
    """One of several workers gets as many requests of this gateway at a time as it computes, and *worker_queue* more.

    Of *num_processes* of one gateway, each sends a worker its part of these.

    Where none may get one, at most *max_waiting* requests wait, for *wait_seconds* each. A request whose worker
    fails before the first token is sent again at most *max_retries* times. A worker that is alone gets everything, or
    with *lone_worker_queue* as many as it computes and these.
    """

    worker_queue: int = 64
    max_waiting: int = 256
    wait_seconds: float = 30.0
    max_retries: int = 1
    num_processes: int = 1
    lone_worker_queue: int | None = None


DEFAULT_LIMITS = DispatchLimits()


@dataclass(frozen=True)
class SourceConfig:
    """Sources beside --worker-url: a *file* that is watched, and urls whose hosts are looked up again and again.

    A worker that is dropped may finish its requests for *drain_seconds*.
    """

    file: Path | None = None
    dns: tuple[str, ...] = ()
    drain_seconds: float = 300.0

    def __bool__(self) -> bool:
        return self.file is not None or bool(self.dns)
