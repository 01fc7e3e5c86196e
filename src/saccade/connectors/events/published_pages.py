"""Follows the cache events of TokenSpeed and SGLang from the engine's own publisher, over ZeroMQ, in our keys.

The publisher keeps its latest batches for replay, which may cover what the worker stored before the gateway listened.
Unlike those of SMG's wire, its token ids may exceed 32 bits: SGLang's pads (since 0.5.23) do.
"""

from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from saccade.connectors.events.batches import Cleared, Event, Removed, Stored
from saccade.connectors.events.pages import EXTRA_KEYS, Pages
from saccade.connectors.events.published_blocks import event_source, translated
from saccade.connectors.events.publisher import EventSource
from saccade.errors import StartupError
from saccade.protocol.kv_events import KvEvent, KvEvents

DEFAULT_ENDPOINT = "tcp://*:5557"
"""The default of both engines."""

ON_DEVICE = (None, "GPU")


def source_of(server: Any, host: str, rank: int | None = None) -> EventSource | None:
    """Return where a worker on *host* publishes, from its GetServerInfo, or None if that is not certain.

    Its `--kv-events-config` may have an address that means another machine here, so that must be a wildcard or *host*.
    Both engines publish the events of each data-parallel *rank* on its own port: the configured one plus the rank.
    """
    try:
        config = msgspec.json.decode(server.server_args.fields["kv_events_config"].string_value, type=dict[str, Any])
    except msgspec.DecodeError:
        return None
    try:
        source = event_source(host, {"endpoint": DEFAULT_ENDPOINT} | config)
    except StartupError:
        return None
    if source is None or not rank:
        return source
    replay = source.replay_endpoint
    return replace(
        source,
        endpoint=_of_rank(source.endpoint, rank),
        replay_endpoint=None if replay is None else _of_rank(replay, rank),
    )


def _of_rank(endpoint: str, rank: int) -> str:
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"


def follow(source: EventSource, pages: Pages) -> AsyncGenerator[KvEvents, None]:
    """Yield what the worker holds: a snapshot's messages, then increments.

    Raises WorkerUnavailable when the feed ends, or if it cannot be followed.
    """

    def note(reason: str) -> None:
        pages.earlier = reason

    return translated(source, partial(taken, pages), note)


def taken(pages: Pages, event: Event) -> Iterator[KvEvent]:
    """Yield what *event* means for *pages*. Raises WorkerUnavailable if it cannot be followed."""
    match event:
        case Stored(extra_keys=extra_keys, lookahead_token_ids=lookahead) if lookahead or any(extra_keys or ()):
            pages.refuse(EXTRA_KEYS)
        case Stored(medium=medium, locality=None | "LOCAL", lora_id=None, lora_name=None | "", cache_salt=None | ""):
            if medium in ON_DEVICE:
                size, ids = event.block_size, event.token_ids
                names = enumerate(event.block_hashes)
                yield from pages.store(
                    event.parent_block_hash, ((name, ids[at * size : (at + 1) * size]) for at, name in names)
                )
        case Removed(block_hashes=names, medium=medium):
            if medium in ON_DEVICE:
                yield from pages.remove(names)
        case Cleared():
            yield from pages.clear()
