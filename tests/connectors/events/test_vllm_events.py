"""The feed of a vLLM worker's cache events, over real sockets: replay, gaps, restarts, and publishers that vanish."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from floods import array, counted_bytes
from tables import table
from vllm_publisher import CLEARED, ENCODINGS, Encoding, Prompt, publisher, stored

from saccade.connectors.events import published_events
from saccade.connectors.events import publisher as event_publisher
from saccade.connectors.events.event_source import EventSource, event_source
from saccade.connectors.events.named_images import NamedImages, media_identifier
from saccade.connectors.events.published_events import follow
from saccade.connectors.events.reported_cache import KeyContext, ReportedCache
from saccade.errors import StartupError, WorkerUnavailable
from saccade.identity.blocks import block_keys, root_key
from saccade.protocol.kv_events import BlockRemoved, BlockStored, KvEvents

TAG = media_identifier(b"", bytes(32)).rpartition(".")[2]
SIZE = 4
CONTEXT = KeyContext(b"fingerprint", block_size=SIZE, page_size=SIZE, max_model_len=4096)
SECONDS = 20.0


def prompt(number: int, num_blocks: int = 2) -> Prompt:
    return Prompt(tuple(range(1000 * number, 1000 * number + num_blocks * SIZE)))


def keys_of(*prompts: Prompt) -> set[bytes]:
    root = root_key(CONTEXT.fingerprint, b"")
    return {key for one in prompts for key in block_keys(root, one.token_ids, (), SIZE)}


class Feed:
    """A feed that is being followed, and what its messages have told."""

    def __init__(self, source: EventSource, context: KeyContext, placeholder_ids: frozenset[int]) -> None:
        self.cache = ReportedCache(context, NamedImages(placeholder_ids))
        self.keys: set[bytes] = set()
        self.messages: list[KvEvents] = []
        self._feed = follow(source, self.cache)

    async def next(self) -> KvEvents:
        async with asyncio.timeout(SECONDS):
            message = await anext(self._feed)
        self.messages.append(message)
        for event in message.events:
            match event:
                case BlockStored(key):
                    self.keys.add(key)
                case BlockRemoved(key):
                    self.keys.discard(key)
        return message

    async def snapshot(self) -> set[bytes]:
        while not (await self.next()).last:
            pass
        return self.keys

    async def until(self, keys: set[bytes]) -> None:
        while self.keys != keys:
            await self.next()

    async def aclose(self) -> None:
        await self._feed.aclose()


@contextlib.asynccontextmanager
async def following(
    source: EventSource, context: KeyContext = CONTEXT, placeholder_ids: frozenset[int] = frozenset()
) -> AsyncGenerator[Feed, None]:
    async with contextlib.aclosing(Feed(source, context, placeholder_ids)) as feed:
        yield feed


@table("old_framing", [False, True])
@table("encoding", ENCODINGS)
async def test_events_before_and_after_the_start_are_known(encoding: Encoding, old_framing: bool) -> None:  # E8
    async with publisher(old_framing=old_framing) as worker, following(worker.source) as feed:
        await worker.publish(stored(prompt(1), SIZE), encoding=encoding)
        assert await feed.snapshot() == keys_of(prompt(1))
        await worker.subscribed()
        await worker.publish(stored(prompt(2), SIZE), CLEARED, stored(prompt(3), SIZE), encoding=encoding)
        await feed.until(keys_of(prompt(3)))
        assert feed.cache.exactness.level == "EXACT"


async def test_messages_are_one_snapshot_and_numbered_increments() -> None:
    async with publisher() as worker, following(worker.source) as feed:
        for number in range(3):
            await worker.publish(stored(prompt(number), SIZE))
        await feed.snapshot()
        await worker.subscribed()
        for number in range(3, 6):
            await worker.publish(stored(prompt(number), SIZE))
        await feed.until(keys_of(*map(prompt, range(6))))
    assert [(m.number, m.snapshot, m.last) for m in feed.messages] == [
        *[(0, True, False)] * 3,
        (0, True, True),
        *[(number, False, True) for number in (1, 2, 3)],
    ]


async def test_a_batch_of_many_blocks_is_several_messages() -> None:
    long = prompt(1, num_blocks=600)
    async with publisher() as worker, following(worker.source) as feed:
        await worker.publish(stored(long, SIZE))
        assert await feed.snapshot() == keys_of(long)
        await worker.subscribed()
        await worker.publish(CLEARED)
        await feed.until(set())
    assert max(len(message.events) for message in feed.messages) == published_events.MAX_EVENTS


async def test_lost_batches_are_replayed() -> None:  # E8
    async with publisher() as worker, following(worker.source) as feed:
        assert await feed.snapshot() == set()
        await worker.subscribed()
        await worker.publish(stored(prompt(1), SIZE), lost=True)
        await worker.publish(CLEARED, lost=True)
        await worker.publish(stored(prompt(2), SIZE))
        await feed.until(keys_of(prompt(2)))
        assert [len(message.events) for message in feed.messages] == [0, 2, 2, 2]
        await worker.publish(stored(prompt(3), SIZE))
        await feed.until(keys_of(prompt(2), prompt(3)))
        assert worker.num_replays == 2


async def test_lost_last_batch_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:  # E5
    monkeypatch.setattr(event_publisher, "IDLE_SECONDS", 0.05)
    async with publisher() as worker, following(worker.source) as feed:
        await worker.publish(stored(prompt(1), SIZE))
        await feed.snapshot()
        await worker.subscribed()
        await worker.publish(CLEARED, lost=True)
        await feed.until(set())
        await worker.publish(stored(prompt(2), SIZE))
        await feed.until(keys_of(prompt(2)))


async def test_partly_dropped_replay_is_requested_again() -> None:
    async with publisher() as worker, following(worker.source) as feed:
        worker.replay_limit = 4
        for number in range(10):
            await worker.publish(stored(prompt(number), SIZE))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(event_publisher, "QUIET_SECONDS", 0.2)
            assert await feed.snapshot() == keys_of(*map(prompt, range(10)))
        assert worker.num_replays == 3
        assert feed.cache.exactness.level == "EXACT"


async def test_replay_with_a_gap_is_requested_again_from_the_gap() -> None:  # E5
    async with publisher() as worker, following(worker.source) as feed:
        worker.dropped_once = {2}
        await worker.publish(stored(prompt(0), SIZE))
        await worker.publish(stored(prompt(1), SIZE))
        await worker.publish(CLEARED)
        await worker.publish(stored(prompt(3), SIZE))
        assert await feed.snapshot() == keys_of(prompt(3))
        assert worker.num_replays == 2


@pytest.mark.parametrize("kept", [0, 1])
async def test_a_replay_that_begins_late_is_degraded_until_all_is_cleared(kept: int) -> None:  # E5
    late = prompt(1, num_blocks=3)
    async with publisher(buffer_steps=1 + kept) as worker, following(worker.source) as feed:
        await worker.publish(stored(late, SIZE, count=1))
        await worker.publish(stored(prompt(2), SIZE))
        await worker.publish(stored(late, SIZE, first=1))  # its first block is not known
        assert await feed.snapshot() == (keys_of(prompt(2)) if kept else set())
        assert feed.cache.exactness.level == "DEGRADED"
        assert f"begins with batch {2 - kept}" in feed.cache.exactness.reason
        await worker.subscribed()
        await worker.publish(CLEARED, stored(prompt(4), SIZE))
        await feed.until(keys_of(prompt(4)))
        assert feed.cache.exactness.level == "EXACT"


async def test_without_replay_only_a_publisher_seen_from_its_beginning_is_exact() -> None:  # E5
    async with publisher() as worker:
        source = EventSource(worker.source.endpoint, None, worker.source.topic)
        async with following(source) as feed:
            assert await feed.snapshot() == set()
            assert feed.cache.exactness.level == "DEGRADED"
            await worker.subscribed()
            await worker.publish(stored(prompt(1), SIZE))
            await feed.until(keys_of(prompt(1)))
            assert feed.cache.exactness.level == "EXACT"
        async with following(source) as late:
            await late.snapshot()
            await worker.subscribed()
            await worker.publish(stored(prompt(2), SIZE))
            await late.until(keys_of(prompt(2)))
            assert late.cache.exactness.level == "DEGRADED"


async def _fails(feed: Feed) -> str:
    """Return why the feed ends."""
    with pytest.raises(WorkerUnavailable) as raised:
        await feed.until({b"a key that no block has"})
    return raised.value.message


async def test_a_gap_that_cannot_be_filled_ends_the_feed() -> None:  # E5
    async with publisher() as worker, following(worker.source) as feed:
        await feed.snapshot()
        await worker.subscribed()
        await worker.publish(stored(prompt(1), SIZE), lost=True, kept=False)
        await worker.publish(stored(prompt(2), SIZE))
        assert "from batch 0 on were lost" in await _fails(feed)
    async with publisher() as worker, following(EventSource(worker.source.endpoint, None)) as feed:
        await feed.snapshot()
        await worker.subscribed()
        await worker.publish(stored(prompt(1), SIZE))
        await worker.publish(stored(prompt(1), SIZE), lost=True)
        await worker.publish(stored(prompt(2), SIZE))
        assert "from batch 1 on were lost" in await _fails(feed)


async def test_numbers_that_begin_anew_end_the_feed() -> None:  # E5
    async with publisher() as worker, following(worker.source) as feed:
        await feed.snapshot()
        await worker.subscribed()
        await worker.publish(stored(prompt(1), SIZE))
        await feed.until(keys_of(prompt(1)))
        worker.restart()
        await worker.publish(stored(prompt(2), SIZE))
        assert "begin anew" in await _fails(feed)


async def test_a_publisher_that_vanishes_ends_the_feed_even_if_it_comes_back() -> None:  # E5
    async with publisher() as worker, following(worker.source) as feed:
        await feed.snapshot()
        await worker.publish(stored(prompt(1), SIZE))
        await worker.close()
        assert "ended" in await _fails(feed)


async def test_no_publisher_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_publisher, "CONNECT_SECONDS", 2.0)
    async with publisher() as worker:
        source = worker.source
    for endpoint in (source.endpoint, "tcp://", "nonsense"):
        async with following(EventSource(endpoint, source.replay_endpoint)) as feed:
            assert "--kv-events-config" in await _fails(feed)


async def test_a_replay_endpoint_that_does_not_answer_ends_the_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_publisher, "REPLAY_SECONDS", 0.2)
    async with publisher() as worker:
        worker.replay_limit = 0
        async with following(worker.source) as feed:
            assert "from batch 0 on were lost" in await _fails(feed)


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x90", b"\x92\x00\x91\x00", b"\x91" * 100_000])
async def test_bytes_that_are_no_batch_end_the_feed(content: bytes) -> None:
    async with publisher() as worker, following(worker.source) as feed:
        await feed.snapshot()
        await worker.subscribed()
        await worker.publish_payload(content)
        assert "have an unknown form" in await _fails(feed)


def batch(*fields: bytes, kind: bytes = b"\xabBlockStored", as_map: bool = False) -> bytes:
    """A batch of one event, whose fields after the type are encoded already."""
    names = (b"\xacblock_hashes", b"\xb1parent_block_hash", b"\xa9token_ids", b"\xaablock_size")
    names += (b"\xa7lora_id", b"\xa6medium", b"\xa9lora_name", b"\xaaextra_keys")
    if as_map:
        pairs = b"".join(name + value for name, value in zip(names, fields, strict=False))
        event = bytes((0x81 + len(fields),)) + b"\xa4type" + kind + pairs
    else:
        event = bytes((0x91 + len(fields),)) + kind + b"".join(fields)
    return b"\x92\xcb" + bytes(8) + b"\x91" + event


BATCH_BYTES = 4 << 20
NO_KEYS = (b"\4", b"\xc0", b"\xc0", b"\xc0")


@table(
    "fields",
    [
        (b"\x91\1", b"\xc0", array(b"\7", BATCH_BYTES), b"\4"),
        (array(b"\1", BATCH_BYTES), b"\xc0", b"\x90", b"\4"),
        (b"\x91\1", b"\xc0", b"\x94\1\1\1\1", *NO_KEYS, array(b"\x90", BATCH_BYTES)),
        (b"\x91\1", b"\xc0", b"\x94\1\1\1\1", *NO_KEYS, array(b"\x91\x80", BATCH_BYTES)),
        (b"\x91\1", b"\xc0", b"\x94\1\1\1\1", *NO_KEYS, b"\x91" + array(b"\x92\xa0\0", BATCH_BYTES)),
    ],
    ids=["ids", "hashes", "extra keys", "maps in extra keys", "keys of one block"],
)
@table("as_map", [False, True])
async def test_a_batch_makes_no_more_objects_than_a_prompt_has(fields: tuple[bytes, ...], as_map: bool) -> None:
    async with publisher() as worker, following(worker.source) as feed:
        await feed.snapshot()
        await worker.subscribed()
        with counted_bytes() as most_bytes:
            await worker.publish_payload(batch(*fields, as_map=as_map))
            assert "have an unknown form" in await _fails(feed)
            assert most_bytes() < 7 * BATCH_BYTES  # copies of the bytes; objects would take 50 times as much


async def test_a_batch_of_too_many_events_ends_the_feed() -> None:
    async with publisher() as worker, following(worker.source) as feed:
        await feed.snapshot()
        await worker.subscribed()
        with counted_bytes() as most_bytes:
            await worker.publish_payload(b"\x92\xcb" + bytes(8) + array(b"\x92\xa1x\0", BATCH_BYTES))
            assert "have an unknown form" in await _fails(feed)
            assert most_bytes() < 7 * BATCH_BYTES  # copies of the bytes; objects would take 50 times as much


@pytest.mark.ci
async def test_a_prompt_of_a_million_tokens_is_no_fault() -> None:
    context = dataclasses.replace(CONTEXT, max_pages=1 << 20)
    long = Prompt(tuple(range(1 << 19)))
    async with publisher() as worker, following(worker.source, context) as feed:
        await feed.snapshot()
        await worker.subscribed()
        await worker.publish(stored(long, SIZE))
        while len(feed.keys) < len(long.token_ids) // SIZE:
            await feed.next()


@pytest.mark.parametrize(
    "fields",
    [{"token_ids": [1 << 63, 1, 2, 3, 4, 5, 6, 7]}, {"extra_keys": [[["ab" * 32 + "." + TAG, -(1 << 63)]], None]}],
)
async def test_numbers_out_of_range_end_the_feed(fields: dict[str, Any]) -> None:
    placeholder_ids = frozenset(range(1000, 1008))
    async with publisher() as worker, following(worker.source, placeholder_ids=placeholder_ids) as feed:
        await feed.snapshot()
        await worker.subscribed()
        await worker.publish(stored(prompt(1), SIZE, **fields))
        assert "have an unknown form" in await _fails(feed)


async def test_events_that_mean_nothing_take_turns_too() -> None:
    removals = [{"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU"}] * 1000
    async with publisher() as worker, following(worker.source) as feed:
        await feed.snapshot()
        await worker.subscribed()
        await worker.publish(*removals, stored(prompt(1), SIZE))
        await feed.until(keys_of(prompt(1)))
    assert [len(message.events) for message in feed.messages[1:]] == [0, 0, 0, 2]


async def test_other_topics_are_not_read() -> None:
    async with publisher(topic="kv@other") as worker:
        source = EventSource(worker.source.endpoint, None, "kv@mine")
        async with following(source) as feed:
            await feed.snapshot()
            await worker.subscribed()
            await worker.publish_payload(b"\xc1")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await feed.next()


async def test_a_feed_leaves_no_task_and_no_socket_behind() -> None:
    async with publisher() as worker:
        before = asyncio.all_tasks()
        async with following(worker.source) as feed:
            await feed.snapshot()
            await worker.subscribed()
        assert asyncio.all_tasks() == before
        await worker.subscribed(ended=True)


@table(
    ("published", "expected"),
    [
        (
            {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "topic": "kv", "publisher": "zmq"},
            EventSource("tcp://10.0.0.5:5557", "tcp://10.0.0.5:5558", "kv"),
        ),
        ({"endpoint": "tcp://10.0.0.5:41", "replay_endpoint": None}, EventSource("tcp://10.0.0.5:41")),
        ({"endpoint": "tcp://[::]:5557"}, EventSource("tcp://10.0.0.5:5557")),
        ({"endpoint": "tcp://*:5557", "publisher": "null"}, None),
        ({"endpoint": "tcp://*:5557", "enable_kv_cache_events": False}, None),
        ({}, None),
    ],
)
def test_the_source_that_a_worker_names(published: dict[str, Any], expected: EventSource | None) -> None:
    assert event_source("10.0.0.5", published) == expected


@table(
    "endpoint",
    [
        "tcp://10.9.9.9:41",
        "tcp://169.254.169.254:80",
        "tcp://127.0.0.1:5557",
        "tcp://10.0.0.5.evil.example:5557",
        "tcp://10.0.0.5@10.9.9.9:5557",
        "tcp://eth0;10.0.0.5:5557",
        "tcp://10.0.0.5:0x50",
        "tcp://10.0.0.5:*",
        "ipc:///run/containerd/containerd.sock",
        "ipc://@abstract",
        "inproc://a",
        "pgm://10.0.0.5;239.0.0.1:5557",
        "udp://10.0.0.5:5557",
        "vmci://2:5557",
        "10.0.0.5:5557",
        "",
    ],
)
@table("name", ["endpoint", "replay_endpoint"])
def test_a_source_of_another_host_is_not_used(endpoint: str, name: str) -> None:
    with pytest.raises(StartupError):
        event_source("10.0.0.5", {"endpoint": "tcp://*:5557"} | {name: endpoint})


@table(
    ("host", "endpoint"),
    [
        ("127.0.0.1", "tcp://localhost:5"),
        ("localhost", "tcp://[::1]:5"),
        ("127.0.0.1", "tcp://[::ffff:127.0.0.1]:5"),
    ],
)
def test_all_names_of_loopback_are_one_host(host: str, endpoint: str) -> None:
    assert event_source(host, {"endpoint": endpoint}) == EventSource(endpoint)


def test_a_source_of_a_host_with_an_ipv6_address() -> None:
    assert event_source("fd00::5", {"endpoint": "tcp://*:5557"}) == EventSource("tcp://[fd00::5]:5557")
