"""Reads what a vLLM server reports: its model, its cache, its load, how it takes prompts and where it sends events."""

import asyncio
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec

from saccade.connectors.context import ClientContext
from saccade.connectors.events.event_source import EventSource, event_source
from saccade.connectors.events.named_images import NamedImages
from saccade.connectors.events.reported_cache import KeyContext
from saccade.connectors.vllm.http import Http, VllmAddress, check_reply, parsed
from saccade.connectors.vllm.media import ImageForm, probe_body, read_form
from saccade.errors import StartupError, WorkerUnavailable
from saccade.identity.content import files_digest
from saccade.protocol.description import Description, ModelFiles
from saccade.protocol.engine_load import Load
from saccade.protocol.exactness import EXACT, Exactness
from saccade.transport.framing import UNREADABLE

CALL_SECONDS = 20.0
PROBE_SECONDS = 120.0
"""The first image takes long, because the server loads its processor."""

GENERATE, CHAT = "/inference/v1/generate", "/v1/chat/completions"
RENDER = f"{CHAT}/render"
OFF = (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)

MAX_NUM_SEQS = 256
"""vLLM does not report how many sequences it computes at a time; this is the least of its defaults."""

NO_TOKENS = "it takes chats only: it runs without --enable-scale-out"
NO_EVENTS = "it sends no cache events: it runs without --kv-events-config"
NO_CACHE = "its prefix cache is off"

MAX_METRIC_BYTES = 4 << 20
"""vLLM's metrics take about 100 kB, and as much for each further rank of a server."""

_SAMPLE = re.compile(r"^vllm:(\w+)\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class _ListedModel(msgspec.Struct):
    """An entry of /v1/models; one with a *parent* is an adapter."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    """The answer to /v1/models."""

    data: list[_ListedModel]


@dataclass(frozen=True)
class Server:
    """A vLLM server, or one data-parallel rank of it, that can take requests.

    *form* is how images are written for it; if it is None, the server takes chats only, for *chat_reason*. Its cache
    events come from *source*, or *source* is None. *exactness* is how exactly they report what it holds. *context* and
    *naming* are what our keys for its blocks depend on.
    """

    description: Description
    form: ImageForm | None
    chat_reason: str
    source: EventSource | None
    exactness: Exactness
    context: KeyContext
    naming: NamedImages


@dataclass(frozen=True)
class Samples:
    """The samples of a server's /metrics by name, each with its labels."""

    values: Mapping[str, Sequence[tuple[Mapping[str, str], float]]]

    @classmethod
    def read(cls, body: bytes) -> "Samples":
        """Read vLLM's own samples. Raises WorkerUnavailable for more than MAX_METRIC_BYTES."""
        if len(body) > MAX_METRIC_BYTES:
            raise WorkerUnavailable(f"/metrics has more than {MAX_METRIC_BYTES} bytes.")
        values: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for name, labels, value in _SAMPLE.findall(body.decode(errors="replace")):
            values.setdefault(name, []).append((dict(_LABEL.findall(labels)), _number(value)))
        return cls(values)

    def labels(self, name: str, rank: int | None) -> Mapping[str, str]:
        """Return the labels of the first sample *name*, or {} if there is none."""
        return next((labels for labels, _ in self._of(name, rank)), {})

    def total(self, name: str, rank: int | None) -> float:
        """Return the sum of the samples *name* for a rank, or for all ranks."""
        return sum(value for _, value in self._of(name, rank))

    def largest(self, name: str, rank: int | None) -> float:
        """Return the largest of the samples *name* for a rank, or for all ranks."""
        return max((value for _, value in self._of(name, rank)), default=0.0)

    def _of(self, name: str, rank: int | None) -> Iterator[tuple[Mapping[str, str], float]]:
        return ((labels, value) for labels, value in self.values.get(name, ()) if rank is None or _is_of(labels, rank))


def _is_of(labels: Mapping[str, str], rank: int) -> bool:
    return labels.get("engine", "0") == str(rank)


async def discover(http: Http, to: VllmAddress, context: ClientContext) -> Server:
    """Ask the server for its description.

    Raises WorkerUnavailable if it does not answer, and StartupError if it cannot serve.
    """
    rank = to.rank
    await check_health(http)
    models = await _models(http)
    model = models[0]
    version = (await _json(http, "/version")).get("version", "unknown")
    samples = Samples.read(await _body(http, "/metrics"))
    cache = samples.labels("cache_config_info", rank)
    if rank is not None and not cache:
        raise StartupError(f"it has no data-parallel rank {rank}")
    files = await asyncio.to_thread(_read_files, context, model.id, model.root)
    description = describe(models, cache, files, version)
    form, reason = await _probe(http, model.id)
    if form is not None:
        description = msgspec.structs.replace(description, pixel_dtype=form.pixels_dtype)
    sources = await _sources(http)
    try:
        source = event_source(to.host, sources.get(0 if rank is None else rank, {}))
        exactness = exactness_of(source, len(sources), rank, reason)
    except StartupError as error:
        source, exactness = None, Exactness("NONE", error.message)
    if description.enable_prefix_caching is False:
        exactness = Exactness("NONE", NO_CACHE)
    placeholder_id = await asyncio.to_thread(context.placeholder_id, files)
    key_context = KeyContext(
        fingerprint=description.fingerprint,
        block_size=description.block_size,
        page_size=description.block_size,
        max_model_len=description.max_model_len,
    )
    naming = NamedImages(frozenset(() if placeholder_id is None else (placeholder_id,)))
    return Server(description, form, reason, source, exactness, key_context, naming)


def exactness_of(source: EventSource | None, num_sources: int, rank: int | None, chat_reason: str) -> Exactness:
    """Return how exactly the events of *source* report what a server holds; it has *num_sources* in all.

    *chat_reason* says why the server takes chats only, or is "" if it takes token ids.
    """
    if rank is None and num_sources > 1:
        return Exactness("NONE", f"it has {num_sources} data-parallel ranks: add ?ranks={num_sources} to its address")
    if source is None:
        return Exactness("NONE", NO_EVENTS)
    return Exactness("TEXT_PREFIX", chat_reason) if chat_reason else EXACT


async def check_health(http: Http) -> None:
    """Raise WorkerUnavailable if the server is not healthy."""
    status, _ = await http.get("/health", CALL_SECONDS)
    if status != HTTPStatus.OK:
        raise WorkerUnavailable(f"/health answered with {status}.")


async def load(http: Http, rank: int | None, num_blocks: int) -> Load:
    """Return the server's load from its metrics. Raises WorkerUnavailable."""
    return load_of(Samples.read(await _body(http, "/metrics")), rank, num_blocks)


def load_of(samples: Samples, rank: int | None, num_blocks: int) -> Load:
    """Return the load of a rank, or of all ranks together; *num_blocks* is the size of its cache."""
    return Load(
        num_running=int(samples.total("num_requests_running", rank)),
        num_waiting=int(samples.total("num_requests_waiting", rank)),
        num_blocks=num_blocks,
        num_free_blocks=round(num_blocks * (1 - samples.largest("kv_cache_usage_perc", rank))),
        prompt_tokens_total=int(samples.total("prompt_tokens_total", rank)),
        generated_tokens_total=int(samples.total("generation_tokens_total", rank)),
        cached_tokens_total=int(samples.total("prefix_cache_hits_total", rank)),
        drafts_total=int(samples.total("spec_decode_num_drafts_total", rank)),
        draft_tokens_total=int(samples.total("spec_decode_num_draft_tokens_total", rank)),
        accepted_tokens_total=int(samples.total("spec_decode_num_accepted_tokens_total", rank)),
        preemptions_total=int(samples.total("num_preemptions_total", rank)),
    )


def describe(models: Sequence[_ListedModel], cache: Mapping[str, str], files: ModelFiles, version: str) -> Description:
    """Return the description of a server, whose *cache* is the labels of vllm:cache_config_info.

    vLLM does not report its weights, so the fingerprint is that of the files alone. Raises StartupError if it reports
    too little.
    """
    block_size, num_blocks = _count(cache.get("block_size")), _count(cache.get("num_gpu_blocks"))
    max_model_len = models[0].max_model_len
    if not max_model_len or not block_size:
        raise StartupError("it reports neither max_model_len nor the size of its blocks")
    return Description(
        model=models[0].id,
        aliases=tuple(model.id for model in models[1:] if model.parent is None),
        fingerprint=files_digest(files.files),
        files=files,
        max_model_len=max_model_len,
        max_num_seqs=MAX_NUM_SEQS,
        block_size=block_size,
        num_blocks=num_blocks,
        dtype="unknown",
        device="unknown",
        shm_namespace="",
        version=f"vllm {version}",
        enable_prefix_caching=cache.get("enable_prefix_caching") != "False",
    )


def _read_files(context: ClientContext, model: str, root: str | None) -> ModelFiles:
    """Return the files of *model*, whose folder the server calls *root*. Raises StartupError."""
    if model in context.model_files:
        return context.model_files[model]
    folder = Path(root or "")
    if folder.is_absolute() and folder.is_dir():
        return context.read_files(folder)
    raise StartupError(
        f"A vLLM worker sends no files, and its folder is not on this machine: give --model {model}=MODEL, a folder in "
        "hub layout or a hub id."
    )


async def _models(http: Http) -> list[_ListedModel]:
    try:
        body = await _body(http, "/v1/models")
        check_reply(body)
        models = msgspec.json.decode(body, type=_Models).data
    except UNREADABLE as error:
        raise WorkerUnavailable("/v1/models is not as vLLM's.") from error
    if not models:
        raise WorkerUnavailable("/v1/models is empty.")
    return models


async def _probe(http: Http, model: str) -> tuple[ImageForm | None, str]:
    """Return the form of images for requests with token ids, or None and the reason why the server takes chats only."""
    status, body = await http.post(RENDER, probe_body(model), PROBE_SECONDS)
    if status in OFF:
        return None, NO_TOKENS
    if status != HTTPStatus.OK:
        return None, f"it takes chats only: its answer to a trial of {RENDER} was {status}"
    try:
        return read_form(parsed(body)), ""
    except StartupError as error:
        return None, f"it takes chats only: {error.message}"


async def _sources(http: Http) -> dict[int, Mapping[str, Any]]:
    """Return the publishers of cache events by rank, or none if the server has no such endpoint."""
    status, body = await http.get("/kv_event_sources", CALL_SECONDS)
    sources = parsed(body) if status == HTTPStatus.OK else {}
    if not isinstance(sources, dict) or not all(isinstance(source, dict) for source in sources.values()):
        return {}
    return {int(rank): source for rank, source in sources.items() if re.fullmatch(r"[0-9]{1,4}", rank)}


async def _json(http: Http, path: str) -> Mapping[str, Any]:
    models = parsed(await _body(http, path))
    return models if isinstance(models, dict) else {}


async def _body(http: Http, path: str) -> bytes:
    status, body = await http.get(path, CALL_SECONDS)
    if status == HTTPStatus.UNAUTHORIZED:
        raise WorkerUnavailable(f"{path} asks for a key: give it with --worker-token-file.")
    if status != HTTPStatus.OK:
        raise WorkerUnavailable(f"{path} answered with {status}.")
    return body


def _number(value: str) -> float:
    """Return a sample's value, or 0 if it is not a finite number: a gauge without a reading is NaN."""
    try:
        number = float(value)
    except ValueError:
        return 0.0
    return number if math.isfinite(number) else 0.0


def _count(value: str | None) -> int:
    return int(value) if value is not None and re.fullmatch(r"[0-9]{1,18}", value) else 0
