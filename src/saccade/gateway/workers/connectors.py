"""From a worker's URL to the client that speaks its wire protocol."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from saccade import models
from saccade.errors import StartupError
from saccade.gateway.workers.worker import Worker
from saccade.models.files import engine_config, parse_json, read_model_files
from saccade.models.spec import PLACEHOLDER_TOKEN_ID
from saccade.protocol.description import ModelFiles
from saccade.protocol.model_files import CONFIG
from saccade.transport.client import WorkerClient
from saccade.transport.connectors import sglang, sglang_address, tokenspeed, vllm_http
from saccade.transport.connectors.sglang_pair import SglangPair
from saccade.transport.connectors.smg_session import ClientContext, Traits
from saccade.transport.connectors.vllm import VllmClient
from saccade.transport.connectors.vllm_server import FileReader
from saccade.transport.credentials import WorkerCredentials
from saccade.transport.wire import target

ADDRESSES = (
    "Saccade's own are unix:/path, grpc://host:port and, with TLS, grpcs://host:port; those of other engines "
    "tokenspeed://host:port, sglang://host:port, vllm://host:port and, with TLS, vllms://host:port."
)


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
