"""The routes of every API."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, request_response
from starlette.types import ASGIApp, Receive, Scope

from saccade.fleet.dispatch import Preview
from saccade.gateway.apis.batches.endpoints import Batches
from saccade.gateway.apis.batches.runner import BatchRunner
from saccade.gateway.apis.batches.store import BatchStore
from saccade.gateway.apis.chat.reader import read_chat_completion
from saccade.gateway.apis.chat_endpoint import ChatEndpoint, ReadApi
from saccade.gateway.apis.completions.reader import read_completion
from saccade.gateway.apis.endpoints import Endpoints
from saccade.gateway.apis.files import BATCH_PURPOSE, PURPOSES, Files
from saccade.gateway.apis.invocations import Invocations
from saccade.gateway.apis.messages.reader import read_messages
from saccade.gateway.apis.pages import page
from saccade.gateway.apis.pdf_pages import PdfPages
from saccade.gateway.apis.responses.reader import ResponseReader
from saccade.gateway.apis.responses.store import ResponseStore
from saccade.gateway.apis.responses.stored import StoredResponses
from saccade.gateway.config import GatewayConfig
from saccade.gateway.images.pdf_drawer import PdfDrawer
from saccade.gateway.pipeline import Pipeline
from saccade.gateway.server.body import BodyReader
from saccade.gateway.server.middleware import PAGE_PATHS, NamedRoute
from saccade.gateway.siblings import Siblings
from saccade.gateway.tenants.account import Account


class Apis:
    """Constructs every API's endpoints and *routes*. If *responses* is None, no response is stored."""

    def __init__(
        self,
        config: GatewayConfig,
        bodies: BodyReader,
        pipeline: Pipeline,
        siblings: Siblings,
        pdfs: PdfDrawer,
        responses: ResponseStore | None,
        batches: BatchStore | None,
    ) -> None:
        strict, images = config.strict_parameters, pipeline.images
        self._chats = ChatEndpoint(bodies, pipeline, config.ping_interval_seconds)
        self._read_chat: ReadApi = partial(read_chat_completion, strict)
        apis: dict[str, ReadApi] = {
            "/v1/chat/completions": self._read_chat,
            "/v1/completions": partial(read_completion, strict),
            "/v1/messages": partial(read_messages, strict),
            "/v1/responses": ResponseReader(strict, responses).read_chat,
        }
        endpoints = Endpoints(bodies, pipeline, self._chats, strict, siblings)
        purposes = PURPOSES if batches is None else (*PURPOSES, BATCH_PURPOSE)
        files = Files(images.files, bodies, images.limits, images.threads, purposes)
        self.routes = [
            *_routes(self._chats, apis, endpoints, StoredResponses(responses), files, PdfPages(bodies, pdfs)),
            *_batches(Batches(batches, images.files, bodies)),
        ]
        self._apis = apis
        self._files = images.files
        if config.page:
            self.routes += [route("GET", path, page("index.html")) for path in PAGE_PATHS]

    def batch_runner(
        self, batches: BatchStore, accounts: Callable[[], Iterable[Account]], concurrency: int
    ) -> BatchRunner:
        """Return what answers the requests of *batches*."""
        return BatchRunner(batches, self._files, self._chats, self._apis, accounts, concurrency)

    async def preview(self, scope: Scope, receive: Receive, account: Account) -> Preview:
        """Return where a request's chat would go if the tenant of *account* sent it now. Raises SaccadeError."""
        return await self._chats.preview(self._read_chat, scope, receive, account)


def _routes(
    chats: ChatEndpoint,
    apis: Mapping[str, ReadApi],
    endpoints: Endpoints,
    responses: StoredResponses,
    files: Files,
    pdfs: PdfPages,
) -> list[Route]:
    """Return all routes; *apis* maps the path of each chat API to the function that reads its bodies."""
    return [
        *(_generation(path, partial(chats.serve, read_api)) for path, read_api in apis.items()),
        _generation("/invocations", Invocations(chats, apis).serve),
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
        route("POST", "/pdf_pages/{number}", pdfs.draw),
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


def _batches(batches: Batches) -> list[Route]:
    return [
        route("POST", "/v1/batches", batches.create, takes_json=True),
        route("GET", "/v1/batches", batches.list_all),
        route("GET", "/v1/batches/{batch_id}", batches.get),
        route("POST", "/v1/batches/{batch_id}/cancel", batches.cancel),
    ]


def route(
    method: str, path: str, endpoint: Callable[[Request], Awaitable[Response]], takes_json: bool = False
) -> Route:
    return Route(path, NamedRoute(path, request_response(endpoint), takes_json), methods=[method])


def _generation(path: str, serve: ASGIApp) -> Route:
    return Route(path, NamedRoute(path, serve, takes_json=True), methods=["POST"])
