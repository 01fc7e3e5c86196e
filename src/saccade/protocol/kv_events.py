"""Stored, removed and cleared blocks: the seam for routing by cache content; the feed itself comes with the fleet."""

import msgspec


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag="stored"):
    """A full block became reusable under *key* (16 bytes); *parent* is the key before it, empty at the root."""

    key: bytes
    parent: bytes
    token_ids: list[int]


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag="removed"):
    """A block left the cache."""

    key: bytes


class AllCleared(msgspec.Struct, frozen=True, array_like=True, tag="cleared"):
    """Every block left the cache."""


KvEvent = BlockStored | BlockRemoved | AllCleared
