"""The workers of a gateway, whatever their wire protocols, and which of them can serve a model."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, TypeGuard

from saccade import models
from saccade.errors import ContextLengthExceeded, ModelNotFound, RequestError, StartupError, WorkerUnavailable
from saccade.gateway.workers.compatibility import Compatibility
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
from saccade.transport.credentials import NO_CREDENTIALS, WorkerCredentials
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

    @property
    def loss(self) -> str:
        """Why it is not connected, for operators; "" if it is, or has not been tried yet."""

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


def clients(url: str, context: ClientContext, credentials: WorkerCredentials) -> tuple[Worker, ...]:
    """Return a client for every target of *url*, not started. Raises StartupError if *url* is malformed."""
    if url.startswith(tokenspeed.SCHEME):
        return (tokenspeed.TokenSpeedClient(url, context),)
    if url.startswith(sglang_address.SCHEME):
        is_pair = bool(sglang_address.SglangAddress.read(url).prefill)
        return (SglangPair(url, context) if is_pair else sglang.SglangClient(url, context),)
    if url.startswith(vllm_http.SCHEMES):
        reader = FileReader(context.model_files, context.read_files, _placeholder_id)
        return tuple(
            VllmClient(one, context.on_released, context.on_change, credentials, reader)
            for one in vllm_http.rank_urls(url)
        )
    return (WorkerClient(url, context.on_released, context.on_change, credentials),)


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


logger = logging.getLogger(__name__)
MAX_SHOWN_CHARACTERS = 100
"""A longer model name from a request is cut in errors."""


@dataclass(frozen=True)
class Model:
    """A served model: its name, its first ready worker's description, and its workers that are ready now."""

    name: str
    description: Description
    workers: tuple[Worker, ...]


class WorkerPool:
    """The workers at *urls*, connected between start() and close().

    *on_released* gets the names of shared-memory slots that no worker will read any more, *on_discarded* those that a
    worker may still be reading. *model_files* has files by model name, for workers that send none. Saccade workers get
    *credentials*. Workers of a model in *assumed_releases* share its work, whatever they report of it.
    """

    def __init__(
        self,
        urls: Sequence[str],
        on_released: Callable[[Sequence[str]], None],
        on_discarded: Callable[[Sequence[str]], None] | None = None,
        model_files: Mapping[str, ModelFiles] = MappingProxyType({}),
        credentials: WorkerCredentials = NO_CREDENTIALS,
        assumed_releases: Collection[str] = (),
    ) -> None:
        self.releases = Compatibility(assumed_releases)
        self.release = on_released
        self._clients: list[Worker] = []
        self._listeners: list[Callable[[Model], None]] = []
        self._watchers: list[Callable[[], None]] = []
        self._leaving: list[Worker] = []
        self._forgetters: list[Callable[[str], Awaitable[None]]] = []
        self._announcements: dict[str, Description] = {}
        self._credentials = credentials
        self._context = ClientContext(
            on_released, self.changed, on_discarded or on_released, model_files, read_model_files, _traits
        )
        for url in targets(urls):
            self.join(url)

    async def start(self) -> None:
        """Begin to connect to every worker; return at once."""
        await asyncio.gather(*(client.start() for client in self._clients))

    async def close(self) -> None:
        """Close every connection; requests that still run fail with WorkerFailed."""
        await asyncio.gather(*(client.close() for client in (*self._clients, *self._leaving)))

    @property
    def ready(self) -> bool:
        """Whether at least one worker can take a request."""
        return any(client.ready for client in self._clients)

    @property
    def clients(self) -> tuple[Worker, ...]:
        """Every worker, ready or not, in the order of the urls."""
        return tuple(self._clients)

    @property
    def leaving(self) -> tuple[Worker, ...]:
        """Removed workers, which finish their requests and get no new ones."""
        return tuple(self._leaving)

    def add(self, client: Worker) -> None:
        """Add a worker, which the caller starts, or take back one that is leaving."""
        self._clients.append(client)
        if client in self._leaving:
            self._leaving.remove(client)
            self._notify()

    def join(self, url: str) -> tuple[Worker, ...]:
        """Add a client for every target of *url*; the caller starts them. Raises StartupError."""
        joined = clients(url, self._context, self._credentials)
        for client in joined:
            self.add(client)
        return joined

    def remove(self, client: Worker) -> None:
        """Send *client* no more requests; those that it has go on. The caller closes it, then calls forget()."""
        self._clients.remove(client)
        self._leaving.append(client)
        logger.info("worker %s is removed: it gets no more requests", client.url)
        self._notify()

    async def forget(self, client: Worker) -> None:
        """Drop all state about *client*, which has left and has no requests."""
        for forgetter in self._forgetters:
            await forgetter(client.url)
        if client in self._leaving:
            self._leaving.remove(client)

    def reset_caches(self, *, prefix: bool, media: bool) -> list[str]:
        """Tell every worker to drop what no request uses; return the urls of workers without this command."""
        return [client.url for client in self._clients if not client.reset_caches(prefix=prefix, media=media)]

    def changed(self, client: Worker) -> None:
        """Handle a change of readiness or description of *client*."""
        logger.info("worker %s is %s", client.url, "ready" if client.ready else "not ready")
        if client.description is not None and client.ready and client in self._clients:
            self._log_difference(client, client.description)
        self._notify()

    def _notify(self) -> None:
        self._announce()
        for watcher in self._watchers:
            watcher()

    def _announce(self) -> None:
        """Announce each model that is new, or whose workers now have a release with other files, or another length."""
        for model in self.models():
            last, now = self._announcements.get(model.name), model.description
            if model.workers and (
                last is None
                or last.max_model_len != now.max_model_len
                or (self.releases.difference(last, now) and last.files != now.files)
            ):
                self._announcements[model.name] = now
                for listener in self._listeners:
                    listener(model)

    def _log_difference(self, client: Worker, description: Description) -> None:
        model = self._model(description.model)
        if difference := self.releases.reported_difference(description, model.description):
            gets_work = client in model.workers
            level, gets = (logging.WARNING, "work all the same") if gets_work else (logging.ERROR, "no work")
            logger.log(
                level,
                "worker %s serves another release of %r than the first worker (%s): it gets %s",
                *(client.url, description.model, difference, gets),
            )

    def on_model(self, listener: Callable[[Model], None]) -> None:
        """Call *listener* with each model, now or when first served, and again when its files or length change."""
        self._listeners.append(listener)
        for model in self.models():
            self._announcements[model.name] = model.description
            listener(model)

    def on_change(self, watcher: Callable[[], None]) -> None:
        """Call *watcher* when a worker comes or goes, or its readiness or description changes."""
        self._watchers.append(watcher)

    def on_forget(self, forgetter: Callable[[str], Awaitable[None]]) -> None:
        """Call *forgetter* with the url of a worker that has left; it drops its state about that worker."""
        self._forgetters.append(forgetter)

    def models(self) -> list[Model]:
        """Return every model that a worker has described, ready or not, in the order of the urls."""
        return [self._model(name) for name in dict.fromkeys(self._names().values())]

    def model(self, name: str) -> Model:
        """Return the model that requests call *name*, with at least one ready worker.

        Raises ModelNotFound and WorkerUnavailable.
        """
        names = self._names()
        if not names:
            raise WorkerUnavailable("No worker is ready yet; try again shortly.")
        if name not in names:
            excerpt = name if len(name) <= MAX_SHOWN_CHARACTERS else name[:MAX_SHOWN_CHARACTERS] + "..."
            served = f"served: {', '.join(names)}."
            raise ModelNotFound(
                f"The model {excerpt!r} is not served here; {served}", "model", reason=f"Not served here; {served}"
            )
        model = self._model(names[name])
        if not model.workers:
            raise WorkerUnavailable(f"No worker of the model {name!r} is ready; try again shortly.")
        return model

    def aliases(self, name: str) -> tuple[str, ...]:
        return tuple(alias for alias, meant in self._names().items() if meant == name and alias != name)

    def _names(self) -> dict[str, str]:
        """Return the model of every name that a request may use; a model's own name wins over an alias."""
        descriptions = [client.description for client in self._clients if client.description]
        names = {one.model: one.model for one in descriptions}
        for one in descriptions:
            names |= {alias: one.model for alias in one.aliases if alias not in names}
        return names

    def _model(self, name: str) -> Model:
        """Return the model *name*, without workers whose release differs from the first ready worker's."""
        described = [(client, client.description) for client in self._clients if client.description]
        serving = [(client, description) for client, description in described if description.model == name]
        ready = [(client, description) for client, description in serving if client.ready]
        first = (ready or serving)[0][1]
        workers = tuple(
            client
            for client, description in ready
            if description.fingerprint == first.fingerprint or not self.releases.difference(description, first)
        )
        return Model(name=name, description=first, workers=workers)
