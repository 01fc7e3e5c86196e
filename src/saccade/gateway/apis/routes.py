"""Which path leads to which endpoint."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, request_response
from starlette.types import ASGIApp, Receive, Scope, Send

from saccade.gateway.apis.chat_endpoint import Api, ChatEndpoint
from saccade.gateway.apis.endpoints import Endpoints
from saccade.gateway.apis.files import Files
from saccade.gateway.apis.responses.writer import Responses
from saccade.gateway.server.connection import CONNECTION
from saccade.gateway.server.middleware import ROUTE
from saccade.gateway.server.origins import check_json
from saccade.gateway.tenants.account import ACCOUNT


class _Named:
    """Notes which route was taken, and that a valid key came over the connection.

    Metrics and logs name the route, not the client's path. Where the route *takes_json*, Content-Type must be JSON.
    """

    def __init__(self, path: str, app: ASGIApp, takes_json: bool) -> None:
        self._path = path
        self._app = app
        self._takes_json = takes_json

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        scope[ROUTE] = self._path
        if scope[ACCOUNT].tenant.id and CONNECTION in scope:
            scope[CONNECTION].vouch()
        if self._takes_json:
            check_json(scope["headers"])
        return self._app(scope, receive, send)


def routes(
    chats: ChatEndpoint, apis: Mapping[str, Api], endpoints: Endpoints, responses: Responses, files: Files
) -> list[Route]:
    """Return all routes; *apis* are those that answer chats, by path."""
    return [
        *(_answered(path, chats, api) for path, api in apis.items()),
        route("GET", "/v1/responses/{response_id}", responses.get),
        route("DELETE", "/v1/responses/{response_id}", responses.delete),
        route("POST", "/v1/files", files.create),
        route("GET", "/v1/files", files.list_all),
        route("GET", "/v1/files/{file_id}", files.get),
        route("DELETE", "/v1/files/{file_id}", files.delete),
        route("GET", "/v1/files/{file_id}/content", files.content),
        route("POST", "/v1/messages/count_tokens", endpoints.count_tokens, takes_json=True),
        route("GET", "/v1/models", endpoints.models),
        route("GET", "/v1/models/{model:path}", endpoints.model),
        route("POST", "/tokenize", endpoints.tokenize, takes_json=True),
        route("POST", "/detokenize", endpoints.detokenize, takes_json=True),
        route("GET", "/ping", endpoints.ready),
        route("POST", "/ping", endpoints.ready),
        route("GET", "/load", endpoints.load),
        route("GET", "/live", endpoints.live),
        route("GET", "/ready", endpoints.ready),
        route("GET", "/health", endpoints.ready),
        route("GET", "/metrics", endpoints.show_metrics),
        route("GET", "/version", endpoints.version),
        route("GET", "/openapi.json", endpoints.openapi),
    ]


def route(
    method: str, path: str, endpoint: Callable[[Request], Awaitable[Response]], takes_json: bool = False
) -> Route:
    return Route(path, _Named(path, request_response(endpoint), takes_json), methods=[method])


def _answered(path: str, chats: ChatEndpoint, api: Api) -> Route:
    return Route(path, _Named(path, partial(chats.serve, api), takes_json=True), methods=["POST"])
