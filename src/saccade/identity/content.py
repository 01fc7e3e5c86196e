"""Hashes a media item by its encoded bytes and the processor's fingerprint (architecture, contract 1)."""

import json
from collections.abc import Mapping

from blake3 import blake3

HASH_BYTES = 32


def framed(parts: tuple[bytes, ...]) -> bytes:
    """Join *parts*, each preceded by its length, so that no two different lists of parts give the same bytes."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def files_digest(files: Mapping[str, bytes]) -> bytes:
    """Return a 32-byte digest of the names and contents of *files*; their order does not matter."""
    parts = tuple(piece for name in sorted(files) for piece in (name.encode(), files[name]))
    return blake3(framed((b"saccade.files.1", *parts))).digest()


def processor_fingerprint(settings: Mapping[str, object], files: bytes, decoder: str) -> bytes:
    """Return a 32-byte digest of everything that determines how an image becomes patches.

    *settings* are the resolved processor settings of this request (JSON values). *files* is the digest of the model's
    config and processor files, and *decoder* the decoder's name and version.
    """
    canonical = json.dumps(settings, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    return blake3(framed((b"saccade.processor.1", canonical, files, decoder.encode()))).digest()


def content_hash(encoded: bytes, fingerprint: bytes) -> bytes:
    """Return the 32 bytes that identify the *encoded* image together with its processing."""
    # Hashing in two steps keeps the image's bytes from being copied into one framed buffer.
    head = b"saccade.content.1" + len(encoded).to_bytes(8, "little")
    return blake3(head).update(encoded).update(framed((fingerprint,))).digest()
