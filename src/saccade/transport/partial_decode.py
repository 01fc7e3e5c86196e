"""Recovers the request id and the slots from a command that cannot be decoded."""

from dataclasses import dataclass
from typing import Any

import msgspec

from saccade.transport.framing import UNREADABLE


@dataclass(frozen=True)
class PartialCommand:
    """The recovered parts of a command; *request_id* is None if not even that is readable."""

    request_id: str | None = None
    slots: tuple[str, ...] = ()


def salvage(command: bytes) -> PartialCommand:
    """Return the readable parts of *command*, which the decoder of GatewayCommand refused."""
    try:
        decoded = msgspec.msgpack.decode(command)
    except UNREADABLE:
        return PartialCommand()
    match decoded:
        case {"request_id": str(request_id)}:
            media = decoded.get("media")
            slots = [_slot_name(item) for item in media] if isinstance(media, list) else []
            return PartialCommand(request_id, tuple(name for name in slots if name is not None))
    return PartialCommand()


def _slot_name(item: Any) -> str | None:
    """Return the slot's name in a value that should be a MediaItem (a map) or MediaPixels (an array)."""
    match item:
        case {"slot": {"name": str(name)}} | [_, {"name": str(name)}, *_]:
            return name
    return None
