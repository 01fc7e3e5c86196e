"""Builds JSON in parts, so that an answer's long parts are encoded while they grow and never copied as a whole."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec import Struct

TURN_BYTES = 256 << 10
"""Work on this part of an answer takes a few milliseconds at most; others run after it."""


ID_BYTES = 8
"""Roughly the bytes of a token's id that waits for the end of its answer, here and in JSON."""


class JsonItems:
    """The items of a JSON list, without its brackets. Each item is encoded once, when it is added."""

    def __init__(self, items: Iterable[object] = ()) -> None:
        self._items: list[bytes] = []
        self._num_item_bytes = 0
        for item in items:
            self.add_item(item)

    @property
    def num_bytes(self) -> int:
        """Size of all items and the commas between them, in bytes."""
        return self._num_item_bytes + max(0, len(self._items) - 1)

    def add_item(self, item: object) -> None:
        """Encode *item* and add it."""
        encoded = msgspec.json.encode(item)
        self._items.append(encoded)
        self._num_item_bytes += len(encoded)

    def drop(self, num_items: int) -> None:
        """Drop the last *num_items*."""
        num_left = max(0, len(self._items) - num_items)
        self._num_item_bytes -= sum(map(len, self._items[num_left:]))
        del self._items[num_left:]

    def joined(self, num_bytes: int) -> Iterator[bytes]:
        """Yield the items, joined into pieces of roughly *num_bytes*."""
        step = max(1, num_bytes * len(self._items) // (self._num_item_bytes or 1))
        for start in range(0, len(self._items), step):
            yield (b"," if start else b"") + b",".join(self._items[start : start + step])


Part = bytes | JsonItems
"""A part of a text in JSON. Several places of it may share one."""


def filled(template: Struct, fields: Mapping[bytes, Iterable[Part]]) -> list[Part]:
    """Return *template* as JSON, with parts filled into its empty *fields*, which must be in the order of the JSON.

    filled(Choice(text="", logprobs=Logprobs([])), {b'"text":""': [text], b'"logprobs":[]': [logprobs]})
    """
    parts, rest = list[Part](), msgspec.json.encode(template)
    for field, inside in fields.items():
        # A text in JSON escapes its quotes, so only the field itself looks like this.
        before, _, rest = rest.partition(field)
        parts += [before + field[:-1], *inside]
        rest = field[-1:] + rest
    return [*parts, rest]


async def made_in_turns(makers: Iterable[Callable[[], list[Part]]]) -> list[list[Part]]:
    """Return the results of *makers*, and let other tasks run after every TURN_BYTES of encoded JSON."""
    results, num_encoded = list[list[Part]](), 0
    for make in makers:
        results.append(make())
        num_encoded += sum(len(part) for part in results[-1] if isinstance(part, bytes))
        if num_encoded >= TURN_BYTES:
            num_encoded = 0
            await asyncio.sleep(0)
    return results


def separated(items: Iterable[Iterable[Part]]) -> Iterator[Part]:
    """Yield the parts of all *items*, separated by commas."""
    for index, parts in enumerate(items):
        if index:
            yield b","
        yield from parts


def num_bytes(parts: Iterable[Part]) -> int:
    """Return how many bytes the text that *parts* make up has."""
    return sum(len(part) if isinstance(part, bytes) else part.num_bytes for part in parts)


def num_held_bytes(parts: Sequence[Part]) -> int:
    """Return the bytes that *parts* hold in memory; a part that occurs several times counts once."""
    return num_bytes({id(part): part for part in parts}.values())


def joined(parts: Iterable[Part], piece_bytes: int) -> Iterator[bytes]:
    """Yield *parts*, joined into pieces of about *piece_bytes*.

    A longer part is yielded unchanged if it is bytes, and split if it is JsonItems.
    """
    waiting = bytearray()
    for part in parts:
        for piece in (part,) if isinstance(part, bytes) else part.joined(piece_bytes):
            if len(waiting) + len(piece) > piece_bytes and waiting:
                yield bytes(waiting)
                waiting.clear()
            waiting += piece
    if waiting:
        yield bytes(waiting)
