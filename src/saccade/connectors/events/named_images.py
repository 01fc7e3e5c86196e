"""How vLLM names tenants and images, in requests and in cache events.

vLLM uses our names as they are. Its events repeat them in the `extra_keys` of each block that depends on them.
"""

from collections.abc import Sequence
from itertools import takewhile

from blake3 import blake3

from saccade.connectors.events.batches import ExtraKeys, Stored
from saccade.connectors.events.chain import Chain
from saccade.identity.blocks import MediaRun
from saccade.identity.content import HASH_BYTES
from saccade.protocol.exactness import EXACT, Exactness

TAG_DIGITS = 16

NO_EXTRA_KEYS = "its events lack `extra_keys`, so they do not show whose blocks are cached, and with which images"
TEXT_IN_IMAGES = "what stands for an image of this model is more than one run of placeholders"


def cache_salt(salt: bytes) -> str | None:
    """Return a request's `cache_salt` for the tenant with *salt*, or None for the empty salt, which vLLM refuses."""
    return salt.hex() or None


def salt_of(cache_salt: str) -> bytes | None:
    """Return the salt that *cache_salt* stands for, or None for a string that no gateway of ours has sent."""
    return _bytes_of(cache_salt) or None


def media_identifier(salt: bytes, content_hash: bytes) -> str:
    """Return an image's identifier in requests to vLLM: its `mm_hashes` for token ids, its `uuid` in a chat.

    vLLM uses the string as it is, both in the hashes of blocks and as the key of its processor cache, which ignores the
    salt. So the string names the tenant too, and two tenants never share an entry.
    """
    return f"{content_hash.hex()}.{_tag(salt)}"


def content_hash_of(salt: bytes, identifier: str) -> bytes | None:
    """Return the content hash (32 bytes) in *identifier*, or None if it is not an identifier for this *salt*."""
    digits, _, tag = identifier.partition(".")
    content_hash = _bytes_of(digits)
    return content_hash if tag == _tag(salt) and content_hash is not None and len(content_hash) == HASH_BYTES else None


def _tag(salt: bytes) -> str:
    return blake3(salt).hexdigest()[:TAG_DIGITS]


def _bytes_of(digits: str) -> bytes | None:
    """Return the bytes of the hexadecimal *digits*, or None if hex() would not write them so."""
    try:
        decoded = bytes.fromhex(digits)
    except ValueError:
        return None
    return decoded if decoded.hex() == digits else None


class NamedImages:
    """Reads the names of tenants and images from extra keys; *placeholder_ids* are the token ids that stand for images.

    Blocks of adapters, embeddings, other tenants and other images than a gateway's are no prompt's of a gateway.
    """

    without_parent = EXACT

    def __init__(self, placeholder_ids: frozenset[int]) -> None:
        self._placeholder_ids = placeholder_ids
        self._image: tuple[bytes, str, bytes | None] = (b"", "", None)

    def exactness(self, salts: tuple[bytes, ...] | None) -> Exactness:
        """Return EXACT: events name the tenant of each first block."""
        return EXACT

    def fault(self, event: Stored) -> Exactness | None:
        """Return NONE for an event without extra keys."""
        if event.extra_keys is None or len(event.extra_keys) != len(event.block_hashes):
            return Exactness("NONE", NO_EXTRA_KEYS)
        return None

    def salts_of(self, extra_keys: ExtraKeys) -> tuple[bytes, ...]:
        """Return the salt in a first block's *extra_keys*."""
        named = next((extra for extra in extra_keys or () if isinstance(extra, str)), None)
        salt = b"" if named is None else salt_of(named)
        return () if salt is None else (salt,)

    def grow(self, chain: Chain, token_ids: Sequence[int], extra_keys: ExtraKeys) -> Chain | Exactness:
        """Return *chain* with a block, or how exactly the cache is known if the block is not certain."""
        if not extra_keys:
            return chain.with_block(token_ids, ())
        media = _media(extra_keys, is_first=not chain.rest.has_block)
        if media is None or not chain.salts:
            return EXACT
        runs = self._runs(token_ids, media, chain.salts[0])
        if isinstance(runs, Exactness):
            return runs
        return chain.with_block(token_ids, runs)

    def _runs(
        self, token_ids: Sequence[int], media: Sequence[tuple[str, int]], salt: bytes
    ) -> list[MediaRun] | Exactness:
        """Return the placeholders of each image of a block.

        An image's *start* counts tokens from the start of the block and is negative if an earlier block begins it.
        """
        if not media:
            return []
        runs: list[MediaRun] = []
        stops = [start for _, start in media[1:]] + [len(token_ids)]
        for (identifier, start), stop in zip(media, stops, strict=True):
            content_hash = self._content_hash_of(salt, identifier)
            if content_hash is None:
                return EXACT
            first = max(0, start)
            length = self._num_leading(token_ids[first : max(first, stop)])
            runs.append(MediaRun(first, length, content_hash, first - start))
        lengths = [run.length for run in runs]
        if not all(lengths) or sum(lengths) != self._num_placeholders(token_ids):
            return Exactness("TEXT_PREFIX", TEXT_IN_IMAGES)
        return runs

    def _content_hash_of(self, salt: bytes, identifier: str) -> bytes | None:
        """Return the same as content_hash_of(), but compute it only once for an image's consecutive blocks."""
        if self._image[:2] != (salt, identifier):
            self._image = (salt, identifier, content_hash_of(salt, identifier))
        return self._image[2]

    def _num_leading(self, token_ids: Sequence[int]) -> int:
        """Return the number of placeholders at the start of *token_ids*. Most blocks of an image have nothing else."""
        if self._num_placeholders(token_ids) == len(token_ids):
            return len(token_ids)
        return len(list(takewhile(self._placeholder_ids.__contains__, token_ids)))

    def _num_placeholders(self, token_ids: Sequence[int]) -> int:
        return sum(map(token_ids.count, self._placeholder_ids))


def _media(extra_keys: ExtraKeys, *, is_first: bool) -> list[tuple[str, int]] | None:
    """Return the images in a block's *extra_keys*, as (identifier, start), or None if they name anything else.

    Only a prompt's first block names the tenant.
    """
    media: list[tuple[str, int]] = []
    for extra in extra_keys or ():
        match extra:
            case [str(identifier), int(start)]:
                media.append((identifier, start))
            case str() if is_first:
                is_first = False
            case _:
                return None
    return media
