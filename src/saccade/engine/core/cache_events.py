"""Reports the caches' contents to watchers: first a snapshot, then every change, numbered and encoded.

All watchers of the same caches get the same increments, so each increment is numbered and encoded once. A snapshot
shows the caches at the time of the watch request. It is sent in pieces, one per step, so that it does not delay a step;
later increments are queued until it is complete. Without watchers, the caches report no events and this module stores
nothing.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from saccade.engine.core.encoder_cache import EncoderCache
from saccade.engine.core.kv.blocks import PagedBlocks
from saccade.engine.core.kv.state_checkpoints import StateCheckpoints
from saccade.engine.core.kv.window_blocks import WindowBlocks
from saccade.protocol.engine_ipc import CacheEvents
from saccade.protocol.kv_events import (
    BlockRemoved,
    BlockStored,
    ImageRemoved,
    ImageStored,
    KvEvent,
    KvEvents,
    StateRemoved,
    StateStored,
)

EVENTS_PER_MESSAGE = 1024
"""About 150 kB of blocks of 16 tokens; encoding them takes a few milliseconds."""


class WatchedCaches(NamedTuple):
    """The caches that a watcher follows; *blocks* includes all other state that prompts need to resume."""

    blocks: bool
    images: bool

    def kinds(self) -> tuple[type, ...]:
        blocks = (BlockStored, BlockRemoved, StateStored, StateRemoved) if self.blocks else ()
        images = (ImageStored, ImageRemoved) if self.images else ()
        return (*blocks, *images)


class _Snapshot:
    """A partly sent snapshot for one watcher, and the increments queued after it."""

    def __init__(self, number: int, events: Iterator[KvEvent]) -> None:
        self.number = number
        self.backlog: list[bytes] = []
        self._events = events
        self._next = list(itertools.islice(events, EVENTS_PER_MESSAGE))

    def message(self) -> KvEvents:
        """Return the next piece; its `last` field is set on the final piece."""
        events, self._next = self._next, list(itertools.islice(self._events, EVENTS_PER_MESSAGE))
        return KvEvents(self.number, events, snapshot=True, last=not self._next)


class _WatcherGroup:
    """The watchers of one set of caches; *watchers* maps each to the snapshot that is still being sent, or None."""

    def __init__(self, caches: WatchedCaches) -> None:
        self.kinds = caches.kinds()
        self.number = 0
        self.watchers: dict[int, _Snapshot | None] = {}


class CacheFeed:
    """The watchers of one engine's caches, identified by number. Not thread-safe.

    *states* holds the checkpoints of recurrent layers or the blocks of sliding-window layers; most models have neither.
    """

    def __init__(
        self, blocks: PagedBlocks, encoder: EncoderCache, states: StateCheckpoints | WindowBlocks | None = None
    ) -> None:
        self.blocks = blocks
        self._states = states
        self._encoder_cache = encoder
        self._changes: list[KvEvent] = []
        self._messages: list[CacheEvents] = []
        self._channels: dict[WatchedCaches, _WatcherGroup] = {}
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def busy(self) -> bool:
        """Whether take_messages() would return messages."""
        snapshots = (snapshot for channel in self._channels.values() for snapshot in channel.watchers.values())
        return bool(self._messages or self._changes) or any(snapshots)

    def watch(self, watcher: int, caches: WatchedCaches) -> None:
        """Start sending events to *watcher*, beginning with a snapshot."""
        # Earlier changes are part of the new snapshot; only the existing watchers get them as increments.
        self._number_changes()
        channel = self._channels.setdefault(caches, _WatcherGroup(caches))
        events: list[Iterator[KvEvent]] = []
        if caches.blocks:
            events.append(self.blocks.snapshot())
            if self._states is not None:
                events.append(self._states.snapshot())
        if caches.images:
            events.append(self._encoder_cache.snapshot())
        channel.watchers[watcher] = _Snapshot(channel.number, itertools.chain(*events))
        self._listen()

    def unwatch(self, watcher: int) -> None:
        """Stop sending to *watcher*, and discard its pending messages. An unknown watcher is ignored."""
        for message in self._messages:
            if watcher in message.watchers:
                message.watchers.remove(watcher)
        self._messages = [message for message in self._messages if message.watchers]
        for caches, channel in list(self._channels.items()):
            channel.watchers.pop(watcher, None)
            if not channel.watchers:
                del self._channels[caches]
        self._listen()

    def take_messages(self) -> list[CacheEvents]:
        """Return the pending messages in order, with the next piece of every snapshot."""
        self._number_changes()
        for channel in self._channels.values():
            for watcher, snapshot in channel.watchers.items():
                if snapshot is not None:
                    self._advance(channel, watcher, snapshot)
        messages, self._messages = self._messages, []
        return messages

    def _listen(self) -> None:
        """Subscribe to the caches that have watchers, and unsubscribe from the others."""
        self.blocks.on_event = self._record if any(caches.blocks for caches in self._channels) else None
        if self._states is not None:
            self._states.on_event = self.blocks.on_event
        self._encoder_cache.on_event = self._record if any(caches.images for caches in self._channels) else None

    def _record(self, event: KvEvent) -> None:
        self._changes.append(event)

    def _number_changes(self) -> None:
        changes, self._changes = self._changes, []
        for channel in self._channels.values() if changes else ():
            events = iter([event for event in changes if isinstance(event, channel.kinds)])
            while piece := list(itertools.islice(events, EVENTS_PER_MESSAGE)):
                channel.number += 1
                self._send(channel, self._encoder.encode(KvEvents(channel.number, piece)))

    def _send(self, channel: _WatcherGroup, payload: bytes) -> None:
        ready = [watcher for watcher, snapshot in channel.watchers.items() if snapshot is None]
        if ready:
            self._messages.append(CacheEvents(ready, payload))
        for snapshot in channel.watchers.values():
            if snapshot is not None:
                snapshot.backlog.append(payload)

    def _advance(self, channel: _WatcherGroup, watcher: int, snapshot: _Snapshot) -> None:
        message = snapshot.message()
        payloads = [self._encoder.encode(message)]
        if message.last:
            payloads += snapshot.backlog
            channel.watchers[watcher] = None
        self._messages += [CacheEvents([watcher], payload) for payload in payloads]
