"""The routes of every API, and the small endpoints: models, token ids, health, metrics, version."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final, TypeVar

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, request_response
from starlette.types import ASGIApp, Receive, Scope

from saccade.errors import Draining, InvalidValue, WorkerUnavailable
from saccade.fleet.dispatch import Preview
from saccade.gateway.apis.chat.reader import read_chat_completion
from saccade.gateway.apis.chat_endpoint import ChatEndpoint, ReadApi
from saccade.gateway.apis.completions.reader import read_completion
from saccade.gateway.apis.files import Files
from saccade.gateway.apis.invocations import Invocations
from saccade.gateway.apis.messages.reader import read_count, read_messages
from saccade.gateway.apis.messages.wire import CountAnswer
from saccade.gateway.apis.models import (
    DetokenizeAnswer,
    ModelCard,
    ModelInfo,
    ModelList,
    ModelPage,
    TokenizeAnswer,
    parse_detokenize,
    parse_tokenize,
)
from saccade.gateway.apis.openapi import describe
from saccade.gateway.apis.pages import page
from saccade.gateway.apis.responses.reader import ResponseReader
from saccade.gateway.apis.responses.store import ResponseStore
from saccade.gateway.apis.responses.stored import StoredResponses
from saccade.gateway.config import GatewayConfig
from saccade.gateway.pipeline import Pipeline
from saccade.gateway.request import Request as Call
from saccade.gateway.served_models.served_model import ServedModel
from saccade.gateway.server.body import BodyReader, while_connected
from saccade.gateway.server.middleware import PAGE_PATHS, WARNINGS, NamedRoute
from saccade.gateway.siblings import Siblings
from saccade.gateway.tenants.account import ACCOUNT, Account
from saccade.release import installed_version
from saccade.telemetry import METRICS_CONTENT_TYPE

T = TypeVar("T")
ANTHROPIC_VERSION: Final = "anthropic-version"
"""The header that every client of Anthropic's API sends."""


@dataclass(frozen=True)
class Endpoints:
    """The small endpoints, one method each; a method raises SaccadeError if it cannot answer."""

    bodies: BodyReader
    pipeline: Pipeline
    chats: ChatEndpoint
    strict_parameters: bool
    siblings: Siblings

    async def models(self, request: Request) -> Response:
        """GET /v1/models: list the models, in Anthropic's format if the request names a version of Anthropic's API."""
        named = self.pipeline.model_registry.names()
        if ANTHROPIC_VERSION in request.headers:
            return _json(ModelPage.of_models([_info(name, served) for name, served in named]))
        return _json(ModelList([_card(name, served) for name, served in named]))

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{model}: describe a model, in the format that models() would use."""
        name = request.path_params["model"]
        served = self.pipeline.model_registry.get(name)
        return _json(_info(name, served) if ANTHROPIC_VERSION in request.headers else _card(name, served))

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: the token ids of a prompt or chat, with images expanded.

        Text never becomes special tokens.
        """
        with self.bodies.begin_request(request.scope) as call:
            body_request = await self._read_body(request, call, partial(parse_tokenize, strict=self.strict_parameters))
            served = self.pipeline.model_registry.get(body_request.model)
            if (body_request.prompt is None) == (body_request.messages is None):
                raise InvalidValue("Send either `prompt` or `messages`.", "prompt")
            if body_request.messages is None:
                with call.place():
                    token_ids = await self.pipeline.prompts.token_ids(served, body_request.prompt or "")
            else:
                with while_connected(request.scope):
                    token_ids, warning = await self.pipeline.token_ids(call, served, body_request)
                request.scope[WARNINGS] = "; ".join(filter(None, (request.scope[WARNINGS], warning)))
        return _json(TokenizeAnswer(count=len(token_ids), max_model_len=served.max_model_len, tokens=token_ids))

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens: the number of tokens in a chat's prompt, with images expanded."""
        read_api = partial(read_count, self.strict_parameters)
        return _json(CountAnswer(await self.chats.count(read_api, request.scope, request.receive)))

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: the text of token ids, including special tokens."""
        with self.bodies.begin_request(request.scope) as call:
            body_request = await self._read_body(
                request, call, partial(parse_detokenize, strict=self.strict_parameters)
            )
            with call.place():
                served = self.pipeline.model_registry.get(body_request.model)
                return _json(DetokenizeAnswer(await self.pipeline.prompts.text_of(served, body_request.tokens)))

    async def _read_body(self, request: Request, call: Call, parse: Callable[[bytes | bytearray], tuple[T, str]]) -> T:
        """Return the parsed body of *request*. *call* counts its bytes. Any warning goes to the answer's headers."""
        body = await self.bodies.read_body(request.scope, request.receive, call)
        await call.hold_values(body, self.bodies.threads)
        async with call.turn(len(body)):
            parsed, request.scope[WARNINGS] = await self.bodies.threads.parse(body, parse)
        return parsed

    async def live(self, request: Request) -> Response:
        """GET /live: show that the process and its event loop are running."""
        return _json({"status": "live"})

    async def ready(self, request: Request) -> Response:
        """GET /ready, /health and /ping: show that requests can be served now. SageMaker also sends POST /ping."""
        if self.bodies.limits.admission.draining:
            raise Draining("The server is shutting down.")
        if not self.pipeline.model_registry.ready:
            raise WorkerUnavailable("No worker is ready.")
        return _json({"status": "ready"})

    async def load(self, request: Request) -> Response:
        """GET /load: the number of requests in progress in all processes that share the port."""
        return _json({"server_load": sum(work.num_requests for work in await self.siblings.works())})

    async def show_metrics(self, request: Request) -> Response:
        """GET /metrics: the metrics of this process, or of all processes that share the port, labelled by process.

        A request without a key, which --metrics-without-key allows, does not get the metrics of tenants.
        """
        has_key = bool(request.scope[ACCOUNT].tenant.id)
        return Response(await self.siblings.metrics(with_tenants=has_key), media_type=METRICS_CONTENT_TYPE)

    async def version(self, request: Request) -> Response:
        """GET /version: the installed version."""
        return _json({"version": installed_version()})

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json: the OpenAPI description of the API."""
        names = [served.name for served in self.pipeline.model_registry.models()]
        return _json(describe(names, request.scope.get("root_path", "")))


def _card(name: str, served: ServedModel) -> ModelCard:
    return ModelCard(
        id=name,
        root=served.name,
        created=served.created,
        max_model_len=served.max_model_len,
        input_modalities=served.input_modalities,
        note=served.note or UNSET,
    )


def _info(name: str, served: ServedModel) -> ModelInfo:
    created_at = datetime.fromtimestamp(served.created, UTC)
    return ModelInfo(id=name, display_name=name, created_at=created_at, max_input_tokens=served.max_model_len)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


class Apis:
    """Constructs every API's endpoints and *routes*. A process that shares its port with others keeps no responses.

    *memory_part* counts the stored responses.
    """

    def __init__(
        self,
        config: GatewayConfig,
        bodies: BodyReader,
        pipeline: Pipeline,
        siblings: Siblings,
    ) -> None:
        strict, images = config.strict_parameters, pipeline.images
        self._chats = ChatEndpoint(bodies, pipeline, config.ping_interval_seconds)
        self._read_chat: ReadApi = partial(read_chat_completion, strict)
        # Several processes that share a port share no memory.
        is_kept = config.member is None and config.response_store_bytes
        store = ResponseStore(config.response_store_bytes if is_kept else 0)
        self.memory_part = store.memory_part
        kept_store = store if is_kept else None
        apis: dict[str, ReadApi] = {
            "/v1/chat/completions": self._read_chat,
            "/v1/completions": partial(read_completion, strict),
            "/v1/messages": partial(read_messages, strict),
            "/v1/responses": ResponseReader(strict, kept_store).read_chat,
        }
        endpoints = Endpoints(bodies, pipeline, self._chats, strict, siblings)
        files = Files(images.files, bodies, images.limits, images.threads)
        self.routes = _routes(self._chats, apis, endpoints, StoredResponses(kept_store), files)
        if config.page:
            self.routes += [route("GET", path, page("index.html")) for path in PAGE_PATHS]

    async def preview(self, scope: Scope, receive: Receive, account: Account) -> Preview:
        """Return where a request's chat would go if the tenant of *account* sent it now. Raises SaccadeError."""
        return await self._chats.preview(self._read_chat, scope, receive, account)


def _routes(
    chats: ChatEndpoint, apis: Mapping[str, ReadApi], endpoints: Endpoints, responses: StoredResponses, files: Files
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
    return Route(path, NamedRoute(path, request_response(endpoint), takes_json), methods=[method])


def _generation(path: str, serve: ASGIApp) -> Route:
    return Route(path, NamedRoute(path, serve, takes_json=True), methods=["POST"])
