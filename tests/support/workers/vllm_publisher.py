"""A scripted publisher of vLLM's cache events: the sockets, numbers and encodings of the real one, on loopback."""

import asyncio
import contextlib
import hashlib
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import zmq
import zmq.asyncio

from saccade.connectors.events.event_source import EventSource
from saccade.connectors.events.named_images import cache_salt, media_identifier

Encoding = tuple[Literal["array", "map"], Literal["array", "map"]]
"""How a batch and its events are encoded."""

ENCODINGS: tuple[Encoding, ...] = (("array", "map"), ("array", "array"), ("map", "map"), ("map", "array"))
REPLAY_ENDS = b"\xff" * 8

# The order of an event's fields in the array form.
FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


@dataclass(frozen=True)
class Item:
    """An image: its placeholders are token_ids[start : start + length]."""

    content_hash: bytes
    start: int
    length: int


@dataclass(frozen=True)
class Prompt:
    token_ids: tuple[int, ...]
    items: tuple[Item, ...] = ()
    salt: bytes = b""


def extra_keys(prompt: Prompt, start: int, stop: int) -> list[Any] | None:
    """Return what vLLM hashes for the block of tokens [start, stop) beside the tokens."""
    keys: list[Any] = [
        [media_identifier(prompt.salt, item.content_hash), item.start - start]
        for item in prompt.items
        if item.start < stop and start < item.start + item.length
    ]
    if start == 0 and prompt.salt:
        keys.append(cache_salt(prompt.salt))
    return keys or None


def hashes(prompt: Prompt, block_size: int) -> list[int]:
    """Return a hash for every full block, made of what vLLM's hashes are made of."""
    parent, found = b"", []
    for start in range(0, len(prompt.token_ids) - block_size + 1, block_size):
        stop = start + block_size
        content = (parent, prompt.token_ids[start:stop], extra_keys(prompt, start, stop))
        parent = hashlib.sha256(repr(content).encode()).digest()
        found.append(int.from_bytes(parent[-8:], "big"))
    return found


def stored(
    prompt: Prompt, block_size: int, /, first: int = 0, count: int | None = None, **fields: Any
) -> dict[str, Any]:
    """Return the event of blocks [first, first + count) of a prompt, by default of all full ones."""
    names = hashes(prompt, block_size)
    last = len(names) if count is None else first + count
    starts = range(first * block_size, last * block_size, block_size)
    return {
        "type": "BlockStored",
        "block_hashes": names[first:last],
        "parent_block_hash": names[first - 1] if first else None,
        "token_ids": list(prompt.token_ids[first * block_size : last * block_size]),
        "block_size": block_size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [extra_keys(prompt, start, start + block_size) for start in starts],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    } | fields


def removed(*names: int, **fields: Any) -> dict[str, Any]:
    """Return the event of blocks that left the cache."""
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": "GPU", "group_idx": 0} | fields


CLEARED = {"type": "AllBlocksCleared"}


def payload(events: Sequence[dict[str, Any]], encoding: Encoding = ("array", "map")) -> bytes:
    """Return a batch as a release encodes it."""
    batch, event = encoding
    encoded: list[Any] = [_as_array(one) if event == "array" else one for one in events]
    whole: Any = (
        [1795250632.25, encoded, 0] if batch == "array" else {"ts": 1.5, "events": encoded, "data_parallel_rank": 0}
    )
    return msgspec.msgpack.encode(whole)


def _as_array(event: dict[str, Any]) -> list[Any]:
    values = [event.get(name) for name in FIELDS.get(event["type"], ())]
    while values and values[-1] is None and event["type"] != "BlockStored":
        values.pop()
    return [event["type"], *values]


class Publisher:
    """Publishes batches and answers replays. *old_framing*: replays have no frame for the topic.

    A replay ends unmarked after *replay_limit* batches, and lacks those of *dropped_once* the first time.
    """

    def __init__(self, *, buffer_steps: int = 10_000, old_framing: bool = False, topic: str = "kv@worker") -> None:
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        # XPUB is PUB that tells of subscriptions, so that a test need not guess when one has arrived.
        self._publisher = self._context.socket(zmq.XPUB)
        self._publisher.setsockopt(zmq.XPUB_VERBOSER, 1)
        self._router = self._context.socket(zmq.ROUTER)
        self._topic = topic
        self._old_framing = old_framing
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._number = 0
        self.num_replays = 0
        self.replay_limit = 1_000_000
        self.dropped_once: set[int] = set()
        port = self._publisher.bind_to_random_port("tcp://127.0.0.1")
        replay_port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.source = EventSource(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay_port}", topic)
        self._replays = asyncio.create_task(self._serve_replays())

    async def close(self) -> None:
        self._replays.cancel()
        await asyncio.gather(self._replays, return_exceptions=True)
        self._context.destroy(linger=0)

    async def subscribed(self, *, ended: bool = False) -> None:
        """Wait until a subscription has arrived, or *ended*."""
        async with asyncio.timeout(20):
            while (await self._publisher.recv())[0] == ended:
                pass

    def restart(self) -> None:
        """Count from 0 again, as a new process does; connections stay, as they would behind a proxy."""
        self._number = 0
        self._buffer.clear()

    async def publish(
        self, *events: dict[str, Any], encoding: Encoding = ("array", "map"), lost: bool = False, kept: bool = True
    ) -> None:
        """Publish a batch; *lost* on the way to subscribers, or not *kept* for replay."""
        await self.publish_payload(payload(events, encoding), lost=lost, kept=kept)

    async def publish_payload(self, content: bytes, *, lost: bool = False, kept: bool = True) -> None:
        number, self._number = self._number, self._number + 1
        if kept:
            self._buffer.append((number, content))
        if not lost:
            await self._publisher.send_multipart([self._topic.encode(), number.to_bytes(8, "big"), content])

    async def _serve_replays(self) -> None:
        while True:
            client, _, first = await self._router.recv_multipart()
            self.num_replays += 1
            topic = [] if self._old_framing else [self._topic.encode()]
            sent = 0
            for number, content in list(self._buffer):
                if number in self.dropped_once:
                    self.dropped_once.remove(number)
                elif number >= int.from_bytes(first, "big") and sent < self.replay_limit:
                    sent += 1
                    await self._router.send_multipart([client, b"", *topic, number.to_bytes(8, "big"), content])
            if sent < self.replay_limit:
                end = [] if self._old_framing else [b""]
                await self._router.send_multipart([client, b"", *end, REPLAY_ENDS, b""])


@contextlib.asynccontextmanager
async def publisher(**options: Any) -> AsyncGenerator[Publisher, None]:
    """Run a publisher until the block ends."""
    running = Publisher(**options)
    try:
        yield running
    finally:
        await running.close()
