"""The double of a worker, for tests of a fleet: it is, answers and reports what a test says."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from streams import ScriptedStream

from saccade.connectors.sink import Sink, Stream
from saccade.connectors.worker_state import WorkerState, refusals_of
from saccade.protocol.description import Description
from saccade.protocol.engine_load import Load
from saccade.protocol.exactness import EXACT, Exactness
from saccade.protocol.kv_events import KvEvents
from saccade.protocol.output import FinishReason, TokenDelta
from saccade.protocol.request import EngineRequest

TEXT_PREFIX = Exactness("TEXT_PREFIX", "it hashes images by itself")


async def one_token(request: EngineRequest, _: Sink) -> AsyncGenerator[TokenDelta, None]:
    """Answer the token 0 and stop."""
    yield TokenDelta(request.request_id, [0], FinishReason.STOP)


async def nothing() -> AsyncGenerator[KvEvents, None]:
    """Report empty caches, and nothing more."""
    yield KvEvents(1, [], snapshot=True)
    await asyncio.Event().wait()


def stub(url: str, description: Description | None, **facts: Any) -> "StubWorker":
    """Return a ready worker with *description*, unless *facts* say otherwise."""
    worker = StubWorker(url)
    worker.become(description=description, **facts)
    return worker


def draining(url: str, description: Description) -> "StubWorker":
    """Return a worker that ends."""
    return stub(url, description, ready=False, load=Load(draining=True))


@dataclass(eq=False)
class StubWorker:
    """A worker that is as *state* says, answers what *play* yields, and reports what *feed* yields.

    It keeps the *requests* that it got, the request and index of *aborted* samples, and its *resets*.
    """

    url: str
    state: WorkerState = field(default_factory=lambda: WorkerState(ready=True, exactness=EXACT))
    play: Callable[[EngineRequest, Sink], AsyncGenerator[TokenDelta, None]] = one_token
    feed: Callable[[], AsyncGenerator[KvEvents, None]] = nothing
    on_change: Callable[["StubWorker"], object] = lambda _: None
    requests: list[EngineRequest] = field(default_factory=list)
    aborted: list[tuple[str, int]] = field(default_factory=list)
    resets: list[dict[str, bool]] = field(default_factory=list)

    def become(self, **changes: Any) -> None:
        """Change the state, and say so."""
        if (description := changes.get("description")) is not None:
            changes = {"refusals": refusals_of(description), **changes}
        self.state = replace(self.state, **changes)
        self.on_change(self)

    async def start(self) -> None:
        """There is nothing to connect to."""

    async def close(self) -> None:
        """There is nothing to close."""

    def kv_events(self, *, blocks: bool) -> AsyncGenerator[KvEvents, None]:
        return self.feed()

    def generate(self, request: EngineRequest, sink: Sink, chat: object = None) -> Stream:
        self.requests.append(request)
        return ScriptedStream(
            self.play(request, sink), sink, lambda index: self.aborted.append((request.request_id, index))
        )

    def reset_caches(self, **which: bool) -> bool:
        self.resets.append(which)
        return self.state.ready
