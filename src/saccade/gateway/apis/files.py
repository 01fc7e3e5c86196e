"""/v1/files: images and PDFs that a client uploads once and refers to in many requests."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from saccade.errors import InvalidValue, RequestError, UnsupportedParameter
from saccade.gateway.apis.paging import page_of
from saccade.gateway.images.collect import THREAD_FROM_BYTES
from saccade.gateway.images.file_store import FileObject, FileStore, StoredFile, file_id
from saccade.gateway.server.body import BodyReader
from saccade.gateway.server.multipart import parse_form
from saccade.gateway.tenants.account import ACCOUNT
from saccade.gateway.work_threads import WorkThreads
from saccade.media.header import ImageLimits
from saccade.media.pdf_pages import read_image_header
from saccade.whole_numbers import read_whole_number

PURPOSES: Final = ("vision", "user_data")
BATCH_PURPOSE: Final = "batch"
"""Of a file of requests, if there is a database."""

MAX_FILENAME_CHARACTERS: Final = 255
MAX_LISTED: Final = 10_000


FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
CONTENT_HEADERS = {"content-disposition": "attachment", "x-content-type-options": "nosniff"}
"""No browser shows an uploaded file as a page of this server."""


class FileList(Struct, frozen=True):
    """A page of one tenant's files. *has_more* says whether more files follow *last_id*."""

    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class DeletedFile(Struct, frozen=True):
    """Confirms that a file was deleted."""

    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


@dataclass(frozen=True)
class Files:
    """Endpoints for a tenant's files; other tenants cannot find them."""

    store: FileStore
    bodies: BodyReader
    limits: ImageLimits
    threads: WorkThreads
    purposes: tuple[str, ...] = PURPOSES

    async def create(self, request: Request) -> Response:
        """POST /v1/files: store an image or a PDF."""
        self.store.check("file")
        tenant = _tenant(request)
        with self.bodies.begin_request(request.scope) as call:
            body = await self.bodies.read_body(request.scope, request.receive, call)
            headers = request.scope["headers"]
            is_long = len(body) > THREAD_FROM_BYTES
            file = await self.threads.run_work(is_long, len(body), lambda: self._read(tenant, body, headers))
        await self.store.put(tenant, file)
        return _json(file.about)

    async def list_all(self, request: Request) -> Response:
        """GET /v1/files: list this tenant's files, by default the newest first."""
        self.store.check("files")
        query = request.query_params
        _check_one_of("order", order := query.get("order", "desc"), ("asc", "desc"))
        with self.bodies.begin_request(request.scope):
            files = await self.store.files_of(_tenant(request))
        if (purpose := query.get("purpose")) is not None:
            files = [about for about in files if about.purpose == purpose]
        if order == "desc":
            files.reverse()
        return _json(FileList(*page_of({file.id: file for file in files}, query, default=MAX_LISTED, most=MAX_LISTED)))

    async def get(self, request: Request) -> Response:
        """GET /v1/files/{file_id}: return a file's description."""
        return _json((await self._find(request)).about)

    async def content(self, request: Request) -> Response:
        """GET /v1/files/{file_id}/content: return a file's content."""
        content = (await self._find(request)).content
        return Response(content, media_type="application/octet-stream", headers=CONTENT_HEADERS)

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/files/{file_id}: delete a file."""
        known_as = request.path_params["file_id"]
        with self.bodies.begin_request(request.scope):
            await self.store.delete(_tenant(request), known_as, "file_id")
        return _json(DeletedFile(known_as))

    async def _find(self, request: Request) -> StoredFile:
        with self.bodies.begin_request(request.scope):
            return await self.store.get(_tenant(request), request.path_params["file_id"], "file_id")

    def _read(self, tenant: bytes, body: bytearray, headers: list[tuple[bytes, bytes]]) -> StoredFile:
        """Parse a multipart form and return its file. Raises RequestError."""
        form = {field.name: field for field in parse_form(body, headers)}
        for name in form:
            if name not in FIELDS:
                raise UnsupportedParameter(f"The form has an unknown field; known are {', '.join(FIELDS)}.")
        if "file" not in form or form["file"].filename is None:
            raise InvalidValue("`file` is missing, or has no filename.", "file")
        texts = {name: _text(name, field.content) for name, field in form.items() if name != "file"}
        _check_one_of("purpose", purpose := texts.get("purpose", ""), self.purposes)
        content, filename = bytes(form["file"].content), form["file"].filename[:MAX_FILENAME_CHARACTERS]
        try:
            # A PDF is read when a request uses it, in a decode process.
            header = None if purpose == BATCH_PURPOSE else read_image_header(content, filename)
            if header is not None:
                self.limits.check_header(header, len(content))
        except RequestError as error:
            raise error.at("file") from error
        now = int(time.time())
        about = FileObject(
            id=file_id(tenant, content),
            bytes=len(content),
            created_at=now,
            expires_at=now + self._seconds(texts),
            filename=filename,
            purpose=purpose,
        )
        return StoredFile(about, content)

    def _seconds(self, texts: Mapping[str, str]) -> int:
        """Return how many seconds to keep a file."""
        _check_one_of("expires_after[anchor]", texts.get("expires_after[anchor]", "created_at"), ("created_at",))
        seconds = texts.get("expires_after[seconds]", str(self.store.keep_seconds))
        return _whole_number("expires_after[seconds]", seconds, self.store.keep_seconds)


def _text(name: str, content: memoryview) -> str:
    try:
        return bytes(content[:MAX_FILENAME_CHARACTERS]).decode()
    except UnicodeDecodeError as error:
        raise InvalidValue(f"`{name}` must be a text.", name) from error


def _check_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidValue(f"`{name}` must be {' or '.join(choices)}.", name)


def _whole_number(name: str, text: str, most: int) -> int:
    if number := read_whole_number(text, most):
        return number
    raise InvalidValue(f"`{name}` must be a whole number from 1 to {most}.", name)


def _tenant(request: Request) -> bytes:
    tenant: bytes = request.scope[ACCOUNT].tenant.id
    return tenant


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
