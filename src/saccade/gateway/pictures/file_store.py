"""Pictures that clients uploaded to name them in later requests: in memory, for a time, within a bound of bytes."""

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass

from blake3 import blake3

from saccade.byte_lru import ByteLru
from saccade.errors import FileNotFound, ImageTooLarge, UnsupportedParameter
from saccade.gateway.openai.files import FileObject

ENTRY_BYTES = 2048
"""What a file takes at most besides its content."""

SPARE_TIMES = 64
"""How many times of files that are gone, or were uploaded again, may wait beside as many as there are files."""


@dataclass(frozen=True)
class StoredFile:
    """A file and what is said of it."""

    about: FileObject
    content: bytes


def file_id(tenant: bytes, content: bytes) -> str:
    """Return the id of a file of the tenant with the id *tenant*: the same content has the same id."""
    return f"file-{blake3(blake3(tenant).digest()).update(content).hexdigest(16)}"


class FileStore:
    """The files of all tenants, of *budget_bytes* together, 0 for none; each is kept *keep_seconds* at most.

    Where there is no room, the tenant that holds most loses what it used least recently. *clock* gives seconds since
    1970. No method finds a file of another tenant.
    """

    def __init__(self, budget_bytes: int, keep_seconds: int, clock: Callable[[], float] = time.time) -> None:
        self.keep_seconds = keep_seconds
        self._budget_bytes = budget_bytes
        self._clock = clock
        self._files: dict[bytes, ByteLru[str, StoredFile]] = {}
        self._expiring: list[tuple[int, bytes, str]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(files.num_bytes for files in self._files.values())

    def check(self, param: str) -> None:
        """Raise UnsupportedParameter, naming *param*, where no files are kept."""
        if not self._budget_bytes:
            raise UnsupportedParameter(
                f"`{param}`: this gateway keeps no files, because of --file-store-bytes 0 or of --gateway-processes "
                "over 1; send pictures as data: URLs.",
                param,
            )

    def put(self, tenant: bytes, file: StoredFile) -> None:
        """Keep *file*, in place of an earlier one of the same content. Raises ImageTooLarge."""
        num_bytes = len(file.content) + ENTRY_BYTES
        if num_bytes > self._budget_bytes:
            raise ImageTooLarge("The file is larger than --file-store-bytes, so it cannot be kept.", "file")
        self._expire()
        files = self._files.setdefault(tenant, ByteLru(self._budget_bytes))
        files.put(file.about.id, file, num_bytes)
        heapq.heappush(self._expiring, (file.about.expires_at, tenant, file.about.id))
        self._tidy()
        while self.num_bytes > self._budget_bytes:
            largest = max(self._files, key=lambda one: self._files[one].num_bytes)
            self._drop(largest, next(iter(self._files[largest])))

    def get(self, tenant: bytes, known_as: str, param: str) -> StoredFile:
        """Return a file of *tenant*, which *param* of a request names. Raises FileNotFound, UnsupportedParameter."""
        self.check(param)
        self._expire()
        files = self._files.get(tenant)
        found = None if files is None else files.get(known_as)
        if found is None:
            raise FileNotFound(
                f"`{param}`: there is no such file, or it is not kept any longer; upload it by POST /v1/files.", param
            )
        return found

    def of(self, tenant: bytes) -> list[FileObject]:
        """Return what is said of the files of *tenant*, the oldest first."""
        self._expire()
        files = self._files.get(tenant)
        found = [] if files is None else [file.about for _, file in files.items()]
        return sorted(found, key=lambda about: (about.created_at, about.id))

    def delete(self, tenant: bytes, known_as: str, param: str) -> None:
        """Forget a file of *tenant*. Raises as get() does."""
        self.get(tenant, known_as, param)
        self._drop(tenant, known_as)

    def _expire(self) -> None:
        now = self._clock()
        while self._expiring and self._expiring[0][0] <= now:
            _, tenant, known_as = heapq.heappop(self._expiring)
            files = self._files.get(tenant)
            file = None if files is None else files.peek(known_as)
            # The same content may have been uploaded again, for longer.
            if file is not None and file.about.expires_at <= now:
                self._drop(tenant, known_as)

    def _tidy(self) -> None:
        """Forget the times of files that are gone, where they are many."""
        if len(self._expiring) > 2 * sum(map(len, self._files.values())) + SPARE_TIMES:
            self._expiring = [
                (file.about.expires_at, tenant, known_as)
                for tenant, files in self._files.items()
                for known_as, file in files.items()
            ]
            heapq.heapify(self._expiring)

    def _drop(self, tenant: bytes, known_as: str) -> None:
        self._files[tenant].pop(known_as)
        if not self._files[tenant]:
            del self._files[tenant]
