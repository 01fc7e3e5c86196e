"""The interface to a worker, whatever its wire, and the ways in which some workers differ."""

from collections.abc import AsyncGenerator
from typing import Protocol, TypeGuard

from saccade.connectors.sink import Sink, Stream
from saccade.errors import RequestError
from saccade.protocol.chat import ChatPrompt
from saccade.protocol.description import Description
from saccade.protocol.engine_load import Load
from saccade.protocol.exactness import Exactness
from saccade.protocol.kv_events import KvEvents
from saccade.protocol.request import EngineRequest
from saccade.protocol.request_traits import RequestTraits


class Worker(Protocol):
    """A target of requests: a worker, or one of its data-parallel ranks. *url* is unique in a pool."""

    url: str

    @property
    def description(self) -> Description | None:
        """The worker's last description of itself."""

    @property
    def load(self) -> Load | None:
        """The worker's last report of its load."""

    @property
    def load_times(self) -> tuple[float, float]:
        """Two times of the monotonic clock, in seconds; *load* was true at some time between them."""

    @property
    def exactness(self) -> Exactness:
        """How exact the index of its caches can be once all its events have arrived."""

    @property
    def ready(self) -> bool:
        """Whether it can take a request now."""

    @property
    def loss(self) -> str:
        """Why it is not connected, for operators; "" if it is, or has not been tried yet."""

    async def start(self) -> None:
        """Begin to connect; returns at once."""

    async def close(self) -> None:
        """Close its connections."""

    def refuses(self, traits: RequestTraits) -> RequestError | None:
        """Return why this kind of worker cannot serve such a request, or None if it can. Changes nothing.

        That depends only on the needs of *traits*, and on the salt if the worker *serves_one_salt*.
        """

    def holds(self, salt: bytes, content_hash: bytes) -> bool:
        """Return whether it is expected to hold an image's encoder output, so that the pixels need not be sent."""

    def kv_events(self, *, blocks: bool, images: bool) -> AsyncGenerator[KvEvents, None]:
        """Yield the contents of its caches in our keys: a snapshot's messages, then increments.

        Called only if *exactness* is not NONE. Raises WorkerUnavailable if there is no feed, and when the feed ends;
        then discard what it reported.
        """

    def generate(self, request: EngineRequest, sink: Sink) -> Stream:
        """Send *request*; the deltas of its samples go to *sink*, each sample's last with a finish reason.

        Its slots are released when the worker has read them or never will, even if this raises.
        """

    def reset_caches(self, *, prefix: bool, media: bool) -> bool:
        """Tell the worker to drop unused KV blocks or encoder outputs. Return whether it has such a command."""


class ChatWorker(Protocol):
    """A worker that may take chats instead of token ids, and renders and tokenises them itself."""

    @property
    def takes_chats_only(self) -> bool:
        """Whether requests must use generate_chat()."""

    def generate_chat(self, request: EngineRequest, chat: ChatPrompt, sink: Sink) -> Stream:
        """Do the same as Worker.generate(), but send *chat* instead of token ids. The media need no pixels."""


def takes_chats_only(worker: Worker) -> TypeGuard[ChatWorker]:
    """Return whether *worker* gets requests as chats."""
    # An isinstance() check of a protocol takes 20 µs, and each request asks three times.
    return bool(getattr(worker, "takes_chats_only", False))


def serves_one_salt(worker: Worker) -> bool:
    """Return whether *worker* cannot keep tenants apart, and so serves only the first one."""
    return bool(getattr(worker, "serves_one_salt", False))
