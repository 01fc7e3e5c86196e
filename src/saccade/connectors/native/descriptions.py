"""Reads a worker's description, and counts its parts before it makes objects of them."""

from typing import Final

import msgspec

from saccade.connectors.context import KnownFiles
from saccade.protocol.description import Description
from saccade.transport.message_pack import num_items

MAX_FACT_BYTES: Final = 64 << 10
"""All but the files: about 30 names and numbers, names of models, and a sentence for each backend."""

MAX_FILES: Final = 64
"""A gateway reads ten of a checkpoint's files (saccade.protocol.model_files)."""


class _Whole(msgspec.Struct):
    """A Description whose files are not decoded yet."""

    files: msgspec.Raw


class _Files(msgspec.Struct):
    """ModelFiles whose files are not decoded yet."""

    files: msgspec.Raw


def description_of(payload: bytes, known: KnownFiles) -> Description:
    """Return the description in *payload*, with files of *known* if it has equal ones.

    Raises UNREADABLE, including for too many files, or for facts that are too long.
    """
    files = msgspec.msgpack.decode(payload, type=_Whole).files
    if len(payload) - memoryview(files).nbytes > MAX_FACT_BYTES:
        raise msgspec.ValidationError("a description is too long")
    if num_items(memoryview(msgspec.msgpack.decode(files, type=_Files).files)) > MAX_FILES:
        raise msgspec.ValidationError("a description has too many files")
    description = msgspec.msgpack.decode(payload, type=Description)
    if description.files_digest:
        return description
    return msgspec.structs.replace(description, files=known.same_as(description.files))
