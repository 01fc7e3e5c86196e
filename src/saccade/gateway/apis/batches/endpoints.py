"""The endpoints of /v1/batches."""

import secrets
from dataclasses import dataclass
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from saccade.errors import InvalidValue, UnsupportedParameter
from saccade.gateway.apis.batches.store import BatchStore
from saccade.gateway.apis.batches.wire import (
    ENDPOINTS,
    WINDOW,
    WINDOW_SECONDS,
    Batch,
    BatchList,
    BatchRequest,
)
from saccade.gateway.apis.paging import page_of
from saccade.gateway.images.file_store import FileStore
from saccade.gateway.parameters import ParameterReader
from saccade.gateway.server.body import BodyReader
from saccade.gateway.tenants.account import ACCOUNT

DEFAULT_LISTED: Final = 20
MAX_LISTED: Final = 100
MAX_BODY_BYTES: Final = 64 << 10
_REQUEST: Final = ParameterReader(BatchRequest)


@dataclass(frozen=True)
class Batches:
    """Creates, shows and cancels batches in *store*, which is None without a database."""

    store: BatchStore | None
    files: FileStore
    bodies: BodyReader

    async def create(self, request: Request) -> Response:
        """POST /v1/batches: create a batch from an uploaded file."""
        store, tenant = self._required(), _tenant(request)
        with self.bodies.begin_request(request.scope):
            body = await self.bodies.read_short(request.scope, request.receive, MAX_BODY_BYTES)
            batch_request, _ = _REQUEST.read_parameters(body, True)
            if batch_request.endpoint not in ENDPOINTS:
                raise InvalidValue(f"`endpoint` must be one of {', '.join(ENDPOINTS)}.", "endpoint")
            if (expiry := batch_request.output_expires_after) is not None:
                most = self.files.keep_seconds
                if not 0 < expiry.seconds <= most:
                    name = "output_expires_after.seconds"
                    raise InvalidValue(f"`{name}` must be a whole number from 1 to {most}.", name)
            if batch_request.completion_window != WINDOW:
                raise InvalidValue(f"`completion_window` must be {WINDOW}.", "completion_window")
            file = await self.files.get(tenant, batch_request.input_file_id, "input_file_id")
            if file.about.purpose != "batch":
                raise InvalidValue("`input_file_id`: the purpose of this file is not batch.", "input_file_id")
            now = store.now()
            batch = Batch(
                id=f"batch_{secrets.token_hex(16)}",
                endpoint=batch_request.endpoint,
                input_file_id=batch_request.input_file_id,
                created_at=now,
                expires_at=now + WINDOW_SECONDS,
                metadata=batch_request.metadata,
                output_expires_after=expiry,
            )
            await store.create(tenant, batch, file.content)
        return _json(batch)

    async def get(self, request: Request) -> Response:
        """GET /v1/batches/{batch_id}: return a batch."""
        store = self._required()
        with self.bodies.begin_request(request.scope):
            return _json(await store.get(_tenant(request), request.path_params["batch_id"]))

    async def cancel(self, request: Request) -> Response:
        """POST /v1/batches/{batch_id}/cancel: begin no further request of a batch."""
        store = self._required()
        with self.bodies.begin_request(request.scope):
            return _json(await store.cancel(_tenant(request), request.path_params["batch_id"]))

    async def list_all(self, request: Request) -> Response:
        """GET /v1/batches: list this tenant's batches, the newest first."""
        store = self._required()
        with self.bodies.begin_request(request.scope):
            by_id = {batch.id: batch for batch in await store.list_all(_tenant(request))}
        return _json(BatchList(*page_of(by_id, request.query_params, default=DEFAULT_LISTED, most=MAX_LISTED)))

    def _required(self) -> BatchStore:
        if self.store is None:
            raise UnsupportedParameter(
                "`input_file_id`: batches need a database, and this gateway has none; start it with --state FOLDER or "
                "--state postgresql://....",
                "input_file_id",
            )
        return self.store


def _tenant(request: Request) -> bytes:
    tenant: bytes = request.scope[ACCOUNT].tenant.id
    return tenant


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
