"""The feed of cache events: every key can be derived, and snapshot and increments give the caches' true state."""

from pathlib import Path

import engines
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.engine.core import cache_events
from saccade.engine.core.cache_events import CacheFeed, WatchedCaches
from saccade.engine.core.encoder_cache import EncoderCache
from saccade.engine.core.images import EncoderKey
from saccade.engine.core.kv.blocks import PagedBlocks
from saccade.engine.core.kv.manager import BlockManager
from saccade.engine.core.sequence import Sequence
from saccade.identity.blocks import MediaRun, block_key, root_key
from saccade.models.positions import MultimodalPositions
from saccade.protocol.kv_events import BlockRemoved, BlockStored, ImageRemoved, ImageStored, KvEvents
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.request import EngineRequest, SamplingParams

BLOCK = 4
SALTS = (b"", b"tenant")
ROOTS = [root_key(b"model", salt) for salt in SALTS]
BOTH, BLOCKS, IMAGES = WatchedCaches(True, True), WatchedCaches(True, False), WatchedCaches(False, True)


def sequence(token_ids: list[int], place: int, tenant: int, arrival: int) -> Sequence:
    """A prompt that shows an image of three tokens from *place* on, where there is room for it."""
    image = MediaItem(
        modality="image",
        content_hash=bytes([place]) * 32,
        grid=(1, 2, 6),
        spans=(Span(place, 3),),
        pixel_shape=(12, 768),
    )
    request = EngineRequest(
        request_id=str(arrival),
        token_ids=token_ids,
        sampling=SamplingParams(max_tokens=9),
        media=(image,) if place + 3 <= len(token_ids) else (),
        salt=SALTS[tenant],
    )
    return Sequence(0, request, arrival, 0, ROOTS[tenant], MultimodalPositions([]))


class Subject:
    """Both caches, small enough to evict, and their feed."""

    def __init__(self) -> None:
        self.paged = PagedBlocks(8, BLOCK, keep_contents=True)
        self.blocks = BlockManager(self.paged)
        self.encoder_cache = EncoderCache(30)
        self.feed = CacheFeed(self.paged, self.encoder_cache)
        self.alive: list[Sequence] = []
        self.block_keys: set[bytes] = set()
        self.encoder_keys: set[EncoderKey] = set()

    def do(self, event: str, which: int, prompt: list[int], number: int) -> None:
        """One event of a worker's life."""
        if event == "admit":
            owner = sequence(prompt, which, which % 2, number)
            if self.blocks.admit(owner, headroom_blocks=0):
                self.alive.append(owner)
                self.blocks.commit(owner, owner.num_tokens)
                self.block_keys.update(owner.block_keys(owner.num_tokens // BLOCK, BLOCK))
        elif event == "encode":
            key = EncoderKey(SALTS[which % 2], "image", bytes([which]) * 32, (1, 2, 6))
            self.encoder_keys.add(key)
            if key not in self.encoder_cache:
                self.encoder_cache.begin_image(key, 10)
                self.encoder_cache.complete(key)
        elif event == "clear":
            while self.alive:
                self.blocks.release_sequence(self.alive.pop())
            self.paged.clear()
            self.encoder_cache.clear()
        elif self.alive:
            self.blocks.release_sequence(self.alive.pop(which % len(self.alive)))

    @property
    def state(self) -> tuple[set[bytes], set[tuple[bytes, bytes]]]:
        """What the caches hold of all that they have seen."""
        blocks = {key for key in self.block_keys if self.paged.reusable([key], 1)}
        return blocks, {(key.salt, key.content_hash) for key in self.encoder_keys if key in self.encoder_cache}


class Replica:
    """Somebody who knows only what the feed told, and checks every word."""

    def __init__(self, caches: WatchedCaches) -> None:
        self.caches = caches
        self.blocks: set[bytes] = set()
        self.images: set[tuple[bytes, bytes]] = set()
        self.last: KvEvents | None = None

    def take(self, payload: bytes) -> None:
        message = msgspec.msgpack.decode(payload, type=KvEvents)
        if self.last is None or not self.last.last:
            assert message.snapshot
        else:
            assert not message.snapshot
            assert message.number == self.last.number + 1
        self.last = message
        assert len(message.events) <= cache_events.EVENTS_PER_MESSAGE
        for event in message.events:
            match event:
                case BlockStored(key, parent, token_ids, media, is_first):
                    assert is_first == (parent in ROOTS)
                    runs = [MediaRun(place.start, place.length, place.content_hash, place.offset) for place in media]
                    assert block_key(parent, token_ids, 0, runs) == key
                    assert parent in self.blocks or parent in ROOTS
                    assert key not in self.blocks
                    self.blocks.add(key)
                case BlockRemoved(key):
                    self.blocks.remove(key)
                case ImageStored(salt, content_hash):
                    self.images.add((salt, content_hash))
                case ImageRemoved(salt, content_hash):
                    self.images.remove((salt, content_hash))


def told(subject: Subject, replicas: dict[int, Replica]) -> None:
    for message in subject.feed.take_messages():
        for watcher in message.watchers:
            replicas[watcher].take(message.payload)


@pytest.fixture
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_events, "EVENTS_PER_MESSAGE", 2)


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=4 * BLOCK)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "admit", "release", "encode", "clear", "watch", "leave", "take"]),
        st.integers(0, 9),
        PROMPTS,
    ),
    max_size=60,
)


@pytest.mark.usefixtures("small_messages")
def test_snapshot_and_increments_give_the_true_state() -> None:  # contract 2
    @settings(deadline=None)
    @given(EVENTS)
    def replay(events: list[tuple[str, int, list[int]]]) -> None:
        subject, replicas = Subject(), {0: Replica(BOTH)}
        subject.feed.watch(0, BOTH)
        for number, (event, which, prompt) in enumerate(events, 1):
            if event == "watch":
                replicas[number] = Replica((BOTH, BLOCKS, IMAGES)[which % 3])
                subject.feed.watch(number, replicas[number].caches)
            elif event == "leave":
                leaving = sorted(replicas)[which % len(replicas)]
                if leaving:
                    subject.feed.unwatch(leaving)
                    del replicas[leaving]
            elif event == "take":
                told(subject, replicas)
            else:
                subject.do(event, which, prompt, number)
        while subject.feed.busy:
            told(subject, replicas)
        blocks, images = subject.state
        for replica in replicas.values():
            assert replica.blocks == (blocks if replica.caches.blocks else set())
            assert replica.images == (images if replica.caches.images else set())

    replay()


def test_events_have_keys_alone_unless_the_operator_wants_more() -> None:
    paged = PagedBlocks(8, BLOCK)
    blocks, feed = BlockManager(paged), CacheFeed(paged, EncoderCache(30))
    feed.watch(1, BLOCKS)
    feed.take_messages()
    first, second = (sequence([prompt] * 3 * BLOCK, 4, tenant=1, arrival=prompt) for prompt in (77, 88))
    assert blocks.admit(first, headroom_blocks=0)
    blocks.commit(first, first.num_tokens)
    feed.watch(2, BLOCKS)
    assert blocks.admit(second, headroom_blocks=0)
    blocks.commit(second, second.num_tokens)
    messages = [msgspec.msgpack.decode(message.payload, type=KvEvents) for message in feed.take_messages()]
    assert any(message.snapshot and message.events for message in messages)
    assert any(not message.snapshot for message in messages)
    stored = [event for message in messages for event in message.events]
    assert all(event == BlockStored(event.key, event.parent, [], [], event.parent in ROOTS) for event in stored)
    keys = [*first.block_keys(3, BLOCK), *second.block_keys(3, BLOCK)]
    assert {event.key for event in stored} == set(keys)
    assert {event.parent for event in stored} == {ROOTS[1], *keys} - {keys[2], keys[5]}


@pytest.mark.parametrize("told", [False, True])
def test_events_have_block_contents_only_if_enabled(tiny_qwen3_vl: Path, told: bool) -> None:
    settings = {"kv_events_token_ids": True} if told else {}
    engine = engines.engine(tiny_qwen3_vl, **settings)
    asked = engines.request(tiny_qwen3_vl, [8, ((1, 4, 6), 1), 40])
    engines.drain(engine, asked)
    engine.feed.watch(1, BLOCKS)
    (message,) = [msgspec.msgpack.decode(message.payload, type=KvEvents) for message in engine.feed.take_messages()]
    size = engine.description.block_size
    first = next(event for event in message.events if isinstance(event, BlockStored))
    assert first.token_ids == (asked.token_ids[:size] if told else [])
    assert [place.content_hash for place in first.media] == ([asked.media[0].content_hash] if told else [])


def test_nothing_is_kept_without_a_watcher() -> None:
    subject = Subject()
    subject.feed.watch(1, BLOCKS)
    subject.do("encode", 1, [], 0)
    assert [message.watchers for message in subject.feed.take_messages()] == [[1]]  # its snapshot, and no image
    subject.feed.unwatch(1)
    subject.feed.unwatch(1)
    subject.do("admit", 1, [1] * BLOCK, 1)
    assert not subject.feed.busy
    assert subject.feed.take_messages() == []


def test_watchers_of_the_same_get_the_same_bytes() -> None:
    subject = Subject()
    for watcher in (1, 2, 3):
        subject.feed.watch(watcher, IMAGES if watcher == 3 else BLOCKS)
    subject.feed.take_messages()
    subject.do("admit", 9, [1] * 2 * BLOCK, 0)
    assert [message.watchers for message in subject.feed.take_messages()] == [[1, 2]]


@pytest.mark.usefixtures("small_messages")
def test_snapshot_is_sent_in_pieces_before_increments() -> None:
    subject = Subject()
    for which in range(3):
        subject.do("encode", which, [], which)
    subject.feed.watch(1, IMAGES)
    subject.do("encode", 7, [], 7)
    pieces = []
    while subject.feed.busy:
        pieces.append(
            [msgspec.msgpack.decode(message.payload, type=KvEvents) for message in subject.feed.take_messages()]
        )
    assert [[(piece.snapshot, piece.last, len(piece.events)) for piece in step] for step in pieces] == [
        [(True, False, 2)],
        [(True, True, 1), (False, True, 2)],
    ]


def test_removed_watcher_gets_no_event() -> None:
    subject = Subject()
    for watcher in (1, 2):
        subject.feed.watch(watcher, BLOCKS)
        subject.feed.take_messages()
    subject.do("admit", 1, [1] * BLOCK, 1)
    # A third one's snapshot numbers what has happened; the second leaves before that is taken.
    subject.feed.watch(3, BLOCKS)
    subject.feed.unwatch(2)
    assert {watcher for message in subject.feed.take_messages() for watcher in message.watchers} == {1, 3}
