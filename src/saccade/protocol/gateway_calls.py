"""Requests between one gateway's processes. Each has a tag and one type of answer."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from saccade.protocol.exactness import NOTHING, Exactness

S = TypeVar("S", bound=msgspec.Struct)


class FoundOverlaps(msgspec.Struct, frozen=True, array_like=True):
    """How much of a prompt each target holds."""

    of_targets: list[tuple[int, bool, int]]
    """For each: the number of leading blocks that it reported, whether all that it holds is known, and the number of
    the following blocks that it can load from the CPU's memory."""
    holders: list[list[int]]
    """For each image: the indices of the targets that hold it."""


class FindOverlaps(msgspec.Struct, frozen=True, array_like=True, tag="find-overlaps"):
    """Look up how much of a prompt workers hold. Answered by FoundOverlaps."""

    targets: list[tuple[str, int]]
    """Each a worker's name, and the index of its keys in *keys*."""
    keys: list[tuple[bytes, int, list[bytes]]]
    """Each a fingerprint, a block size, and the keys of the prompt's blocks."""
    images: list[bytes] = []
    """Each a salt and a content hash, joined."""


class FeedState(msgspec.Struct):
    """A gateway's knowledge of a worker's caches."""

    reason: str = ""
    """Why it is nothing; "" while the worker's feed is followed."""
    exactness: Exactness = NOTHING
    """That of the worker's kind."""
    num_blocks: int = 0
    """Blocks that it holds."""
    num_states: int = 0
    """Boundaries at which it holds recurrent states."""
    num_events: int = 0
    num_snapshots: int = 0
    num_lost: int = 0
    """Feeds that were lost, for instance by a gap, and requested again."""
    num_orphans: int = 0
    """Blocks that were dropped because the worker does not hold their parents."""


class ShowKnown(msgspec.Struct, frozen=True, array_like=True, tag="show-known"):
    """Report the state of every worker's feed. Answered by KnownWorkers."""


class KnownWorkers(msgspec.Struct, frozen=True):
    """The *workers* that the indexer follows, by URL, and the size of its index in bytes."""

    workers: dict[str, FeedState]
    index_bytes: int


class ShowMetrics(msgspec.Struct, frozen=True, array_like=True, tag="show-metrics"):
    """Report the process's metrics. Answered by a list of MetricFamily."""


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    """A metric with its *samples*: the name, labels and value of each."""

    name: str
    documentation: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]


class ShowWork(msgspec.Struct, frozen=True, array_like=True, tag="show-work"):
    """Report the process's requests. Answered by Work."""


class Booked(msgspec.Struct, frozen=True, kw_only=True):
    """The unfinished work that a gateway has sent to a worker.

    *prefill_tokens* counts the tokens still to compute before first tokens, and *decode_blocks* the blocks of prompts
    past their first token.
    """

    requests: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    decode_blocks: int = 0


def total(kind: type[S], values: Sequence[S]) -> S:
    """Return the sums of *values*, field by field, as a *kind*. All fields of *kind* must be numbers."""
    return kind(**{name: sum(getattr(value, name) for value in values) for name in kind.__struct_fields__})


class RequestError(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was refused or failed."""

    time: float
    """Of its arrival, in seconds since 1970."""
    request_id: str
    method: str
    route: str
    status: int
    """200 if its stream broke off."""
    code: str
    field: str
    """"" if there is nothing to say, like *message*."""
    message: str
    """Without anything that its client sent."""
    model: str | None
    worker: str | None
    """None if it reached none."""
    tenant: str
    """"" without a keys file."""


class Work(msgspec.Struct, frozen=True):
    """The requests that a process is serving, and its bookings by worker URL.

    *num_waiting* requests wait because every worker is at its limit. *errors* are the latest errors, newest first.
    """

    num_requests: int
    booked: dict[str, Booked]
    num_waiting: int = 0
    errors: list[RequestError] = []


class ForgetMedia(msgspec.Struct, frozen=True, array_like=True, tag="forget-media"):
    """Empty the caches of images and URLs. Answered by None."""


class ShowUsage(msgspec.Struct, frozen=True, array_like=True, tag="show-usage"):
    """Report the tenants' usage. Answered by a dictionary of TenantUsage by tenant name."""


class TenantUsage(msgspec.Struct, kw_only=True):
    """A tenant's usage since the start of the process. *cached_tokens* are a part of *prompt_tokens*."""

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    image_bytes: int = 0


SiblingRequest = ShowMetrics | ShowWork | ForgetMedia | ShowUsage
IndexRequest = FindOverlaps | ShowKnown | ShowMetrics
