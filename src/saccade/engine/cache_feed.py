"""What the caches hold, for those who watch: a snapshot, then every change, numbered and encoded.

All who watch the same caches get the same increments, so each is numbered and encoded once. A snapshot is as of the
moment it was asked for; it goes out in pieces, one a step, so that no step stands still over it, and increments of that
time wait behind it. While nobody watches, the caches say nothing and nothing is kept here.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from saccade.engine.block_manager import PagedBlocks
from saccade.engine.encoder_cache import EncoderCache
from saccade.protocol.kv_events import (
    AllCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    KvEvents,
    PictureRemoved,
    PictureStored,
)
from saccade.protocol.local import CacheEvents

EVENTS_PER_MESSAGE = 1024
"""About 150 kB of blocks of 16 tokens, and some milliseconds of work."""


class Caches(NamedTuple):
    """Which caches are watched."""

    blocks: bool
    pictures: bool

    def kinds(self) -> tuple[type, ...]:
        """Return the kinds of events that tell of them."""
        blocks = (BlockStored, BlockRemoved) if self.blocks else ()
        pictures = (PictureStored, PictureRemoved) if self.pictures else ()
        return (AllCleared, *blocks, *pictures)


class _Snapshot:
    """One on its way to one watcher, and the increments behind it."""

    def __init__(self, number: int, events: Iterator[KvEvent]) -> None:
        self.number = number
        self.backlog: list[bytes] = []
        self._events = events
        self._next = list(itertools.islice(events, EVENTS_PER_MESSAGE))

    def message(self) -> KvEvents:
        """Return the next piece; it says itself whether it is the last."""
        events, self._next = self._next, list(itertools.islice(self._events, EVENTS_PER_MESSAGE))
        return KvEvents(self.number, events, snapshot=True, last=not self._next)


class _Channel:
    """All who watch the same caches: the number of their last increment, and which of them await their snapshot."""

    def __init__(self, caches: Caches) -> None:
        self.kinds = caches.kinds()
        self.number = 0
        self.watchers: dict[int, _Snapshot | None] = {}


class CacheFeed:
    """Watchers, by number, of one engine's caches. Not for use by several threads."""

    def __init__(self, blocks: PagedBlocks, encodings: EncoderCache[Any]) -> None:
        self.blocks = blocks
        self._encodings = encodings
        self._changes: list[KvEvent] = []
        self._messages: list[CacheEvents] = []
        self._channels: dict[Caches, _Channel] = {}
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def busy(self) -> bool:
        """Whether take() has something to hand out."""
        snapshots = (snapshot for channel in self._channels.values() for snapshot in channel.watchers.values())
        return bool(self._messages or self._changes) or any(snapshots)

    def watch(self, watcher: int, caches: Caches) -> None:
        """Begin with a snapshot for *watcher*."""
        # What happened before is part of the snapshot, and news to the others only.
        self._number_changes()
        channel = self._channels.setdefault(caches, _Channel(caches))
        events: list[Iterator[KvEvent]] = []
        if caches.blocks:
            events.append(self.blocks.snapshot())
        if caches.pictures:
            events.append(self._encodings.snapshot())
        channel.watchers[watcher] = _Snapshot(channel.number, itertools.chain(*events))
        self._listen()

    def unwatch(self, watcher: int) -> None:
        """Say nothing more to *watcher*, not even what is waiting to be taken; an unknown one is no error."""
        for message in self._messages:
            if watcher in message.watchers:
                message.watchers.remove(watcher)
        self._messages = [message for message in self._messages if message.watchers]
        for caches, channel in list(self._channels.items()):
            channel.watchers.pop(watcher, None)
            if not channel.watchers:
                del self._channels[caches]
        self._listen()

    def clear(self) -> None:
        """Empty both caches, which no request may be using, and say so in one event."""
        self.blocks.on_event = self._encodings.on_event = None
        self.blocks.clear()
        self._encodings.clear()
        self._listen()
        if self._channels:
            self._changes.append(AllCleared())

    def take(self) -> list[CacheEvents]:
        """Return what there is to say, in order, and the next piece of every snapshot."""
        self._number_changes()
        for channel in self._channels.values():
            for watcher, snapshot in channel.watchers.items():
                if snapshot is not None:
                    self._advance(channel, watcher, snapshot)
        messages, self._messages = self._messages, []
        return messages

    def _listen(self) -> None:
        """Have the caches tell what somebody watches."""
        self.blocks.on_event = self._record if any(caches.blocks for caches in self._channels) else None
        self._encodings.on_event = self._record if any(caches.pictures for caches in self._channels) else None

    def _record(self, event: KvEvent) -> None:
        self._changes.append(event)

    def _number_changes(self) -> None:
        changes, self._changes = self._changes, []
        for channel in self._channels.values() if changes else ():
            events = iter([event for event in changes if isinstance(event, channel.kinds)])
            while piece := list(itertools.islice(events, EVENTS_PER_MESSAGE)):
                channel.number += 1
                self._send(channel, self._encoder.encode(KvEvents(channel.number, piece)))

    def _send(self, channel: _Channel, payload: bytes) -> None:
        ready = [watcher for watcher, snapshot in channel.watchers.items() if snapshot is None]
        if ready:
            self._messages.append(CacheEvents(ready, payload))
        for snapshot in channel.watchers.values():
            if snapshot is not None:
                snapshot.backlog.append(payload)

    def _advance(self, channel: _Channel, watcher: int, snapshot: _Snapshot) -> None:
        message = snapshot.message()
        payloads = [self._encoder.encode(message)]
        if message.last:
            payloads += snapshot.backlog
            channel.watchers[watcher] = None
        self._messages += [CacheEvents([watcher], payload) for payload in payloads]
