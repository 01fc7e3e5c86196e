"""What a worker's KV cache holds, in our keys, from the cache events of another project's engine.

An engine names each page of its cache by a hash that only the engine can compute. Its events have what the hash was
made of, so our keys are computed from that. If anything about a page is not certain, neither it nor a page after it is
reported.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain as joined
from itertools import repeat
from typing import Protocol

from saccade.connectors.events.batches import Cleared, Event, ExtraKeys, Hash, Removed, Stored
from saccade.connectors.events.chain import Chain
from saccade.errors import WorkerUnavailable
from saccade.identity.blocks import KEY_BYTES
from saccade.protocol.exactness import EXACT, Exactness, Level, least
from saccade.protocol.kv_events import BlockOffloaded, BlockRemoved, KvEvent, OffloadedRemoved

FULL_KINDS = ("full_attention", "mla_attention", "sink_full_attention")
"""Groups of layers that need every block of a prefix."""

WINDOW_KINDS = ("sliding_window", "sliding_window_mla")
DEVICE_MEDIA = (None, "GPU")
"""Where a block lies that can be reused at once. vLLM says GPU on CPUs too."""

OFFLOAD_MEDIUM = "CPU"
"""Where vLLM's OffloadingConnector keeps copies of blocks, which it loads again faster than it computes them."""

MAX_QUOTED = 64
"""The most characters of a worker's words in a reason."""

OTHER_SIZES = "it reports blocks of other sizes than {size} tokens; those are not known"
OTHER_LAYERS = "it caches its layers of kind {kind} apart, and they may hold less than it reports"
OTHER_EVENTS = "it reports {kind}, which is not known here"
LOOKAHEAD = "its blocks depend on the tokens after them, so one that is reported may not be reused: it drafts tokens"


@dataclass(frozen=True)
class KeyContext:
    """What the keys of a worker's blocks depend on in addition to its events. Sizes count tokens.

    *fingerprint* is that of the worker's Description. A block of *block_size* is one page of *page_size*, or several. A
    worker with more than *max_pages* is not followed; a page takes about 200 bytes here.
    """

    fingerprint: bytes
    block_size: int
    page_size: int
    max_model_len: int
    max_pages: int = 1_000_000


class Naming(Protocol):
    """How an engine's events name images and tenants."""

    without_parent: Exactness
    """How exactly a worker's cache is known after a page whose parent is not known."""

    def exactness(self, salts: tuple[bytes, ...] | None) -> Exactness:
        """Return how exactly a cache is known whose oldest page was stored for *salts*; None if it has no page."""

    def fault(self, event: Stored) -> Exactness | None:
        """Return None if the pages of *event* can be read, else how exactly the cache is known without them."""

    def salts_of(self, extra_keys: ExtraKeys) -> tuple[bytes, ...]:
        """Return the salts that a prompt may have whose first page has *extra_keys*; none if it is no gateway's."""

    def grow(self, chain: Chain, token_ids: Sequence[int], extra_keys: ExtraKeys) -> Chain | Exactness:
        """Return *chain* with a page in its rest, or how exactly the cache is known if the page is not certain.

        That is EXACT for a page that no prompt of a gateway has.
        """


class ReportedCache:
    """The pages that a worker holds, by its engine's names.

    An engine may hold a page twice, and reports each copy by the same name. A page counts as removed when one copy is.
    Counting copies would report pages that are gone, since vLLM can be set to report blocks that it reuses again.
    An event about a copy in the CPU's memory has only names, so it counts if the page is on the device at that time.
    *earlier* says why the worker may hold pages that were stored before the first event; "" if it cannot.
    """

    def __init__(self, context: KeyContext, naming: Naming) -> None:
        self._context = context
        self._naming = naming
        self._chains: dict[Hash, Chain] = {}
        self._offloaded: dict[Hash, Chain] = {}
        self._oldest_salts: tuple[bytes, ...] = ()
        self._groups: set[int | None] = set()
        self._limits: dict[Level, Exactness] = {}
        self.earlier = ""

    @property
    def exactness(self) -> Exactness:
        """How exactly the worker's cache is known."""
        earlier = Exactness("DEGRADED", self.earlier) if self.earlier else EXACT
        of_tenants = self._naming.exactness(self._oldest_salts if self._chains else None)
        return least(earlier, *self._limits.values(), of_tenants)

    def take(self, event: Event) -> Iterator[KvEvent]:
        """Return in our keys what *event* changes. Iterating raises WorkerUnavailable if there are too many pages."""
        match event:
            case Stored() | Removed() if _is_offloaded(event.medium, event.locality):
                if event.group_idx is None or event.group_idx in self._groups:
                    change = self._offload if isinstance(event, Stored) else self._remove_offloaded
                    return change(event.block_hashes)
            case Stored():
                if self._is_followed(event) and self._can_be_sliced(event):
                    return self._store(event)
            case Removed(medium=medium, locality=locality, group_idx=group):
                if _is_local(medium, locality) and (group is None or group in self._groups):
                    return self._remove(event.block_hashes)
            case Cleared():
                self.earlier = ""
                self._limits.clear()
                return joined(self._remove(list(self._chains)), self._remove_offloaded(list(self._offloaded)))
            case _:
                self._limit(Exactness("DEGRADED", OTHER_EVENTS.format(kind=event.type[:MAX_QUOTED])))
        return iter(())

    def _limit(self, exactness: Exactness) -> None:
        """Note that the cache can be known no better than this until it is cleared; the first reason stays."""
        self._limits.setdefault(exactness.level, exactness)

    def _is_followed(self, event: Stored) -> bool:
        """Return whether *event* is about the group of layers that is followed, which needs every block of a prefix."""
        if not _is_local(event.medium, event.locality) or event.lora_id is not None or event.lora_name:
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
        self._limit(Exactness("DEGRADED", OTHER_LAYERS.format(kind=str(kind)[:MAX_QUOTED])))
        return False

    def _can_be_sliced(self, event: Stored) -> bool:
        """Return whether token ids and extra keys can be divided by page."""
        size, num_pages = self._context.page_size, len(event.block_hashes)
        if event.lookahead_token_ids:
            self._limit(Exactness("DEGRADED", LOOKAHEAD))
        if (event.block_size != size and num_pages) or len(event.token_ids) != num_pages * size:
            fault: Exactness | None = Exactness("DEGRADED", OTHER_SIZES.format(size=size))
        else:
            fault = self._naming.fault(event)
        if fault is not None:
            self._limit(fault)
        return fault is None

    def _store(self, event: Stored) -> Iterator[KvEvent]:
        parent, context = event.parent_block_hash, self._context
        chain = None if parent is None else self._chains.get(parent)
        if parent is not None and chain is None:
            self._limit(self._naming.without_parent)
            return
        start, size, grow, chains = 0, context.page_size, self._naming.grow, self._chains
        for name, extra_keys in zip(event.block_hashes, event.extra_keys or repeat(None), strict=False):
            before = self._root(extra_keys) if chain is None else chain
            grown = grow(before, event.token_ids[start : start + size], extra_keys)
            start += size
            if isinstance(grown, Exactness):
                self._limit(grown)
                return
            chain = grown.with_rest_as_block() if len(grown.rest.token_ids) == context.block_size else grown
            held = chains.setdefault(name, chain)
            if held is not chain and held != chain:
                yield from self._remove((name,))
                if held.salts != chain.salts and not set(held.salts).isdisjoint(chain.salts):
                    # It is the same page, for the tenants that are known now.
                    held = chains[name] = chain
            if held is not chain:
                # It is held already; or two pages have one name, so it is not certain which one an event means.
                continue
            if len(chains) > context.max_pages:
                raise WorkerUnavailable(f"The worker holds more than {context.max_pages} pages of KV cache.")
            if not chain.rest.token_ids:
                yield from chain.stored(before)

    def _root(self, extra_keys: ExtraKeys) -> Chain:
        salts = self._naming.salts_of(extra_keys)
        if not self._chains:
            self._oldest_salts = salts
        return Chain.root(self._context.fingerprint, salts)

    def _offload(self, names: Iterable[Hash]) -> Iterator[KvEvent]:
        for name in names:
            page = self._chains.get(name)
            is_new = name not in self._offloaded and len(self._offloaded) < self._context.max_pages
            if page is not None and is_new:
                self._offloaded[name] = page
                if not page.rest.token_ids:
                    yield from map(BlockOffloaded, page.keys_of(page.salts))

    def _remove_offloaded(self, names: Iterable[Hash]) -> Iterator[KvEvent]:
        for name in names:
            page = self._offloaded.pop(name, None)
            if page is not None and not page.rest.token_ids:
                yield from map(OffloadedRemoved, page.keys_of(page.salts))

    def _remove(self, names: Iterable[Hash]) -> Iterator[KvEvent]:
        for name in names:
            chain = self._chains.pop(name, None)
            if chain is None or chain.rest.token_ids:
                continue
            if len(chain.joined_keys) == KEY_BYTES:
                yield BlockRemoved(chain.joined_keys)
            else:
                yield from map(BlockRemoved, chain.keys_of(chain.salts))


def _is_offloaded(medium: str | None, locality: str | None) -> bool:
    return medium == OFFLOAD_MEDIUM and locality in (None, "LOCAL")


def _is_local(medium: str | None, locality: str | None) -> bool:
    return medium in DEVICE_MEDIA and locality in (None, "LOCAL")
