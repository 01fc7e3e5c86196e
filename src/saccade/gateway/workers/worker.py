"""The gateway's interface to a worker, whatever its wire protocol, and the client for the protocol of a url."""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

from saccade import models
from saccade.errors import ContextLengthExceeded, RequestError, StartupError
from saccade.models.files import engine_config, parse_json, read_model_files
from saccade.models.spec import PLACEHOLDER_TOKEN_ID
from saccade.protocol.chat import ChatPrompt
from saccade.protocol.description import Description, ModelFiles
from saccade.protocol.engine_load import Load
from saccade.protocol.exactness import Exactness
from saccade.protocol.kv_events import KvEvents
from saccade.protocol.model_files import CONFIG
from saccade.protocol.request import EngineRequest
from saccade.protocol.request_traits import RequestTraits
from saccade.transport.client import WorkerClient
from saccade.transport.connectors import sglang, sglang_address, tokenspeed, vllm_http
from saccade.transport.connectors.sglang_pair import SglangPair
from saccade.transport.connectors.smg_session import ClientContext, Traits
from saccade.transport.connectors.vllm import VllmClient
from saccade.transport.connectors.vllm_server import FileReader
from saccade.transport.credentials import WorkerCredentials
from saccade.transport.sink import Sink, Stream
from saccade.transport.wire import target

ADDRESSES = (
    "Saccade's own are unix:/path, grpc://host:port and, with TLS, grpcs://host:port; those of other engines "
    "tokenspeed://host:port, sglang://host:port, vllm://host:port and, with TLS, vllms://host:port."
)


class Worker(Protocol):
    """A target of requests: a worker, or one of its data-parallel ranks. *url* is unique in a pool."""

    url: str

    @property
    def description(self) -> Description | None:
        """Its last description of itself."""

    @property
    def load(self) -> Load | None:
        """Its last report of its load."""

    @property
    def load_times(self) -> tuple[float, float]:
        """Two times of the monotonic clock, in seconds; *load* was true at some time between them."""

    @property
    def exactness(self) -> Exactness:
        """How exact the index of its caches can be once all its events have arrived."""

    @property
    def ready(self) -> bool:
        """Whether it can take a request now."""

    async def start(self) -> None:
        """Begin to connect; returns at once."""

    async def close(self) -> None:
        """Close its connections."""

    def refuses(self, traits: RequestTraits) -> RequestError | None:
        """Return why this kind of worker cannot serve such a request, None if it can. Changes nothing."""

    def holds(self, salt: bytes, content_hash: bytes) -> bool:
        """Whether it is expected to hold an image's encoder output, so that the pixels need not be sent."""

    def kv_events(self, *, blocks: bool, images: bool) -> AsyncGenerator[KvEvents, None]:
        """Yield the contents of its caches in our keys: a snapshot's messages, then increments.

        Called only if *exactness* is not NONE. Raises WorkerUnavailable without a feed or at its end, which voids it.
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
        """As Worker.generate(), but send *chat* instead of token ids. The media need no pixels."""


def takes_chats_only(worker: Worker) -> TypeGuard[ChatWorker]:
    """Whether *worker* gets requests as chats."""
    # An isinstance() check of a protocol takes 20 µs, and each request asks three times.
    return bool(getattr(worker, "takes_chats_only", False))


def refusal(worker: Worker, traits: RequestTraits) -> RequestError | None:
    """Return why *worker* cannot serve such a request, None if it can."""
    description, sampling = worker.description, traits.sampling
    if description is not None and sampling is not None:
        max_len = description.max_model_len
        if traits.num_tokens + sampling.max_tokens > max_len:
            return ContextLengthExceeded.of(max_len, traits.num_tokens, sampling.max_tokens, "messages")
    return worker.refuses(traits)


@dataclass(frozen=True)
class Hooks:
    """Callbacks and settings of every client in a pool.

    *on_released* gets the names of shared-memory slots that no worker will read any more, *on_discarded* those that a
    worker may still be reading. *on_change* gets a client whose readiness has changed. *model_files* has files by model
    name, for workers that send none.
    """

    on_released: Callable[[Sequence[str]], None]
    on_change: Callable[[Worker], None]
    on_discarded: Callable[[Sequence[str]], None]
    model_files: Mapping[str, ModelFiles]
    credentials: WorkerCredentials


def clients(url: str, hooks: Hooks) -> tuple[Worker, ...]:
    """Return a client for every target of *url*, not started. Raises StartupError if *url* is malformed."""
    context = ClientContext(
        hooks.on_released, hooks.on_change, hooks.on_discarded, hooks.model_files, read_model_files, _traits
    )
    if url.startswith(tokenspeed.SCHEME):
        return (tokenspeed.TokenSpeedClient(url, context),)
    if url.startswith(sglang_address.SCHEME):
        is_pair = bool(sglang_address.SglangAddress.read(url).prefill)
        return (SglangPair(url, context) if is_pair else sglang.SglangClient(url, context),)
    if url.startswith(vllm_http.SCHEMES):
        reader = FileReader(hooks.model_files, read_model_files, _placeholder_id)
        return tuple(
            VllmClient(one, hooks.on_released, hooks.on_change, hooks.credentials, reader)
            for one in vllm_http.rank_urls(url)
        )
    return (WorkerClient(url, hooks.on_released, hooks.on_change, hooks.credentials),)


def targets(urls: Iterable[str]) -> tuple[str, ...]:
    """Return *urls* without repetitions, and with SGLang's prefill and decode workers paired. Raises StartupError."""
    return sglang_address.paired(dict.fromkeys(urls))


def is_half(url: str) -> bool:
    """Whether *url* is one side of pairs, which serves nothing without the other. Raises StartupError."""
    return url.startswith(sglang_address.SCHEME) and bool(sglang_address.SglangAddress.read(url).role)


def check_url(url: str) -> None:
    """Raise StartupError if *url* is no worker's address."""
    if not url.isprintable() or " " in url:
        raise StartupError(f"A worker's address has no spaces and no control characters, unlike {url!r}.")
    if url.startswith(sglang_address.SCHEME):
        sglang_address.SglangAddress.read(url)
    elif url.startswith(vllm_http.SCHEMES):
        vllm_http.rank_urls(url)
    else:
        try:
            target(url.replace(tokenspeed.SCHEME, "grpc://", 1))
        except StartupError as error:
            raise StartupError(f"{url!r} is no worker's address. {ADDRESSES}") from error


def _traits(files: ModelFiles) -> Traits:
    """Return what the connectors to other projects' workers must know of a model."""
    config = parse_json(files, CONFIG)
    family = models.families()[models.family_of(config)]
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    kinds = {kind for part in parts for kind in part.get("layer_types") or ()}
    return Traits(
        grid_name=family.external_grid,
        plain_positions=family.plain_positions,
        keeps_every_token=kinds <= {"full_attention"} and not any("full_attention_interval" in part for part in parts),
    )


def _placeholder_id(files: ModelFiles) -> int | None:
    """Return the token id that stands for images, None if the files name none. Raises StartupError."""
    family = models.families()[models.family_of(parse_json(files, CONFIG))]
    token_id: int | None = engine_config(files, family)[PLACEHOLDER_TOKEN_ID]
    return token_id
