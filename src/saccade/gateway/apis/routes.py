"""The routes to the endpoints of every API."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, request_response
from starlette.types import ASGIApp, Receive, Scope, Send

from saccade.gateway.apis.chat import ChatCompletions
from saccade.gateway.apis.chat_endpoint import Api, ChatEndpoint
from saccade.gateway.apis.completions.writer import Completions
from saccade.gateway.apis.endpoints import Endpoints
from saccade.gateway.apis.files import Files
from saccade.gateway.apis.messages.writer import Messages
from saccade.gateway.apis.pages import page
from saccade.gateway.apis.responses.store import ResponseStore
from saccade.gateway.apis.responses.writer import Responses
from saccade.gateway.config import GatewayConfig
from saccade.gateway.parts import PartReader
from saccade.gateway.pipeline import Pipeline
from saccade.gateway.server.body import BodyReader
from saccade.gateway.server.connection import CONNECTION
from saccade.gateway.server.middleware import PAGE_PATHS, ROUTE
from saccade.gateway.server.origins import check_json
from saccade.gateway.siblings import Siblings
from saccade.gateway.tenants.account import ACCOUNT, Account
from saccade.gateway.workers.dispatch import Preview


class _Named:
    """Records the route, and that a request with a valid key came over the connection.

    Metrics and logs name the route, not the client's path. If the route *takes_json*, Content-Type must be JSON.
    """

    def __init__(self, path: str, app: ASGIApp, takes_json: bool) -> None:
        self._path = path
        self._app = app
        self._takes_json = takes_json

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        scope[ROUTE] = self._path
        if scope[ACCOUNT].tenant.id and CONNECTION in scope:
            scope[CONNECTION].mark_authenticated()
        if self._takes_json:
            check_json(scope["headers"])
        return self._app(scope, receive, send)


class Apis:
    """The endpoints of every API; *routes* lead to them. One process of several keeps no responses."""

    def __init__(
        self,
        config: GatewayConfig,
        bodies: BodyReader,
        parts: PartReader,
        pipeline: Pipeline,
        siblings: Siblings,
    ) -> None:
        strict, images = config.strict_parameters, pipeline.images
        self._chats = ChatEndpoint(bodies, parts, pipeline, config.ping_interval_seconds)
        self._chat = ChatCompletions(strict)
        # Several processes that share a port share no memory.
        is_kept = config.member is None and config.response_store_bytes
        responses = Responses(strict, ResponseStore(config.response_store_bytes) if is_kept else None)
        apis: dict[str, Api] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": Completions(strict),
            "/v1/messages": Messages(strict),
            "/v1/responses": responses,
        }
        endpoints = Endpoints(bodies, parts.model_registry, pipeline, strict, siblings)
        files = Files(images.files, bodies, images.limits, images.threads)
        self.routes = _routes(self._chats, apis, endpoints, responses, files)
        if config.page:
            self.routes += [route("GET", path, page("index.html")) for path in PAGE_PATHS]

    async def preview(self, scope: Scope, receive: Receive, account: Account) -> Preview:
        """Return where the chat in a request would go now if the tenant of *account* sent it. Raises SaccadeError."""
        return await self._chats.preview(self._chat, scope, receive, account)


def _routes(
    chats: ChatEndpoint, apis: Mapping[str, Api], endpoints: Endpoints, responses: Responses, files: Files
) -> list[Route]:
    """Return all routes; *apis* are the chat APIs by path."""
    return [
        *(_generation(path, chats, api) for path, api in apis.items()),
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


def _generation(path: str, chats: ChatEndpoint, api: Api) -> Route:
    return Route(path, _Named(path, partial(chats.serve, api), takes_json=True), methods=["POST"])
