"""/v1/files in OpenAI's wire format."""

import re
from typing import Final, Literal

from msgspec import Struct

FILE_ID: Final = re.compile("file-[0-9a-f]{32}")
NO_FILE: Final = f"file-{32 * '0'}"
"""The id of no file."""

PURPOSES: Final = ("vision", "user_data")
MAX_FILENAME_CHARACTERS: Final = 255
MAX_LISTED: Final = 10_000


class FileObject(Struct, frozen=True, kw_only=True):
    """An uploaded file; times in seconds since 1970."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class FileList(Struct, frozen=True):
    """Files of one tenant; *has_more* where others come behind *last_id*."""

    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class DeletedFile(Struct, frozen=True):
    """The file that was deleted."""

    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


def url_of_file(file_id: str) -> str:
    """Return what stands in place of the URL of an uploaded image: its id. No other text is taken for a URL."""
    return file_id if is_file_id(file_id) else NO_FILE


def is_file_id(url: str) -> bool:
    """Whether what stands in place of an image's URL is the id of an uploaded file."""
    return FILE_ID.fullmatch(url) is not None
