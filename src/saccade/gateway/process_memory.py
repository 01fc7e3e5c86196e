"""Finds how much of this process's memory request bodies may take."""

from saccade.memory_limits import allowed_bytes

REQUEST_SHARE = 8
"""Request bodies and fetched images may take one part in this many of the memory."""


MIN_REQUEST_MEMORY_BYTES = 256 << 20
MAX_REQUEST_MEMORY_BYTES = 4 << 30


def default_request_memory_bytes() -> int:
    """Return the default budget in bytes for the bodies and encoded images of all requests."""
    share = allowed_bytes() // REQUEST_SHARE
    return max(MIN_REQUEST_MEMORY_BYTES, min(share, MAX_REQUEST_MEMORY_BYTES))
