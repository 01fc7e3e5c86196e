"""What the gateway asks of a worker, whatever its wire protocol."""

from collections.abc import AsyncGenerator
from typing import Protocol, TypeGuard, runtime_checkable

from saccade.errors import ContextLengthExceeded, RequestError
from saccade.protocol.chat import ChatPrompt
from saccade.protocol.description import Description
from saccade.protocol.engine_load import Load
from saccade.protocol.exactness import Exactness
from saccade.protocol.kv_events import KvEvents
from saccade.protocol.request import EngineRequest
from saccade.protocol.request_traits import RequestTraits
from saccade.transport.sink import Sink, Stream


class Worker(Protocol):
    """A target of requests: a worker, or one data-parallel rank of it. *url* is unique in a fleet."""

    url: str

    @property
    def description(self) -> Description | None:
        """What it said of itself last."""

    @property
    def load(self) -> Load | None:
        """What it said of its work last."""

    @property
    def load_times(self) -> tuple[float, float]:
        """Two times of the monotonic clock, in seconds, between which it was as busy as *load* says."""

    @property
    def exactness(self) -> Exactness:
        """How exactly its reports can tell what it holds, once all of them have arrived."""

    @property
    def ready(self) -> bool:
        """Whether it can take a request now."""

    async def start(self) -> None:
        """Begin to connect; returns at once."""

    async def close(self) -> None:
        """Close its connections."""

    def refuses(self, traits: RequestTraits) -> RequestError | None:
        """Return why this kind of worker cannot serve such a request, None where it can. Changes nothing."""

    def holds(self, salt: bytes, content_hash: bytes) -> bool:
        """Whether it is believed to hold an image's encoding, so that the pixels need not be sent."""

    def kv_events(self, *, blocks: bool, images: bool) -> AsyncGenerator[KvEvents, None]:
        """Yield what its caches hold, in our keys: a snapshot's messages, then increments.

        Raises WorkerUnavailable where there is no feed, or no longer: what was learnt from it is void then. Called only
        where *exactness* is not NONE.
        """

    def generate(self, request: EngineRequest, sink: Sink) -> Stream:
        """Send *request*; the deltas of its samples go to *sink*, the last of each with a finish reason.

        Its slots come back when the worker has read them, or never will, also if this raises.
        """

    def reset_caches(self, *, prefix: bool, media: bool) -> bool:
        """Have the worker drop unused KV blocks or encodings. Return whether it takes such a command."""


@runtime_checkable
class ChatWorker(Protocol):
    """A worker that may take no token ids: then it renders and tokenises a request's chat by itself."""

    @property
    def takes_chats_only(self) -> bool:
        """Whether requests must go by generate_chat()."""

    def generate_chat(self, request: EngineRequest, chat: ChatPrompt, sink: Sink) -> Stream:
        """Do as Worker.generate(), but send *request* by its *chat*. Its media need no pixels."""


def takes_chats_only(worker: Worker) -> TypeGuard[ChatWorker]:
    """Whether requests go to *worker* as chats."""
    return isinstance(worker, ChatWorker) and worker.takes_chats_only


def refusal(worker: Worker, traits: RequestTraits) -> RequestError | None:
    """Return why *worker* cannot serve such a request, None where it can."""
    description, sampling = worker.description, traits.sampling
    if description is not None and sampling is not None:
        max_len = description.max_model_len
        if traits.num_tokens + sampling.max_tokens > max_len:
            return ContextLengthExceeded.of(max_len, traits.num_tokens, sampling.max_tokens, "messages")
    return worker.refuses(traits)
