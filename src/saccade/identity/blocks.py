"""Computes KV block keys from token ids, content hashes and the tenant's salt (architecture, contract 1)."""

from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from struct import iter_unpack
from typing import NamedTuple

from blake3 import blake3

KEY_BYTES = 16

INT64 = "l" if array("l").itemsize == 8 else "q"
"""Type code of an array of 64-bit integers; filling long takes half the time of long long."""


class MediaRun(NamedTuple):
    """The part of a prompt that shows a media item: *length* placeholders from position *start*.

    They stand for the item's tokens from *offset* on.
    """

    start: int
    length: int
    content_hash: bytes
    offset: int = 0


class MediaOverlap(NamedTuple):
    """The part of a block that shows a media item: *length* tokens from the block's position *start*.

    They stand for the item's tokens from *offset* on.
    """

    content_hash: bytes
    start: int
    length: int
    offset: int


def media_in_block(runs: Sequence[MediaRun], start: int, stop: int) -> Iterator[MediaOverlap]:
    """Yield the overlaps of *runs* with the block that holds the prompt's tokens [start, stop)."""
    for run in runs:
        first, last = max(start, run.start), min(stop, run.start + run.length)
        if first < last:
            yield MediaOverlap(run.content_hash, first - start, last - first, run.offset + first - run.start)


def root_key(model_fingerprint: bytes, salt: bytes) -> bytes:
    """Return the key that is the parent of every first block for this model and tenant."""
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in (b"saccade.root.1", model_fingerprint, salt))
    return blake3(framed).digest(KEY_BYTES)


def block_key(parent: bytes, token_ids: Sequence[int], start: int, runs: Sequence[MediaRun]) -> bytes:
    """Return the 128-bit key of the block that holds *token_ids* from position *start*, after block *parent*.

    Each run that overlaps the block adds its content hash, its place in the block and the item's offset there. So
    blocks that show different images have different keys, even if their placeholder ids are the same.
    """
    media = b"".join(map(_packed, media_in_block(runs, start, start + len(token_ids)))) if runs else b""
    return _key(parent, len(token_ids).to_bytes(8, "little"), array("q", token_ids).tobytes(), media)


def block_keys(root: bytes, token_ids: Sequence[int], runs: Sequence[MediaRun], block_size: int) -> list[bytes]:
    """Return the keys of all full blocks of a prompt, in order; a partial last block has no key."""
    length, packed = block_size.to_bytes(8, "little"), array(INT64, token_ids).tobytes()
    media = _media_of_blocks(runs, block_size)
    keys: list[bytes] = []
    parent = root
    # One hasher for all blocks: making one costs as much as hashing a block.
    hasher = blake3()
    reset, update, digest = hasher.reset, hasher.update, hasher.digest
    blocks = iter_unpack(f"{8 * block_size}s", packed[: len(packed) // (8 * block_size) * 8 * block_size])
    for index, (block,) in enumerate(blocks):
        reset()
        update(parent + length + block + media[index] if index in media else parent + length + block)
        parent = digest(KEY_BYTES)
        keys.append(parent)
    return keys


def runs_within(runs: Sequence[MediaRun], start: int, stop: int) -> tuple[MediaRun, ...]:
    """Return the parts of *runs* in the prompt's tokens [start, stop), with positions counted from *start*."""
    return tuple(
        MediaRun(overlap.start, overlap.length, overlap.content_hash, overlap.offset)
        for overlap in media_in_block(runs, start, stop)
    )


def _key(parent: bytes, length: bytes, token_ids: bytes, media: bytes) -> bytes:
    return blake3(parent + length + token_ids + media).digest(KEY_BYTES)


def _packed(overlap: MediaOverlap) -> bytes:
    return overlap.content_hash + array("q", overlap[1:]).tobytes()


def _media_of_blocks(runs: Sequence[MediaRun], block_size: int) -> dict[int, bytes]:
    """Return the bytes that *runs* contribute to each block's key, by the block's index."""
    media: defaultdict[int, bytes] = defaultdict(bytes)
    for run in runs:
        for index in range(run.start // block_size, -(-(run.start + run.length) // block_size)):
            for overlap in media_in_block((run,), index * block_size, (index + 1) * block_size):
                media[index] += _packed(overlap)
    return media
