"""What can be read of a command that is not one: whom to answer, and which slots nobody will read."""

from dataclasses import dataclass
from typing import Any

import msgspec

from saccade.transport.framing import UNREADABLE


@dataclass(frozen=True)
class Remains:
    """*request_id* is None where even that is missing."""

    request_id: str | None = None
    slots: tuple[str, ...] = ()


def salvage(command: bytes) -> Remains:
    """Return what *command*, encoded and refused by the decoder of GatewayCommand, says nevertheless."""
    try:
        decoded = msgspec.msgpack.decode(command)
    except UNREADABLE:
        return Remains()
    match decoded:
        case {"request_id": str(request_id)}:
            media = decoded.get("media")
            slots = [_slot_name(item) for item in media] if isinstance(media, list) else []
            return Remains(request_id, tuple(name for name in slots if name is not None))
    return Remains()


def _slot_name(item: Any) -> str | None:
    """Return the slot's name in what should be a MediaItem, a map, or MediaPixels, an array."""
    match item:
        case {"slot": {"name": str(name)}} | [_, {"name": str(name)}, *_]:
            return name
    return None
