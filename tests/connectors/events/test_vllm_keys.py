"""Our keys of the blocks that vLLM reports: equal to those of the prompts, and never of another prompt."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import table
from vllm_publisher import CLEARED, ENCODINGS, Encoding, Item, Prompt, hashes, payload, removed, stored

from saccade.connectors.events.batches import BatchDecoder
from saccade.connectors.events.named_images import NamedImages, cache_salt, content_hash_of, media_identifier, salt_of
from saccade.connectors.events.reported_cache import LOOKAHEAD, KeyContext, ReportedCache
from saccade.errors import WorkerUnavailable
from saccade.identity.blocks import MediaRun, block_keys, root_key
from saccade.protocol.kv_events import BlockOffloaded, BlockRemoved, BlockStored, KvEvent, OffloadedRemoved

PAD = 4082
SIZE = 4
CONTEXT = KeyContext(b"fingerprint", block_size=SIZE, page_size=SIZE, max_model_len=64)
CAT, DOG = b"\x01" * 32, b"\x02" * 32
TEXT = Prompt(tuple(range(12)))
IMAGE = Prompt((7, 8, *[PAD] * 9, 9), (Item(CAT, 2, 9),))
TENANT = dataclasses.replace(IMAGE, salt=b"tenant")


def keys_of(prompt: Prompt) -> list[bytes]:
    """Return the keys that a gateway computes for a prompt."""
    runs = [MediaRun(item.start, item.length, item.content_hash) for item in prompt.items]
    return block_keys(root_key(CONTEXT.fingerprint, prompt.salt), prompt.token_ids, runs, SIZE)


class Seen:
    """What a gateway holds to be cached, after events."""

    def __init__(self, context: KeyContext = CONTEXT) -> None:
        self.keys: set[bytes] = set()
        self.parents: dict[bytes, bytes] = {}
        self.firsts: set[bytes] = set()
        self.cache = ReportedCache(context, NamedImages(frozenset({PAD})))

    def take(self, *events: dict[str, Any], encoding: Encoding = ("array", "map")) -> "Seen":
        for event in BatchDecoder().events(payload(events, encoding)):
            for change in self.cache.take(event):
                match change:
                    case BlockStored(key, parent, is_first=is_first):
                        assert key not in self.keys
                        assert is_first or parent in self.keys
                        self.firsts |= {key} if is_first else set()
                        self.keys.add(key)
                        self.parents[key] = parent
                    case BlockRemoved(key):
                        self.keys.remove(key)
        return self


def seen(*events: dict[str, Any], encoding: Encoding = ("array", "map")) -> Seen:
    return Seen().take(*events, encoding=encoding)


@pytest.mark.parametrize("salt", [b"", b"tenant"])
def test_an_image_s_identifier_gives_back_its_content_hash_to_its_tenant_only(salt: bytes) -> None:  # E5
    identifier = media_identifier(salt, CAT)
    assert content_hash_of(salt, identifier) == CAT
    assert content_hash_of(b"another", identifier) is None
    assert identifier != media_identifier(b"another", CAT)


@pytest.mark.parametrize("identifier", ["", "cat-3", CAT.hex(), f"{CAT.hex().upper()}.", "zz." + "0" * 16])
def test_an_identifier_of_others_is_no_content_hash(identifier: str) -> None:  # E5
    assert content_hash_of(b"", identifier) is None


def test_a_salt_travels_as_hex_and_the_empty_one_not_at_all() -> None:  # E5
    assert cache_salt(b"") is None
    assert salt_of(cache_salt(b"\x00tenant") or "") == b"\x00tenant"
    assert [salt_of(other) for other in ("", "tenant", "AB", "a b")] == [None] * 4


@table("encoding", ENCODINGS)
@table("prompt", [TEXT, IMAGE, TENANT])
def test_keys_are_those_of_the_prompt(prompt: Prompt, encoding: Encoding) -> None:  # E5
    held = seen(stored(prompt, SIZE), encoding=encoding)
    keys = keys_of(prompt)
    assert held.keys == set(keys)
    assert [held.parents[key] for key in keys] == [root_key(CONTEXT.fingerprint, prompt.salt), *keys[:-1]]
    assert held.firsts == {keys[0]}
    assert held.cache.exactness.level == "EXACT"


def test_two_images_in_one_block_and_one_over_several() -> None:  # E7
    tokens = (PAD, PAD, 5, PAD, *[PAD] * 6, 6, 7)
    prompt = Prompt(tokens, (Item(CAT, 0, 2), Item(DOG, 3, 7)))
    assert seen(stored(prompt, SIZE)).keys == set(keys_of(prompt))
    adjacent = Prompt((1, PAD, PAD, PAD), (Item(CAT, 1, 1), Item(DOG, 2, 2)))
    assert seen(stored(adjacent, SIZE)).keys == set(keys_of(adjacent))


def test_blocks_of_another_image_or_tenant_have_other_keys() -> None:  # E5
    other = dataclasses.replace(IMAGE, items=(Item(DOG, 2, 9),))
    assert seen(stored(IMAGE, SIZE)).keys.isdisjoint(keys_of(other))
    assert seen(stored(IMAGE, SIZE)).keys.isdisjoint(keys_of(TENANT))


def test_a_later_event_continues_its_parent() -> None:
    events = [stored(IMAGE, SIZE, first, 1) for first in range(3)]
    assert seen(*events).keys == set(keys_of(IMAGE))


def test_a_block_without_its_parent_is_not_reported_as_a_first_one() -> None:  # E5
    held = seen(stored(TEXT, SIZE, first=1))
    assert not held.keys


def test_removed_blocks_are_removed_and_all_by_a_clear() -> None:
    names, keys = hashes(TEXT, SIZE), keys_of(TEXT)
    held = seen(stored(TEXT, SIZE), removed(names[2]))
    assert held.keys == set(keys[:2])
    assert not held.take(CLEARED).keys
    assert held.take(stored(TEXT, SIZE)).keys == set(keys)


def test_a_copy_that_is_removed_removes_the_block() -> None:  # E5
    held = seen(stored(TEXT, SIZE), stored(TEXT, SIZE), removed(*hashes(TEXT, SIZE)))
    assert not held.keys


def test_clear_makes_an_unknown_cache_known() -> None:
    held = Seen()
    held.cache.earlier = "its replay begins late"
    assert held.cache.exactness.level == "DEGRADED"
    assert held.take(CLEARED).cache.exactness.level == "EXACT"


def test_blocks_that_depend_on_the_tokens_behind_them_are_not_known_for_certain() -> None:  # E5
    held = seen(stored(TEXT, SIZE, lookahead_token_ids=[1]))
    assert held.keys
    assert (held.cache.exactness.level, held.cache.exactness.reason) == ("DEGRADED", LOOKAHEAD)
    assert seen(stored(TEXT, SIZE, lookahead_token_ids=[])).cache.exactness.level == "EXACT"


@table(
    ("fields", "level", "word"),
    [
        ({"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 32}, "DEGRADED", "sliding_window"),
        ({"kv_cache_spec_kind": "sliding_window"}, "DEGRADED", "sliding_window"),
        ({"kv_cache_spec_kind": "mamba"}, "DEGRADED", "mamba"),
        ({"kv_cache_spec_kind": "newer_than_this"}, "DEGRADED", "newer_than_this"),
        ({"kv_cache_spec_kind": None, "group_idx": 1}, "DEGRADED", "None"),
        ({"block_size": 2}, "DEGRADED", "other sizes"),
        ({"token_ids": list(range(16))}, "DEGRADED", "other sizes"),
        ({"extra_keys": None}, "NONE", "extra_keys"),
        ({"extra_keys": [None]}, "NONE", "extra_keys"),
    ],
)
def test_unknowable_blocks_are_left_out_with_a_reason(fields: dict[str, Any], level: str, word: str) -> None:  # E5
    held = seen(stored(TEXT, SIZE, **fields))
    assert not held.keys
    assert held.cache.exactness.level == level
    assert word in held.cache.exactness.reason


@table(
    "fields",
    [
        {"medium": "CPU"},
        {"medium": "STORAGE"},
        {"locality": "REMOTE"},
        {"lora_name": "adapter", "lora_id": 1},
        {"extra_keys": [["adapter", None], None, None]},
        {"extra_keys": [[b"\x00" * 32], None, None]},
        {"extra_keys": [["not hex"], None, None]},
        {"extra_keys": [["abcd", "abcd"], None, None]},
        {"extra_keys": [[["cat-3", 0]], None, None]},
        {"extra_keys": [[[media_identifier(b"another", CAT), 0]], None, None]},
        {"extra_keys": [[[media_identifier(b"", CAT), 0, "mm"]], None, None]},
    ],
)
def test_blocks_that_no_prompt_of_a_gateway_reuses_are_left_out(fields: dict[str, Any]) -> None:  # E5
    held = seen(stored(TEXT, SIZE, **fields))
    assert not held.keys
    assert held.cache.exactness.level == "EXACT"


@table(
    "fields",
    [
        {"medium": None},
        {"locality": "LOCAL"},
        {"kv_cache_spec_kind": "mla_attention"},
        {"kv_cache_spec_kind": "sink_full_attention"},
        {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 64},
        {"kv_cache_spec_kind": None},
        {"kv_cache_spec_kind": None, "group_idx": None},
        {"session_id": "s", "ownership": "o", "of_a_later_release": [1]},
    ],
)
def test_blocks_that_every_layer_needs_are_reported(fields: dict[str, Any]) -> None:
    held = seen(stored(TEXT, SIZE, **fields))
    assert held.keys == set(keys_of(TEXT))
    assert held.cache.exactness.level == "EXACT"


OFFLOADED = bytes.fromhex(
    "93cb3ff80000000000009289a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf0101010101010101b170617265"
    "6e745f626c6f636b5f68617368c0a9746f6b656e5f69647390aa626c6f636b5f73697a6500a76c6f72615f6964c0a66d656469756da3435055"
    "a96c6f72615f6e616d65c0a967726f75705f6964780089a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf0202"
    "020202020202b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647390aa626c6f636b5f73697a6500a76c6f72615f6964c0"
    "a66d656469756da3435055a96c6f72615f6e616d65c0a967726f75705f69647800c0"
)
OFFLOADED_REMOVED = bytes.fromhex(
    "93cb3ff80000000000009184a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657392cf0101010101010101cf020202"
    "0202020202a66d656469756da3435055a967726f75705f69647800c0"
)
"""Recorded from vLLM 0.32's OffloadingConnector: two blocks are copied to the CPU's memory, and dropped there."""

NAMES = [0x0101010101010101, 0x0202020202020202]


def changes(held: Seen, batch: bytes) -> list[KvEvent]:
    return [change for event in BatchDecoder().events(batch) for change in held.cache.take(event)]


def test_copies_in_the_cpus_memory_are_known_by_their_names() -> None:  # E5
    held = seen(stored(TEXT, SIZE, block_hashes=[*NAMES, 3]))
    keys = keys_of(TEXT)
    assert changes(held, OFFLOADED) == [BlockOffloaded(key) for key in keys[:2]]
    assert changes(held, OFFLOADED) == []  # it is said again
    assert held.take(removed(*NAMES)).keys == {keys[2]}
    assert held.cache.exactness.level == "EXACT"
    assert changes(held, OFFLOADED_REMOVED) == [OffloadedRemoved(key) for key in keys[:2]]
    assert changes(held, OFFLOADED) == []  # pages that are not known have no keys
    assert changes(seen(stored(TEXT, SIZE, block_hashes=[*NAMES, 3], group_idx=None)), OFFLOADED) == []


def test_clear_drops_copies_too() -> None:
    held = seen(stored(TEXT, SIZE, block_hashes=[*NAMES, 3]))
    changes(held, OFFLOADED)
    dropped = changes(held, payload([CLEARED]))
    assert dropped[-2:] == [OffloadedRemoved(key) for key in keys_of(TEXT)[:2]]


def test_removals_of_other_groups_media_and_hosts_change_nothing() -> None:
    names = hashes(TEXT, SIZE)
    held = seen(stored(TEXT, SIZE), stored(TEXT, SIZE, group_idx=1))
    held.take(removed(*names, group_idx=1), removed(*names, medium="CPU"), removed(*names, locality="REMOTE"))
    assert held.keys == set(keys_of(TEXT))
    assert held.cache.exactness.level == "DEGRADED"
    assert not held.take(removed(*names)).keys


def test_a_salt_in_a_later_block_is_none_and_ends_the_prefix() -> None:  # E5
    assert seen(stored(TEXT, SIZE, extra_keys=[None, ["abcd"], None])).keys == set(keys_of(TEXT)[:1])


def test_an_image_of_more_than_one_run_makes_the_worker_one_of_text_prefixes() -> None:  # E5
    tiled = Prompt((1, 2, 3, 4, PAD, 5, PAD, 6), (Item(CAT, 4, 3),))
    held = seen(stored(tiled, SIZE))
    assert held.keys == set(keys_of(tiled)[:1])
    assert held.cache.exactness.level == "TEXT_PREFIX"


def test_blocks_of_equal_hash_are_unknown() -> None:  # E5
    same = hashes(TEXT, SIZE)[:1]
    other = Prompt((20, 21, 22, 23))
    held = seen(stored(TEXT, SIZE, count=1), stored(other, SIZE, block_hashes=same))
    assert not held.keys


def test_unknown_event_type_is_reported() -> None:
    held = seen({"type": "BlockMoved", "to": 3}, stored(TEXT, SIZE))
    assert held.keys == set(keys_of(TEXT))
    assert "BlockMoved" in held.cache.exactness.reason


def test_length_of_a_reason_is_bounded() -> None:
    held = seen(*({"type": f"{'x' * 1000}{number}"} for number in range(100)))
    assert len(held.cache.exactness.reason) < 200


@pytest.mark.parametrize("event", [{"type": "BlockStored", "block_hashes": [1]}, {"no": "type"}])
def test_an_event_of_which_fields_are_missing_is_an_error(event: dict[str, Any]) -> None:
    with pytest.raises(msgspec.DecodeError):
        seen(event)


def test_a_worker_of_too_many_blocks_is_not_followed() -> None:
    held = Seen(dataclasses.replace(CONTEXT, max_pages=2))
    with pytest.raises(WorkerUnavailable, match="more than 2 pages"):
        held.take(stored(TEXT, SIZE))


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Prompts that share beginnings: of few different tokens, images and tenants."""
    tokens: list[int] = []
    items: list[Item] = []
    for _ in range(draw(st.integers(1, 4))):
        tokens += draw(st.lists(st.integers(1, 2), min_size=1, max_size=5))
        if draw(st.booleans()):
            length = draw(st.integers(1, 11))
            items.append(Item(draw(st.sampled_from([CAT, DOG])), len(tokens), length))
            tokens += [PAD] * length
    return Prompt(tuple(tokens), tuple(items), draw(st.sampled_from([b"", b"tenant"])))


def pieces(prompt: Prompt, cuts: Iterable[int]) -> list[dict[str, Any]]:
    """Return the events of a prompt that is computed in chunks, which end at *cuts* blocks."""
    num_blocks = len(prompt.token_ids) // SIZE
    bounds = [0, *sorted({cut for cut in cuts if 0 < cut < num_blocks}), num_blocks]
    return [stored(prompt, SIZE, first, last - first) for first, last in itertools.pairwise(bounds) if first < last]


@given(
    st.lists(st.tuples(prompts(), st.sets(st.integers(1, 8))), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
    st.sampled_from(ENCODINGS),
)
def test_any_legal_order_gives_the_keys_of_all_prompts(
    cut_prompts: list[tuple[Prompt, set[int]]], random: Any, encoding: Encoding
) -> None:  # E5
    queues = [pieces(prompt, cuts) for prompt, cuts in cut_prompts]
    held = Seen()
    while queues := [queue for queue in queues if queue]:
        held.take(random.choice(queues).pop(0), encoding=encoding)
    keys = [keys_of(prompt) for prompt, _ in cut_prompts]
    assert held.keys == {key for chain in keys for key in chain}
    # vLLM evicts the last blocks of a prompt first.
    gone, _ = random.choice(cut_prompts)
    names = hashes(gone, SIZE)
    kept = random.randint(0, len(names))
    held.take(*(removed(name) for name in reversed(names[kept:])), encoding=encoding)
    assert held.keys == {key for chain in keys for key in chain} - set(keys_of(gone)[kept:])
