"""What a store of uploaded images and PDFs does. Clients upload a file once, and refer to it in many requests."""

from dataclasses import dataclass
from typing import Literal, Protocol

from blake3 import blake3
from msgspec import Struct

from saccade.errors import FileNotFound

MAX_FILES = 10_000
"""Per tenant, as in OpenAI's API; one more file replaces the oldest."""


class FileObject(Struct, frozen=True, kw_only=True):
    """An uploaded file in OpenAI's format; times are seconds since 1970."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


@dataclass(frozen=True)
class StoredFile:
    """A file's description and content, kept for the time between the two timestamps in *about*."""

    about: FileObject
    content: bytes


def file_id(tenant: bytes, content: bytes) -> str:
    """Return the id of *tenant*'s file with *content*; the same content always gets the same id."""
    return f"file-{blake3(blake3(tenant).digest()).update(content).hexdigest(16)}"


def missing_file(param: str) -> FileNotFound:
    """Return the error for a file that *param* names and the store does not have."""
    return FileNotFound(
        f"`{param}`: there is no such file, or it is not kept any longer; upload it by POST /v1/files.", param
    )


class FileStore(Protocol):
    """Keeps the files of all tenants, each for at most *keep_seconds*. No method finds another tenant's file.

    Coroutines raise StoreUnavailable if the files are in a database that does not answer.
    """

    keep_seconds: int

    def check(self, param: str) -> None:
        """Raise an UnsupportedParameter that names *param* if this gateway keeps no files."""

    async def put(self, tenant: bytes, file: StoredFile) -> None:
        """Store *file*; it replaces an earlier one with the same content. Raises ImageTooLarge."""

    async def get(self, tenant: bytes, known_as: str, param: str) -> StoredFile:
        """Return a file of *tenant*; errors name *param*. Raises FileNotFound and UnsupportedParameter."""

    async def files_of(self, tenant: bytes) -> list[FileObject]:
        """Return the descriptions of *tenant*'s files, the oldest first."""

    async def delete(self, tenant: bytes, known_as: str, param: str) -> None:
        """Delete a file of *tenant*. Raises the same errors as get()."""
