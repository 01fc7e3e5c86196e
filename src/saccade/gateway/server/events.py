"""Encodes server-sent events."""

from typing import Any

import msgspec

from saccade.errors import SaccadeError
from saccade.gateway.server.errors import encode_error

DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams, unless they fail."""


def event(data: bytes) -> bytes:
    """Return *data* as a server-sent event without a name."""
    return b"data: " + data + b"\n\n"


def named_event(name: str, data: bytes) -> bytes:
    """Return *data* as a server-sent event called *name*."""
    return b"event: " + name.encode() + b"\n" + event(data)


def typed_event(kind: str, **fields: Any) -> bytes:
    """Return an object with *fields* as a server-sent event named after the object's type."""
    return named_event(kind, msgspec.json.encode({"type": kind, **fields}))


def error_event(error: SaccadeError) -> bytes:
    """Return *error* as the last event of OpenAI's streams; no [DONE] follows."""
    return event(encode_error(error))
