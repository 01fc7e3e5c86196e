"""Batches of vLLM's cache events, in the encodings of its releases."""

import msgspec
import pytest
from tables import table

from saccade.connectors.events.batches import BatchDecoder, Cleared, Removed, Stored, Unknown

# What vLLM 0.32.0 published for a prompt of 90 placeholders between six other tokens, byte by byte.
VLLM_0_32 = bytes.fromhex(
    "93cb41dac100f8cfd7a8918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657393cfe4cb22b2a2ec1aec"
    "cf3165b72d738c30e6cfbf9d14e4118d58b1b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc0060cd02"
    "17cd016fccc6cd021f"
    + "cd0222"
    * 90
    + "cd022020aa626c6f636b5f73697a6520a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472"
    "615f6b657973939192d9513232373935313335393131363964393363376237336434636164303430343661373462396537386562"
    "33323664636338623961366536353439626439323630302e61663133343962396635663961316136049192d95132323739353133"
    "35393131363964393363376237336434636164303430343661373462396537386562333236646363386239613665363534396264"
    "39323630302e61663133343962396635663961316136e49192d95132323739353133353931313639643933633762373364346361"
    "6430343034366137346239653738656233323664636338623961366536353439626439323630302e616631333439623966356639"
    "61316136d0c4a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00"
)
IDENTIFIER = "2279513591169d93c7b73d4cad04046a74b9e78eb326dcc8b9a6e6549bd92600.af1349b9f5f9a1a6"

# ["BlockStored", [7], None, [1, 2], 2, None, "GPU", None, [None]] in a batch, written down by hand.
OLD_STORED = bytes.fromhex("99ab426c6f636b53746f7265649107c092010202c0a3475055c091c0")
OLDEST_STORED = bytes.fromhex("95ab426c6f636b53746f7265649107c092010202")
OLD_REMOVED = bytes.fromhex("93ac426c6f636b52656d6f7665649107a3475055")
OLD_CLEARED = bytes.fromhex("91b0416c6c426c6f636b73436c6561726564")
ARRAY, MAP = bytes.fromhex("93cb3ff000000000000091"), bytes.fromhex("82a27473cb3ff0000000000000a66576656e747391")
"""The beginnings of batches with one event; an array ends with the data-parallel rank."""


def test_a_batch_as_vllm_0_32_sends_it() -> None:  # E8
    (event,) = BatchDecoder().events(VLLM_0_32)
    assert isinstance(event, Stored)
    assert event.block_hashes == [16486309011552738028, 3559452486346223846, 13807215002367383729]
    assert event.token_ids == [535, 367, 198, 543, *[546] * 90, 544, 32]
    assert event.extra_keys == [[[IDENTIFIER, start]] for start in (4, -28, -60)]
    assert (event.parent_block_hash, event.block_size, event.medium) == (None, 32, "GPU")
    assert (event.group_idx, event.kv_cache_spec_kind) == (0, "full_attention")


@pytest.mark.parametrize("batch", [ARRAY, MAP])
def test_events_of_releases_that_sent_arrays(batch: bytes) -> None:  # E8
    def read(event: bytes) -> object:
        (one,) = BatchDecoder().events(batch + event + (b"\x00" if batch == ARRAY else b""))
        return one

    stored = read(OLD_STORED)
    assert isinstance(stored, Stored)
    assert (stored.block_hashes, stored.token_ids, stored.medium, stored.extra_keys) == ([7], [1, 2], "GPU", [None])
    oldest = read(OLDEST_STORED)
    assert isinstance(oldest, Stored)
    assert (oldest.block_size, oldest.medium, oldest.extra_keys) == (2, None, None)
    removed = read(OLD_REMOVED)
    assert isinstance(removed, Removed)
    assert (removed.block_hashes, removed.medium) == ([7], "GPU")
    assert isinstance(read(OLD_CLEARED), Cleared)


@pytest.mark.parametrize("event", [{"type": "BlockMoved", "to": [1]}, ["BlockMoved", [1]]])
def test_unknown_event_type_is_recognised(event: object) -> None:
    assert list(BatchDecoder().events(msgspec.msgpack.encode([1.0, [event]]))) == [Unknown("BlockMoved")]


@table(
    "batch",
    [b"", b"\xc1", [1.0], [1.0, [3]], [1.0, [[]]], [1.0, [["BlockStored", 1]]], [1.0, [{"a": 1}]], {"events": 1}, 5],
)
def test_other_bytes_are_an_error(batch: object) -> None:
    payload = batch if isinstance(batch, bytes) else msgspec.msgpack.encode(batch)
    with pytest.raises(msgspec.DecodeError):
        list(BatchDecoder().events(payload))
