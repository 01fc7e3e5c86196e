"""Keeps uploaded images and PDFs in memory for later requests, for a limited time and within a byte budget."""

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from blake3 import blake3
from msgspec import Struct

from saccade.byte_lru import TenantLru
from saccade.errors import FileNotFound, ImageTooLarge, UnsupportedParameter

ENTRY_BYTES = 2048
"""Memory of a file besides its content, at most."""

MAX_FILES = 10_000
"""Per tenant, as in OpenAI's API; one more file replaces the oldest."""

SPARE_TIMES = 64
"""Stale expiry times, of deleted or replaced files, that may be kept beyond twice the number of files."""


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


@dataclass(frozen=True)
class _Entry:
    """A stored file, and when it expires on the store's clock."""

    file: StoredFile
    ends_at: float


def file_id(tenant: bytes, content: bytes) -> str:
    """Return the id of *tenant*'s file with *content*; the same content always gets the same id."""
    return f"file-{blake3(blake3(tenant).digest()).update(content).hexdigest(16)}"


class FileStore:
    """Keeps the files of all tenants. No method finds another tenant's file.

    - budget_bytes: the limit for all files together; 0 keeps none.
    - keep_seconds: how long a file is kept at most.
    - clock: returns monotonic seconds, so that a change of the time of day neither drops a file nor keeps one for
          years.

    If there is no room, the tenant with the most bytes loses its oldest file.
    """

    def __init__(self, budget_bytes: int, keep_seconds: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.keep_seconds = keep_seconds
        self._clock = clock
        # Reading a file does not count as use: the files of a tenant stay in the order of their uploads.
        self._files: TenantLru[str, _Entry] = TenantLru(budget_bytes)
        self._expiring: list[tuple[float, bytes, str]] = []

    @property
    def num_bytes(self) -> int:
        """Size of all files, in bytes."""
        return self._files.num_bytes

    def check(self, param: str) -> None:
        """Raise an UnsupportedParameter that names *param* if this gateway keeps no files."""
        if not self._files.budget_bytes:
            raise UnsupportedParameter(
                f"`{param}`: this gateway keeps no files, because of --file-store-bytes 0 or of --gateway-processes "
                "over 1; send images as data: URLs.",
                param,
            )

    def put(self, tenant: bytes, file: StoredFile) -> None:
        """Store *file*; it replaces an earlier one with the same content. Raises ImageTooLarge."""
        num_bytes = len(file.content) + ENTRY_BYTES
        if num_bytes > self._files.budget_bytes:
            raise ImageTooLarge("The file is larger than --file-store-bytes, so it cannot be kept.", "file")
        self._expire()
        entry = _Entry(file, self._clock() + file.about.expires_at - file.about.created_at)
        self._files.put(tenant, file.about.id, entry, num_bytes)
        files = self._files.of_tenant(tenant)
        if len(files) > MAX_FILES:
            self._files.pop(tenant, next(iter(files)))
        heapq.heappush(self._expiring, (entry.ends_at, tenant, file.about.id))
        self._tidy()

    def get(self, tenant: bytes, known_as: str, param: str) -> StoredFile:
        """Return a file of *tenant*; errors name *param*. Raises FileNotFound and UnsupportedParameter."""
        self.check(param)
        self._expire()
        entry = self._files.of_tenant(tenant).peek(known_as)
        if entry is None:
            raise FileNotFound(
                f"`{param}`: there is no such file, or it is not kept any longer; upload it by POST /v1/files.", param
            )
        return entry.file

    def files_of(self, tenant: bytes) -> list[FileObject]:
        """Return the descriptions of *tenant*'s files, the oldest first."""
        self._expire()
        return [entry.file.about for _, entry in self._files.of_tenant(tenant).items()]

    def delete(self, tenant: bytes, known_as: str, param: str) -> None:
        """Delete a file of *tenant*. Raises the same errors as get()."""
        self.get(tenant, known_as, param)
        self._files.pop(tenant, known_as)

    def _expire(self) -> None:
        now = self._clock()
        while self._expiring and self._expiring[0][0] <= now:
            _, tenant, known_as = heapq.heappop(self._expiring)
            entry = self._files.of_tenant(tenant).peek(known_as)
            # The same content may have been uploaded again, with a later expiry.
            if entry is not None and entry.ends_at <= now:
                self._files.pop(tenant, known_as)

    def _tidy(self) -> None:
        """Drop the stale expiry times if there are many."""
        if len(self._expiring) > 2 * len(self._files) + SPARE_TIMES:
            times = ((entry.ends_at, tenant, known_as) for tenant, known_as, entry in self._files.items())
            self._expiring = list(times)
            heapq.heapify(self._expiring)
