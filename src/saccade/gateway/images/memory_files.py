"""Keeps uploaded images and PDFs in memory for later requests, for a limited time and within a byte budget."""

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass

from saccade.byte_lru import TenantLru
from saccade.errors import ImageTooLarge, UnsupportedParameter
from saccade.gateway.images.file_store import MAX_FILES, FileObject, FileStore, StoredFile, missing_file

ENTRY_BYTES = 2048
"""Memory of a file besides its content, at most."""

SPARE_TIMES = 64
"""Stale expiry times, of deleted or replaced files, that may be kept beyond twice the number of files."""


@dataclass(frozen=True)
class _Entry:
    """A stored file, and when it expires on the store's clock."""

    file: StoredFile
    ends_at: float


class MemoryFileStore(FileStore):
    """Keeps the files in the memory of one process.

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
        if not self._files.budget_bytes:
            raise UnsupportedParameter(
                f"`{param}`: this gateway keeps no files, because of --file-store-bytes 0, or of --gateway-processes "
                "over 1 without --state; send images as data: URLs.",
                param,
            )

    async def put(self, tenant: bytes, file: StoredFile) -> None:
        if not self.takes(len(file.content)):
            raise ImageTooLarge("The file is larger than --file-store-bytes, so it cannot be kept.", "file")
        self._expire()
        entry = _Entry(file, self._clock() + file.about.expires_at - file.about.created_at)
        self._files.put(tenant, file.about.id, entry, len(file.content) + ENTRY_BYTES)
        files = self._files.of_tenant(tenant)
        if len(files) > MAX_FILES:
            self._files.pop(tenant, next(iter(files)))
        heapq.heappush(self._expiring, (entry.ends_at, tenant, file.about.id))
        self._tidy()

    async def get(self, tenant: bytes, known_as: str, param: str) -> StoredFile:
        self.check(param)
        self._expire()
        entry = self._files.of_tenant(tenant).peek(known_as)
        if entry is None:
            raise missing_file(param)
        return entry.file

    async def files_of(self, tenant: bytes) -> list[FileObject]:
        self._expire()
        return [entry.file.about for _, entry in self._files.of_tenant(tenant).items()]

    async def delete(self, tenant: bytes, known_as: str, param: str) -> None:
        await self.get(tenant, known_as, param)
        self.forget(tenant, known_as)

    def takes(self, num_bytes: int) -> bool:
        """Return whether a file of *num_bytes* is small enough to keep."""
        return num_bytes + ENTRY_BYTES <= self._files.budget_bytes

    def forget(self, tenant: bytes, known_as: str) -> None:
        """Delete a file of *tenant* if it is there."""
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
