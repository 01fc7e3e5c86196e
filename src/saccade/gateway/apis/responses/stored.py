"""The endpoints for stored responses."""

from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from saccade.gateway.apis.responses.store import ResponseStore, required_store
from saccade.gateway.apis.responses.wire import DeletedResponse
from saccade.gateway.tenants.account import ACCOUNT


@dataclass(frozen=True)
class StoredResponses:
    """Shows and deletes the responses in *store*, if the gateway keeps any."""

    store: ResponseStore | None

    async def get(self, request: Request) -> HttpResponse:
        """GET /v1/responses/{response_id}: return a stored response."""
        body = await required_store(self.store, "response_id").body(
            request.scope[ACCOUNT].tenant.id, request.path_params["response_id"]
        )
        return HttpResponse(body, media_type="application/json")

    async def delete(self, request: Request) -> HttpResponse:
        """DELETE /v1/responses/{response_id}: delete a stored response."""
        response_id = request.path_params["response_id"]
        await required_store(self.store, "response_id").delete(request.scope[ACCOUNT].tenant.id, response_id)
        return HttpResponse(msgspec.json.encode(DeletedResponse(response_id)), media_type="application/json")
