"""Cache events of TokenSpeed and SGLang in our keys: those that the gateway computes for the same prompts, or none."""

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import msgspec
import pytest
from smg_grpc_proto.generated import common_pb2, tokenspeed_scheduler_pb2
from smg_grpc_servicer.kv_relay import Normalizer, decode_batch
from tables import table

from saccade.connectors.events import sent_images
from saccade.connectors.events.batches import Cleared, Stored
from saccade.connectors.events.event_source import EventSource
from saccade.connectors.events.reported_cache import LOOKAHEAD, KeyContext, ReportedCache
from saccade.connectors.events.sent_images import EXTRA_KEYS, LATE_TENANT, MAX_SALTS, SentImages
from saccade.connectors.smg.kv_events import event_of
from saccade.connectors.smg.model import event_source_of
from saccade.connectors.smg.tokenspeed_messages import pad
from saccade.identity.blocks import MediaRun, block_keys, root_key
from saccade.protocol.exactness import EXACT
from saccade.protocol.kv_events import BlockRemoved, BlockStored, KvEvent
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.request import EngineRequest, SamplingParams

FINGERPRINT = bytes(range(32))
PLACEHOLDER = 262
BLOCK = 16


def image(number: int, *spans: tuple[int, int]) -> MediaItem:
    return MediaItem(
        modality="image",
        content_hash=bytes([number]) * 32,
        grid=(1, 2, 2),
        spans=tuple(Span(*span) for span in spans),
        pixel_shape=(4, 6),
    )


def asked(length: int, *media: MediaItem, salt: bytes = b"", seed: int = 0) -> EngineRequest:
    """A prompt of random text, with placeholders where *media* lie."""
    random = Random(seed)
    token_ids = [random.randrange(200) for _ in range(length)]
    for item in media:
        for span in item.spans:
            token_ids[span.start : span.start + span.length] = [PLACEHOLDER] * span.length
    return EngineRequest(
        request_id="r", token_ids=token_ids, sampling=SamplingParams(max_tokens=1), media=media, salt=salt
    )


def keys(request: EngineRequest, block_size: int = BLOCK) -> list[bytes]:
    """The keys that the gateway looks for, as gateway.workers.dispatch makes them."""
    runs = []
    for item in request.media:
        offset = 0
        for span in item.spans:
            runs.append(MediaRun(span.start, span.length, item.content_hash, offset))
            offset += span.length
    root = root_key(FINGERPRINT, request.salt)
    return block_keys(root, request.token_ids, sorted(runs, key=lambda run: run.start), block_size)


def padded(request: EngineRequest) -> list[int]:
    """The prompt as the engine keeps it."""
    token_ids = list(request.token_ids)
    for item in request.media:
        for span in item.spans:
            token_ids[span.start : span.start + span.length] = [pad(item, request.salt)] * span.length
    return token_ids


def stored(
    token_ids: Sequence[int], page: int = BLOCK, first: int = 0, base: int = 0, **fields: Any
) -> common_pb2.KvCacheEvent:
    """The event of the whole pages of *token_ids*, named by *base* and their places; the first follows page *first* - 1."""
    event = common_pb2.KvCacheEvent()
    for number in range(len(token_ids) // page):
        block = event.stored.blocks.add(block_hash=base + first + number, block_size=page)
        block.token_ids.extend(token_ids[number * page : (number + 1) * page])
    if first:
        event.stored.parent_block_hash = base + first - 1
    for name, value in fields.items():
        setattr(event.stored, name, value)
    return event


def removed(*hashes: int, **fields: Any) -> common_pb2.KvCacheEvent:
    return common_pb2.KvCacheEvent(removed=common_pb2.KvBlocksRemoved(block_hashes=hashes, **fields))


def cache_of(sent: SentImages, page: int = BLOCK) -> ReportedCache:
    return ReportedCache(KeyContext(FINGERPRINT, BLOCK, page, max_model_len=4096), sent)


def pages(*requests: EngineRequest, page: int = BLOCK) -> ReportedCache:
    """What a worker is known to hold that has been sent *requests*."""
    sent = SentImages(pad)
    for request in requests:
        sent.add(request)
    return cache_of(sent, page)


def taken(cache: ReportedCache, event: common_pb2.KvCacheEvent) -> list[KvEvent]:
    return list(cache.take(event_of(event)))


def stored_keys(events: Iterable[KvEvent]) -> list[bytes]:
    return [event.key for event in events if isinstance(event, BlockStored)]


@pytest.mark.parametrize("page", [1, 4, 16])
def test_text_has_the_gateways_keys_with_their_parents(page: int) -> None:  # E8
    request = asked(100)
    events = list(taken(pages(request, page=page), stored(request.token_ids, page)))
    assert stored_keys(events) == keys(request)
    parents = [event.parent for event in events if isinstance(event, BlockStored)]
    assert parents == [root_key(FINGERPRINT, b""), *keys(request)[:-1]]


IMAGES = [
    # Within a block, over several, from the first token on, and to a block's end.
    (image(1, (3, 5)),),
    (image(1, (10, 40)),),
    (image(1, (0, 16)), image(2, (16, 17))),
    # The same image again, with text between and without.
    (image(1, (4, 6)), image(1, (20, 6))),
    (image(1, (4, 6)), image(1, (10, 6)), image(1, (16, 6))),
    # Several spans with text between them, and without.
    (image(1, (2, 5), (9, 20), (40, 3)),),
    (image(1, (2, 5), (7, 20)), image(2, (30, 3), (34, 30))),
]


@table("page", [1, 16])
@table("salt", [b"", b"tenant"])
@table("media", IMAGES)
def test_images_have_the_gateways_keys(media: tuple[MediaItem, ...], salt: bytes, page: int) -> None:  # E5
    request = asked(100, *media, salt=salt)
    held = pages(request, page=page)
    tokens = padded(request)
    first, rest = tokens[:32], tokens[32:]
    found = [*taken(held, stored(first, page)), *taken(held, stored(rest, page, first=32 // page))]
    wanted = set(keys(request))
    assert wanted <= set(stored_keys(found))
    assert len(found) == len(wanted)


def test_random_prompts() -> None:  # E5
    for seed in range(200):
        random = Random(seed)
        media, start = [], random.randrange(20)
        for _ in range(random.randrange(4)):
            length = random.randrange(1, 40)
            number = random.randrange(3)
            media.append(image(3 * length + number, (start, length)))
            start += length + random.choice((0, 1, 2, 17))
        request = asked(start + random.randrange(40), *media, seed=seed)
        page = random.choice((1, 2, 8, 16))
        assert stored_keys(taken(pages(request, page=page), stored(padded(request), page))) == keys(request)


def test_every_tenant_has_the_text_that_the_wire_does_not_keep_apart() -> None:
    one, other = asked(40, salt=b"one"), asked(40, salt=b"other")
    found = stored_keys(taken(pages(one, other), stored(one.token_ids)))
    assert set(keys(one)) | set(keys(other)) <= set(found)


def test_unknown_pad_ends_the_known_prefix() -> None:  # E5
    request = asked(64, image(1, (20, 10)))
    events = taken(pages(asked(1)), stored(padded(request)))
    assert stored_keys(events) == keys(request)[:1]


def test_ambiguous_pad_ends_the_known_prefix() -> None:  # E5
    first, second = asked(64, image(1, (20, 10))), asked(64, image(2, (20, 10)))
    sent = SentImages(lambda item, salt: pad(first.media[0], salt))
    sent.add(first)
    assert len(stored_keys(taken(cache_of(sent), stored(padded(first))))) == 4
    for request in (second, first):
        sent.add(request)
        events = taken(cache_of(sent), stored(padded(first)))
        assert stored_keys(events) == keys(first)[:1]


@pytest.mark.parametrize(
    "shown",
    [
        [(20, 9)],  # one token of the image is missing
        [(20, 4), (30, 6)],  # text within its span
    ],
)
def test_image_with_other_spans_is_unknown(shown: list[tuple[int, int]]) -> None:  # E5
    sent = asked(64, image(1, (20, 10)))
    told = asked(64, image(1, *shown))
    assert stored_keys(taken(pages(sent), stored(padded(told)))) == keys(sent)[:1]


def test_an_image_whose_placeholders_differ_is_not_known() -> None:
    request = asked(64, image(1, (20, 10)))
    request.token_ids[25] += 1
    assert stored_keys(taken(pages(request), stored(padded(request)))) == keys(request)[:1]


def test_the_oldest_images_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent_images, "MAX_IMAGES", 2)
    requests = [asked(32, image(number, (0, 10))) for number in range(3)]
    held = pages(*requests)
    assert [len(list(taken(held, stored(padded(one), base=10 * n)))) for n, one in enumerate(requests)] == [0, 2, 2]


def test_blocks_without_a_known_parent_are_not_reported() -> None:  # E5
    request = asked(64)
    held = pages(request)
    assert list(taken(held, stored(request.token_ids[32:], first=2))) == []
    assert stored_keys(taken(held, stored(request.token_ids[:32]))) == keys(request)[:2]
    assert stored_keys(taken(held, stored(request.token_ids[32:], first=2))) == keys(request)[2:]


@pytest.mark.parametrize(
    "fields",
    [
        {"tier": common_pb2.KV_CACHE_TIER_HOST},
        {"locality": common_pb2.KV_CACHE_LOCALITY_REMOTE},
        {"lora_name": "adapter"},
        {"cache_salt": "another gateway's"},
    ],
)
def test_blocks_that_a_request_of_ours_would_not_use(fields: dict[str, Any]) -> None:  # E5
    request = asked(64)
    assert list(taken(pages(request), stored(request.token_ids, **fields))) == []


def test_blocks_that_depend_on_more_than_their_tokens_are_not_anybodys() -> None:  # E5
    request = asked(64)
    held = pages(request)
    event = stored(request.token_ids[:32])
    event.stored.blocks[0].extra_keys.add()
    assert list(taken(held, event)) == []
    assert held.exactness.reason == EXTRA_KEYS
    assert list(taken(held, stored(request.token_ids[32:], first=2))) == []


def test_published_blocks_that_depend_on_more_than_their_tokens_are_not_anybodys() -> None:  # E5
    request = asked(64)
    held = pages(request)
    assert not list(held.take(Stored([1, 2], None, request.token_ids[:32], BLOCK, extra_keys=[None, ["a salt"]])))
    assert held.exactness.reason == EXTRA_KEYS
    assert not list(held.take(Stored([3, 4], 2, request.token_ids[32:], BLOCK)))
    list(held.take(Cleared()))
    assert list(held.take(Stored([1, 2], None, request.token_ids[:32], BLOCK, extra_keys=[None, []])))
    assert held.exactness.reason == ""


def test_text_of_more_tenants_than_are_kept_apart_is_not_all_known() -> None:  # E5
    requests = [asked(40, salt=bytes([number])) for number in range(MAX_SALTS)]
    held = pages(*requests)
    assert held.exactness.reason == ""
    held = pages(*requests, asked(40, salt=b"one more"))
    assert "tenants" in held.exactness.reason
    assert len(stored_keys(taken(held, stored(requests[0].token_ids[:16])))) == MAX_SALTS


def test_removals() -> None:
    request = asked(64)
    held = pages(request, page=8)
    list(taken(held, stored(request.token_ids, 8)))
    assert list(taken(held, removed(7, tier=common_pb2.KV_CACHE_TIER_HOST))) == []
    assert list(taken(held, removed(7, 6, 99))) == [BlockRemoved(keys(request)[3])]
    assert list(taken(held, removed(7))) == []
    cleared = taken(held, common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared()))
    assert set(cleared) == {BlockRemoved(key) for key in keys(request)[:3]}
    assert list(taken(held, stored(request.token_ids[48:], 8, first=6))) == []


def test_a_page_that_is_stored_again_has_the_keys_of_tenants_that_came_since() -> None:
    one, other = asked(16, salt=b"one"), asked(16, salt=b"other")
    sent = SentImages()
    sent.add(one)
    held = cache_of(sent)
    first = stored_keys(taken(held, stored(one.token_ids)))
    assert not taken(held, stored(one.token_ids))
    sent.add(other)
    again = list(taken(held, stored(one.token_ids)))
    assert {event.key for event in again if isinstance(event, BlockRemoved)} == set(first)
    assert set(stored_keys(again)) == {*first, *keys(other)}


def test_page_that_is_stored_again_after_prompts_in_another_order_stays() -> None:
    one, other = asked(16, salt=b"one"), asked(16, salt=b"other")
    sent = SentImages()
    sent.add(one)
    sent.add(other)
    held = cache_of(sent)
    assert len(taken(held, stored(one.token_ids))) == 2
    sent.add(one)
    assert not taken(held, stored(one.token_ids))
    assert len(taken(held, removed(0))) == 2


def test_text_that_was_stored_before_a_tenant_came_is_not_known_to_be_its_own() -> None:  # E5
    """The worker would reuse it, but does not store it again."""
    one, other = asked(32, salt=b"one"), asked(32, salt=b"other")
    for before in ([], [one]):
        sent = SentImages()
        for request in before:
            sent.add(request)
        held = cache_of(sent)
        assert set(keys(other)).isdisjoint(stored_keys(taken(held, stored(one.token_ids))))
        assert held.exactness.reason == "", before
        sent.add(other)
        assert held.exactness.reason == LATE_TENANT, before
        list(taken(held, removed(0, 1)))
        assert held.exactness.reason == "", before
        assert set(keys(other)) <= set(stored_keys(taken(held, stored(one.token_ids))))
        assert held.exactness.reason == "", before


def test_of_two_pages_with_one_name_neither_is_known() -> None:  # E5
    one, other = asked(16, seed=1), asked(16, seed=2)
    held = pages(one)
    taken(held, stored(one.token_ids))
    assert taken(held, stored(other.token_ids)) == [BlockRemoved(keys(one)[0])]
    assert not taken(held, removed(0))


def test_pages_that_depend_on_the_tokens_after_them_are_not_known_for_certain() -> None:  # E5
    request = asked(32)
    held = pages(request)
    assert list(held.take(Stored([1, 2], None, request.token_ids, BLOCK, lookahead_token_ids=[7])))
    assert (held.exactness.level, held.exactness.reason) == ("DEGRADED", LOOKAHEAD)


@table("sizes", [[8, 8], [8, 24], [24, 8]])
def test_pages_of_other_sizes_are_not_known(sizes: list[int]) -> None:  # E5
    event = common_pb2.KvCacheEvent()
    for name, size in enumerate(sizes):
        event.stored.blocks.add(block_hash=name, token_ids=[1] * size)
    held = pages(asked(1))
    assert not taken(held, event)
    assert held.exactness.level == "DEGRADED"
    assert "other sizes than 16 tokens" in held.exactness.reason


def test_event_of_no_pages_says_nothing() -> None:
    held = pages(asked(1))
    event = stored([])
    event.stored.SetInParent()
    assert not taken(held, event)
    assert held.exactness == EXACT


def test_event_of_a_later_relay_is_reported() -> None:
    held = pages(asked(1))
    assert not taken(held, common_pb2.KvCacheEvent())
    assert held.exactness.level == "DEGRADED"


# --- as SMG's relay makes them of what the engines publish ---


def relayed(*events: Any) -> list[common_pb2.KvCacheEvent]:
    payload = msgspec.msgpack.encode([1.0, list(events), 0])
    return list(Normalizer().normalize_batch(decode_batch(payload), 5).events)


def as_array(request: EngineRequest, hashes: list[Any], parent: Any = None) -> list[Any]:
    """What TokenSpeed publishes, and SGLang until 0.5.22."""
    return ["BlockStored", hashes, parent, padded(request), BLOCK]


def test_events_of_tokenspeed() -> None:  # E8
    request = asked(48, image(1, (20, 10)))
    (event,) = relayed(as_array(request, [1 << 63, 2, 3]))
    assert stored_keys(taken(pages(request), event)) == keys(request)
    (gone,) = relayed(["BlockRemoved", [1 << 63]])
    held = pages(request)
    list(taken(held, event))
    assert list(taken(held, gone)) == [BlockRemoved(keys(request)[0])]


def sglang_pages(request: EngineRequest) -> ReportedCache:
    sent = SentImages()
    sent.add(request)
    return cache_of(sent)


def test_events_of_sglang_end_at_the_first_image() -> None:  # E5
    request = asked(64, image(1, (36, 10)))
    (event,) = relayed(as_array(request, [-1, -2, -3, -4]))
    assert stored_keys(taken(sglang_pages(request), event)) == keys(request)[:2]


def test_events_of_sglang_as_maps() -> None:  # E8
    request = asked(32)
    told = {
        "type": "BlockStored",
        "block_hashes": [-(1 << 63), 5],
        "parent_block_hash": None,
        "token_ids": request.token_ids,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "session_id": "s",
    }
    found = [
        event for said in relayed(told, told | {"medium": "CPU_PINNED"}) for event in taken(sglang_pages(request), said)
    ]
    assert stored_keys(found) == keys(request)


def test_wide_pads_do_not_pass_the_relay() -> None:
    request = asked(32)
    told = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": request.token_ids[:20] + [1_000_000 + (1 << 61)] * 12,
        "block_size": BLOCK,
        "lora_id": None,
    }
    assert relayed(told) == []


# --- where an engine publishes ---


@table(
    ("config", "host", "source"),
    [
        ('{"publisher": "zmq"}', "a", EventSource("tcp://a:5557")),
        ('{"publisher": "zmq", "endpoint": "tcp://0.0.0.0:1", "topic": "t"}', "a", EventSource("tcp://a:1", topic="t")),
        (
            '{"publisher": "zmq", "endpoint": "tcp://*:1", "replay_endpoint": "tcp://*:2"}',
            "::1",
            EventSource("tcp://[::1]:1", "tcp://[::1]:2"),
        ),
        ('{"enable_kv_cache_events": true, "endpoint": "tcp://a:1"}', "a", EventSource("tcp://a:1")),
        # Another machine's loopback, and one that may be another machine's.
        ('{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:1"}', "a", None),
        ('{"publisher": "zmq", "endpoint": "tcp://*:1", "replay_endpoint": "tcp://b:2"}', "a", None),
        ('{"publisher": "zmq", "endpoint": "ipc:///tmp/x"}', "a", None),
        ('{"publisher": "null"}', "a", None),
        ('{"enable_kv_cache_events": false}', "a", None),
        ("", "a", None),
        ("[]", "a", None),
    ],
)
def test_publishers(config: str, host: str, source: EventSource | None) -> None:  # E5
    server = tokenspeed_scheduler_pb2.GetServerInfoResponse()
    server.server_args.update({"kv_events_config": config})
    assert event_source_of(server, host) == source
