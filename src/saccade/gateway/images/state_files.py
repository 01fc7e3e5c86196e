"""Keeps uploaded files in the gateway's database, and the contents of the last ones in memory as well."""

import msgspec

from saccade.errors import FileNotFound, ImageTooLarge, StoreUnavailable
from saccade.gateway.images.file_store import FileObject, FileStore, StoredFile, missing_file
from saccade.gateway.images.memory_files import MemoryFileStore
from saccade.gateway.state.items import Item, Items
from saccade.gateway.state.rows import FILE


class StateFileStore(FileStore):
    """Keeps files in *items*. *recent* saves reading a file again, and has the last ones while the database is away.

    Another gateway may delete a file at any time. So each request for a file asks the database whether it is there.
    """

    def __init__(self, items: Items, recent: MemoryFileStore) -> None:
        self.keep_seconds = recent.keep_seconds
        self._items = items
        self._recent = recent

    def check(self, param: str) -> None:
        self._recent.check(param)

    async def put(self, tenant: bytes, file: StoredFile) -> None:
        about = file.about
        item = Item(about.id, msgspec.json.encode(about), file.content, about.expires_at)
        if not await self._items.put(tenant, FILE, item):
            raise ImageTooLarge("The file is larger than --state-tenant-bytes allows, so it cannot be kept.", "file")
        await self._remember(tenant, file)

    async def get(self, tenant: bytes, known_as: str, param: str) -> StoredFile:
        self.check(param)
        recent = await self._recall(tenant, known_as)
        if recent is None:
            item = await self._items.find(tenant, FILE, known_as)
            if item is None:
                raise missing_file(param)
            head, content = item
            file = StoredFile(msgspec.json.decode(head, type=FileObject), content)
            await self._remember(tenant, file)
            return file
        try:
            recent_head = await self._items.head(tenant, FILE, known_as)
        except StoreUnavailable:
            return recent
        if recent_head is None:
            self._recent.forget(tenant, known_as)
            raise missing_file(param)
        return StoredFile(msgspec.json.decode(recent_head, type=FileObject), recent.content)

    async def files_of(self, tenant: bytes) -> list[FileObject]:
        return [msgspec.json.decode(head, type=FileObject) for head in await self._items.heads(tenant, FILE)]

    async def delete(self, tenant: bytes, known_as: str, param: str) -> None:
        self.check(param)
        was_there = await self._items.delete(tenant, FILE, known_as)
        self._recent.forget(tenant, known_as)
        if not was_there:
            raise missing_file(param)

    async def _remember(self, tenant: bytes, file: StoredFile) -> None:
        if self._recent.takes(len(file.content)):
            await self._recent.put(tenant, file)

    async def _recall(self, tenant: bytes, known_as: str) -> StoredFile | None:
        try:
            return await self._recent.get(tenant, known_as, "")
        except FileNotFound:
            return None
