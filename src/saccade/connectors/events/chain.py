"""A prompt up to the end of one page of an engine's cache, in our keys."""

from collections.abc import Sequence
from typing import NamedTuple

from saccade.identity.blocks import KEY_BYTES, MediaRun, block_key, root_key
from saccade.protocol.kv_events import BlockStored


class SentImage(NamedTuple):
    """An image as it was sent for the tenant of *salt*: its placeholder's id, and the lengths of its spans."""

    salt: bytes
    content_hash: bytes
    placeholder: int
    spans: tuple[int, ...]


class Rest(NamedTuple):
    """The tokens after a chain's last complete block, with their images.

    *image* is the image whose first *num_shown* tokens have come and whose others must follow; None between images.
    """

    token_ids: Sequence[int] = ()
    runs: Sequence[MediaRun] = ()
    image: SentImage | None = None
    num_shown: int = 0
    has_block: bool = True
    """Whether there is a complete block before it."""


NO_REST, BEGINNING = Rest(), Rest(has_block=False)


class Chain(NamedTuple):
    """A prompt up to the end of a page, of a tenant with one of *salts*.

    For each salt, *joined_keys* has the key of the last complete block, or the root's if there is none. They are one
    string because a worker has a chain for each page, and most chains have one key.
    """

    salts: tuple[bytes, ...]
    joined_keys: bytes
    rest: Rest = BEGINNING

    @classmethod
    def root(cls, fingerprint: bytes, salts: tuple[bytes, ...]) -> "Chain":
        """Return the chain of a prompt that has not begun."""
        return cls(salts, b"".join([root_key(fingerprint, salt) for salt in salts]))

    def stored(self, before: "Chain") -> Sequence[BlockStored]:
        """Return the events that store the last block, which *before* lacks."""
        is_first = not before.rest.has_block
        if len(before.joined_keys) == KEY_BYTES:
            return (BlockStored(self.joined_keys, before.joined_keys, [], [], is_first),)
        keys = zip(self.keys_of(self.salts), before.keys_of(self.salts), strict=True)
        return [BlockStored(key, parent, [], [], is_first) for key, parent in keys]

    def keys_of(self, salts: tuple[bytes, ...]) -> Sequence[bytes]:
        """Return the keys for *salts*, some of this chain's."""
        joined = self.joined_keys
        if len(joined) == KEY_BYTES:
            return (joined,)
        keys = [joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES)]
        return keys if salts is self.salts else [keys[self.salts.index(salt)] for salt in salts]

    def with_block(self, token_ids: Sequence[int], runs: Sequence[MediaRun], rest: Rest = NO_REST) -> "Chain":
        """Return this chain with a block of *token_ids*, and *rest* after it."""
        salts, joined, _ = self
        if len(joined) == KEY_BYTES:
            return Chain(salts, block_key(joined, token_ids, 0, runs), rest)
        return Chain(salts, b"".join([block_key(key, token_ids, 0, runs) for key in self.keys_of(salts)]), rest)

    def with_rest_as_block(self) -> "Chain":
        """Return this chain with a block of the tokens after its last one."""
        token_ids, runs, image, num_shown, _ = self.rest
        return self.with_block(token_ids, runs, NO_REST if image is None else Rest((), (), image, num_shown))
