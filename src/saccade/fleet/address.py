"""Addresses of workers: each scheme's connector, and what it must know about a model."""

from collections.abc import Iterable

from saccade import models
from saccade.connectors.context import ClientContext, Traits
from saccade.connectors.native.client import WorkerClient
from saccade.connectors.smg import sglang, sglang_address, tokenspeed
from saccade.connectors.smg.sglang_pair import SglangPair
from saccade.connectors.vllm import http as vllm_http
from saccade.connectors.vllm.client import VllmClient
from saccade.errors import StartupError
from saccade.fleet.worker import Worker
from saccade.models.files import engine_config, parse_json
from saccade.models.spec import PLACEHOLDER_TOKEN_ID
from saccade.protocol.description import ModelFiles
from saccade.protocol.model_files import CONFIG
from saccade.transport.wire import target

ADDRESSES = (
    "Saccade's own are unix:/path, grpc://host:port and, with TLS, grpcs://host:port; those of other engines "
    "tokenspeed://host:port, sglang://host:port, vllm://host:port and, with TLS, vllms://host:port."
)

RANKED = (vllm_http.ADDRESSES, tokenspeed.ADDRESSES)


def clients(url: str, context: ClientContext) -> tuple[Worker, ...]:
    """Return a client for every target of *url*, not yet started. Raises StartupError if *url* is malformed."""
    if url.startswith(tokenspeed.ADDRESSES.schemes):
        return tuple(tokenspeed.TokenSpeedClient(one, context) for one in worker_urls(url))
    if url.startswith(sglang_address.SCHEME):
        is_pair = bool(sglang_address.SglangAddress.read(url).prefill)
        return (SglangPair(url, context) if is_pair else sglang.SglangClient(url, context),)
    if url.startswith(vllm_http.ADDRESSES.schemes):
        return tuple(VllmClient(one, context) for one in worker_urls(url))
    return (WorkerClient(url, context),)


def worker_urls(url: str) -> tuple[str, ...]:
    """Return the url of each client that clients() makes for *url*. Raises StartupError."""
    ranked = next((one for one in RANKED if url.startswith(one.schemes)), None)
    return (url,) if ranked is None else ranked.worker_urls(url)


def targets(urls: Iterable[str]) -> tuple[str, ...]:
    """Return *urls* without repetitions, and with SGLang's prefill and decode workers paired. Raises StartupError."""
    return sglang_address.paired(dict.fromkeys(urls))


def is_half(url: str) -> bool:
    """Return whether *url* is one side of pairs, which serves nothing without the other. Raises StartupError."""
    return url.startswith(sglang_address.SCHEME) and bool(sglang_address.SglangAddress.read(url).role)


def check_url(url: str) -> None:
    """Raise StartupError if *url* is not a worker's address."""
    if not url.isprintable() or " " in url:
        raise StartupError(f"A worker's address has no spaces and no control characters, unlike {url!r}.")
    if url.startswith(sglang_address.SCHEME):
        sglang_address.SglangAddress.read(url)
    elif any(url.startswith(ranked.schemes) for ranked in RANKED):
        worker_urls(url)
    else:
        try:
            target(url)
        except StartupError as error:
            raise StartupError(f"{url!r} is no worker's address. {ADDRESSES}") from error


def traits_of(files: ModelFiles) -> Traits:
    """Return what the connectors to other projects' workers must know about a model."""
    config = parse_json(files, CONFIG)
    family = models.families()[models.family_of(config)]
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    kinds = {kind for part in parts for kind in part.get("layer_types") or ()}
    return Traits(
        grid_name=family.external_grid,
        plain_positions=family.plain_positions,
        keeps_every_token=kinds <= {"full_attention"} and not any("full_attention_interval" in part for part in parts),
    )


def placeholder_id(files: ModelFiles) -> int | None:
    """Return the token id that stands for images, or None if the files name none. Raises StartupError."""
    family = models.families()[models.family_of(parse_json(files, CONFIG))]
    token_id: int | None = engine_config(files, family)[PLACEHOLDER_TOKEN_ID]
    return token_id
