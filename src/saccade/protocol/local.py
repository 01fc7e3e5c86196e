"""What a worker's front and its engine say to one another: fixed structs, one message per step each way."""

import msgspec

from saccade.protocol.description import Description
from saccade.protocol.load import Load


class Forward(msgspec.Struct, frozen=True, array_like=True, tag="forward"):
    """A gateway's command, still encoded: *command* is one msgpack GatewayCommand that came over *connection*."""

    connection: int
    command: bytes


class Reply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    """Send *frame*, an encoded StepFrame of the front's, over a stream that it has lent."""

    connection: int
    frame: bytes


class Hangup(msgspec.Struct, frozen=True, array_like=True, tag="hangup"):
    """A gateway's stream ended: abort all its requests."""

    connection: int


class Watch(msgspec.Struct, frozen=True, array_like=True, tag="watch"):
    """From now on tell *watcher* what these caches hold: a snapshot, then what changes."""

    watcher: int
    blocks: bool
    pictures: bool


class Unwatch(msgspec.Struct, frozen=True, array_like=True, tag="unwatch"):
    """Tell *watcher* nothing more."""

    watcher: int


class Drain(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """No request follows: from now on every Load says draining, the first at once, until Shutdown."""


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """Finish nothing more; release everything and exit."""


FrontMessage = Forward | Reply | Hangup | Watch | Unwatch | Drain | Shutdown
"""Front to engine."""


class EngineReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The model is loaded and warm."""

    description: Description


class EngineProgress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """Loading goes on: *stage* in words, *done* of *total* (0 of 0 where it cannot be counted)."""

    stage: str
    done: int = 0
    total: int = 0


class EngineFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The engine cannot start; *message* is for the operator. The process exits after it."""

    message: str


class EngineStep(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """What a step has to say: encoded StepFrames by connection. The front hears at least once a second, idle or not.

    *iteration* grows by one per loop iteration, idle ones too; a front that sees it stand still knows the engine hangs.
    """

    iteration: int
    frames: list[tuple[int, bytes]]
    load: Load | None = None


class CacheEvents(msgspec.Struct, frozen=True, array_like=True, tag="events"):
    """One encoded KvEvents for *watchers*."""

    watchers: list[int]
    payload: bytes


EngineMessage = EngineReady | EngineProgress | EngineFailed | EngineStep | CacheEvents
"""Engine to front."""
