"""Translates between vLLM's names for cached blocks and our keys: salts, image identifiers and hashes in its events.

vLLM names a block by a hash that only vLLM can compute. Its events contain the hash's inputs, so our key for the block
is computed from them. If any part of a block is not certain, neither it nor the blocks after it are reported.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from blake3 import blake3

from saccade.connectors.events.batches import Cleared, Event, Hash, Removed, Stored
from saccade.errors import WorkerUnavailable
from saccade.identity.blocks import MediaRun, block_key, root_key
from saccade.identity.content import HASH_BYTES
from saccade.protocol.exactness import EXACT, Exactness, Level
from saccade.protocol.kv_events import BlockRemoved, BlockStored

TAG_DIGITS = 16

FULL_KINDS = ("full_attention", "mla_attention", "sink_full_attention")
"""Groups of layers that need every block of a prefix."""

WINDOW_KINDS = ("sliding_window", "sliding_window_mla")
DEVICE_MEDIA = (None, "GPU")
"""Where a block lies that can be reused at once. vLLM says GPU on CPUs too."""

MAX_QUOTED = 64
"""The most characters of a worker's words in a reason."""

NO_EXTRA_KEYS = "its events lack `extra_keys`, so they do not show whose blocks are cached, and with which images"
NO_SLICES = "it reports blocks of other sizes than {size} tokens; those are not known"
OTHER_LAYERS = "it caches its layers of kind {kind} apart, and they may hold less than it reports"
OTHER_EVENTS = "it reports {kind}, which is not known here"
LOOKAHEAD = "its blocks depend on the tokens after them, so one that is reported may not be reused: it drafts tokens"
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


@dataclass(frozen=True)
class KeyContext:
    """What the keys of a worker's blocks depend on in addition to its events. Sizes count tokens.

    *fingerprint* is that of the worker's Description; *placeholder_ids* are the token ids that stand for images.
    A worker with more than *max_blocks* blocks is not followed; a block takes about 180 bytes here.
    """

    fingerprint: bytes
    block_size: int
    max_model_len: int
    placeholder_ids: frozenset[int]
    max_blocks: int = 1_000_000


@dataclass
class Coverage:
    """How much of a worker's cache its events have reported.

    *earlier* says why the worker may hold blocks that no event has reported, or is "" if it cannot. *num_refused*
    counts, by reason, what could not be reported exactly.
    """

    earlier: str = ""
    limits: dict[Level, str] = field(default_factory=dict)
    num_refused: Counter[str] = field(default_factory=Counter)

    @property
    def exactness(self) -> Exactness:
        """How exactly the worker's cache can be known."""
        levels: tuple[Level, ...] = ("NONE", "TEXT_PREFIX", "DEGRADED")
        for level in levels:
            if level in self.limits:
                return Exactness(level, self.limits[level])
        return Exactness("DEGRADED", self.earlier) if self.earlier else EXACT

    def begin(self) -> None:
        """Forget the events of an earlier feed."""
        self.earlier = ""
        self.limits.clear()

    def note_missing(self, reason: str) -> None:
        """Note why the worker may hold blocks that were stored before the first event; "" means that it cannot."""
        self.earlier = reason

    def limit(self, level: Level, reason: str) -> None:
        """Note that the worker's cache can be known no better than *level*; the first reason stays."""
        # Counted under that one too: a reason may quote the worker, whose words have no bound.
        self.num_refused[self.limits.setdefault(level, reason)] += 1


class _ReportedBlock(NamedTuple):
    """A block that the worker holds: our key, and the salt at the root of its chain."""

    key: bytes
    salt: bytes


class _Contents(NamedTuple):
    """What a block's `extra_keys` say: its images as (identifier, start), and the salt of a first block."""

    media: list[tuple[str, int]]
    salt: bytes


class ReportedBlocks:
    """The blocks that a worker reports, by vLLM's hash of each.

    vLLM may hold a block twice and reports each copy by the same hash. A block counts as removed when one copy is.
    Counting copies would report blocks that are gone, since vLLM can be set to report blocks that it reuses again.
    """

    def __init__(self, context: KeyContext, coverage: Coverage) -> None:
        self._context = context
        self._coverage = coverage
        self._blocks: dict[Hash, _ReportedBlock] = {}
        self._groups: set[int | None] = set()
        self._image: tuple[bytes, str, bytes | None] = (b"", "", None)

    def take(self, event: Event) -> Iterator[BlockStored | BlockRemoved]:
        """Yield in our keys what *event* changes. Raises WorkerUnavailable if there are too many blocks."""
        match event:
            case Stored():
                if self._is_followed(event) and self._can_be_sliced(event):
                    yield from self._stored(event)
            case Removed(medium=medium, locality=locality, group_idx=group):
                if _is_local(medium, locality) and (group is None or group in self._groups):
                    yield from self._removed(event.block_hashes)
            case Cleared():
                yield from self._removed(list(self._blocks))
                self._coverage.earlier = ""
            case _:
                self._coverage.limit("DEGRADED", OTHER_EVENTS.format(kind=event.type[:MAX_QUOTED]))

    def _is_followed(self, event: Stored) -> bool:
        """Return whether *event* is about the group of layers that is followed, which needs every block of a prefix."""
        if not _is_local(event.medium, event.locality):
            return False
        kind, window = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
        if kind is None:
            needs_all = event.group_idx in (None, 0)
        else:
            sees_all = window is not None and window >= self._context.max_model_len
            needs_all = kind in FULL_KINDS or (kind in WINDOW_KINDS and sees_all)
        if needs_all and not self._groups:
            self._groups.add(event.group_idx)
        if needs_all and event.group_idx in self._groups:
            return True
        # Groups share their hashes, so removals of a second group would look like those of the first.
        self._coverage.limit("DEGRADED", OTHER_LAYERS.format(kind=str(kind)[:MAX_QUOTED]))
        return False

    def _can_be_sliced(self, event: Stored) -> bool:
        """Return whether token ids and extra keys can be divided by block."""
        count, size = len(event.block_hashes), self._context.block_size
        if event.lookahead_token_ids:
            self._coverage.limit("DEGRADED", LOOKAHEAD)
        if event.block_size != size or len(event.token_ids) != count * size:
            self._coverage.limit("DEGRADED", NO_SLICES.format(size=size))
            return False
        if event.extra_keys is None or len(event.extra_keys) != count:
            self._coverage.limit("NONE", NO_EXTRA_KEYS)
            return False
        return True

    def _stored(self, event: Stored) -> Iterator[BlockStored | BlockRemoved]:
        size, parent = self._context.block_size, None
        if event.lora_id is not None or event.lora_name is not None:
            self._coverage.num_refused["a LoRA adapter's block"] += 1
            return
        if event.parent_block_hash is not None and (parent := self._blocks.get(event.parent_block_hash)) is None:
            self._coverage.num_refused["a block whose parent is not known"] += 1
            return
        for index, block_hash in enumerate(event.block_hashes):
            token_ids = event.token_ids[index * size : (index + 1) * size]
            is_first = parent is None
            contents = self._contents((event.extra_keys or [])[index], is_first=is_first)
            if contents is None:
                return
            if parent is None:
                parent = _ReportedBlock(root_key(self._context.fingerprint, contents.salt), contents.salt)
            runs = self._runs(token_ids, contents.media, parent.salt)
            if runs is None:
                return
            block = _ReportedBlock(block_key(parent.key, token_ids, 0, runs), parent.salt)
            yield from self._keep(block_hash, block, parent, is_first=is_first)
            parent = block

    def _keep(
        self, block_hash: Hash, block: _ReportedBlock, parent: _ReportedBlock, *, is_first: bool
    ) -> Iterator[BlockStored | BlockRemoved]:
        first = self._blocks.setdefault(block_hash, block)
        if first is block:
            if len(self._blocks) > self._context.max_blocks:
                raise WorkerUnavailable(f"The worker holds more than {self._context.max_blocks} blocks.")
            yield BlockStored(block.key, parent.key, [], is_first=is_first)
        elif first.key != block.key:
            # Two blocks have the same 64 bits, so it is not certain which one an event means.
            self._coverage.num_refused["a block whose hash another one has"] += 1
            yield from self._removed([block_hash])

    def _removed(self, hashes: Sequence[Hash]) -> Iterator[BlockRemoved]:
        for block_hash in hashes:
            if (block := self._blocks.pop(block_hash, None)) is not None:
                yield BlockRemoved(block.key)

    def _contents(self, extra_keys: list[Any] | None, *, is_first: bool) -> _Contents | None:
        """Read a block's extra keys. Return None if they contain anything that our keys cannot express."""
        media: list[tuple[str, int]] = []
        salts: list[str] = []
        for extra in extra_keys or ():
            match extra:
                case [str(identifier), int(start)]:
                    media.append((identifier, start))
                case str(text) if is_first and not salts:
                    salts.append(text)
                case _:
                    self._coverage.num_refused["a block of embeddings or of a LoRA adapter"] += 1
                    return None
        salt = salt_of(salts[0]) if salts else b""
        if salt is None:
            self._coverage.num_refused["a block of a tenant of no gateway"] += 1
            return None
        return _Contents(media, salt)

    def _runs(self, token_ids: list[int], media: list[tuple[str, int]], salt: bytes) -> list[MediaRun] | None:
        """Return the placeholders of each image of a block, or None if they are not certain.

        An image's *start* counts tokens from the start of the block and is negative if an earlier block begins it.
        """
        if not media:
            return []
        runs: list[MediaRun] = []
        stops = [start for _, start in media[1:]] + [len(token_ids)]
        for (identifier, start), stop in zip(media, stops, strict=True):
            content_hash = self._content_hash_of(salt, identifier)
            if content_hash is None:
                self._coverage.num_refused["a block of an image that no gateway has sent"] += 1
                return None
            first = max(0, start)
            runs.append(
                MediaRun(first, self._num_leading(token_ids[first : max(first, stop)]), content_hash, first - start)
            )
        lengths = [run.length for run in runs]
        if not all(lengths) or sum(lengths) != self._num_placeholders(token_ids):
            self._coverage.limit("TEXT_PREFIX", TEXT_IN_IMAGES)
            return None
        return runs

    def _content_hash_of(self, salt: bytes, identifier: str) -> bytes | None:
        """Return the same as content_hash_of(), but compute it only once for an image's consecutive blocks."""
        if self._image[:2] != (salt, identifier):
            self._image = (salt, identifier, content_hash_of(salt, identifier))
        return self._image[2]

    def _num_leading(self, token_ids: list[int]) -> int:
        """Return the number of placeholders at the start of *token_ids*. Most blocks of an image have nothing else."""
        if self._num_placeholders(token_ids) == len(token_ids):
            return len(token_ids)
        return len(list(takewhile(self._context.placeholder_ids.__contains__, token_ids)))

    def _num_placeholders(self, token_ids: list[int]) -> int:
        return sum(map(token_ids.count, self._context.placeholder_ids))


def _is_local(medium: str | None, locality: str | None) -> bool:
    return medium in DEVICE_MEDIA and locality in (None, "LOCAL")
