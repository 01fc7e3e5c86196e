"""Messages between a worker's front and its engine, as fixed structs."""

import msgspec

from saccade.protocol.description import Description
from saccade.protocol.engine_load import Load


class Forward(msgspec.Struct, frozen=True, array_like=True, tag="forward"):
    """A gateway's command, still encoded: *command* is one msgpack GatewayCommand from *connection*."""

    connection: int
    command: bytes


class Hangup(msgspec.Struct, frozen=True, array_like=True, tag="hangup"):
    """A gateway's stream ended: abort all its requests."""

    connection: int


class Watch(msgspec.Struct, frozen=True, array_like=True, tag="watch"):
    """Start a feed of the *blocks*, the *images* or both for *watcher*: a snapshot, then every change."""

    watcher: int
    blocks: bool
    images: bool


class Unwatch(msgspec.Struct, frozen=True, array_like=True, tag="unwatch"):
    """End the feed of *watcher*."""

    watcher: int


class Drain(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """No more requests follow. From now on every Load has *draining* set; the first is sent at once."""


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """Exit at once: finish no request, and release everything."""


FrontMessage = Forward | Hangup | Watch | Unwatch | Drain | Shutdown
"""Front to engine."""


class EngineReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The model is loaded and warmed up."""

    description: Description


class EngineProgress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """Progress while loading: *done* of *total* units in *stage*, a phrase; 0 of 0 if units cannot be counted."""

    stage: str
    done: int = 0
    total: int = 0


class EngineFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The engine cannot start; *message* is for the operator. The process then exits."""

    message: str


class EngineStep(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """A step's encoded StepFrames, by connection. The engine sends one at least once a second, even when idle.

    *iteration* counts the loop's iterations, including idle ones. If it stops growing, the engine has hung.
    """

    iteration: int
    frames: list[tuple[int, bytes]]
    load: Load | None = None


class CacheEvents(msgspec.Struct, frozen=True, array_like=True, tag="events"):
    """One encoded KvEvents message for *watchers*."""

    watchers: list[int]
    payload: bytes


EngineMessage = EngineReady | EngineProgress | EngineFailed | EngineStep | CacheEvents
"""Engine to front."""
