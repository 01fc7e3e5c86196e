"""A worker that describes itself and reports empty caches, for tests of what is known of workers."""

import asyncio
from collections.abc import AsyncGenerator

from saccade.connectors.sink import Sink, Stream
from saccade.errors import RequestError, WorkerUnavailable
from saccade.protocol.description import Description
from saccade.protocol.engine_load import Load
from saccade.protocol.exactness import EXACT, Exactness
from saccade.protocol.kv_events import KvEvents
from saccade.protocol.request import EngineRequest
from saccade.protocol.request_traits import RequestTraits

TEXT_PREFIX = Exactness("TEXT_PREFIX", "it hashes images by itself")


class Described:
    """A worker as far as a fleet looks at it."""

    def __init__(
        self, url: str, description: Description | None, ready: bool = True, draining: bool = False, loss: str = ""
    ) -> None:
        self.url = url
        self.description = description
        self.ready = ready and not draining
        self.load = Load(draining=True) if draining else None
        self.load_times = (0.0, 0.0)
        self.loss = loss

    async def start(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """Nothing to close."""

    def refuses(self, traits: RequestTraits) -> RequestError | None:
        """It refuses nothing."""
        return None

    def holds(self, salt: bytes, content_hash: bytes) -> bool:
        """It holds no image."""
        return False

    @property
    def exactness(self) -> Exactness:
        return TEXT_PREFIX if self.url == "unix:/text" else EXACT

    async def kv_events(self, *, blocks: bool, images: bool) -> AsyncGenerator[KvEvents, None]:
        """An empty snapshot, and nothing more."""
        yield KvEvents(1, [], snapshot=True)
        await asyncio.Event().wait()

    def generate(self, request: EngineRequest, sink: Sink) -> Stream:
        """It answers nothing."""
        raise WorkerUnavailable("It only describes itself.")

    def reset_caches(self, *, prefix: bool, media: bool) -> bool:
        """It has no caches."""
        return False
