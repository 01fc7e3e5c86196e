"""The small endpoints: models, token ids, health, metrics, version."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final, TypeVar

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from saccade.errors import Draining, InvalidValue, WorkerUnavailable
from saccade.gateway.apis.chat_endpoint import ChatEndpoint
from saccade.gateway.apis.messages.reader import read_count
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
from saccade.gateway.pipeline import Pipeline
from saccade.gateway.request import Request as Call
from saccade.gateway.served_models.served_model import ServedModel
from saccade.gateway.server.body import BodyReader, while_connected
from saccade.gateway.server.middleware import WARNINGS
from saccade.gateway.siblings import Siblings
from saccade.gateway.tenants.account import ACCOUNT
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
        box_coordinates=served.declaration.box_coordinates or UNSET,
    )


def _info(name: str, served: ServedModel) -> ModelInfo:
    created_at = datetime.fromtimestamp(served.created, UTC)
    return ModelInfo(id=name, display_name=name, created_at=created_at, max_input_tokens=served.max_model_len)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
