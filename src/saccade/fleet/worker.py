"""The interface to a worker, whatever its wire."""

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from saccade.connectors.sink import Sink, Stream
from saccade.connectors.worker_state import WorkerState
from saccade.protocol.chat import ChatPrompt
from saccade.protocol.kv_events import KvEvents
from saccade.protocol.request import EngineRequest


class Worker(Protocol):
    """A target of requests: a worker, or one of its data-parallel ranks. *url* is unique in a pool."""

    url: str

    @property
    def state(self) -> WorkerState:
        """What is known about it now."""

    async def start(self) -> None:
        """Begin to connect; returns at once."""

    async def close(self) -> None:
        """Close its connections."""

    def kv_events(self, *, blocks: bool) -> AsyncGenerator[KvEvents, None]:
        """Yield the contents of its caches in our keys: a snapshot's messages, then increments.

        Images are reported if its state says so, blocks only if *blocks* is true. Called only if its exactness is not
        NONE. Raises WorkerUnavailable if there is no feed, and when the feed ends; then discard what it reported.
        """

    def generate(self, request: EngineRequest, sink: Sink, chat: Callable[[], ChatPrompt]) -> Stream:
        """Send *request*; the deltas of its samples go to *sink*, each sample's last with a finish reason.

        A worker that takes chats gets what *chat* returns instead of token ids and media. Slots of the request are
        released when the worker has read them or never will, even if this raises.
        """

    def reset_caches(self, *, prefix: bool, media: bool) -> bool:
        """Tell the worker to drop unused KV blocks or encoder outputs. Return whether it has such a command."""
