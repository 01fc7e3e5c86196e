"""The small endpoints: models, token ids, health, metrics, version, description."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from saccade.errors import Draining, InvalidValue, ModelNotFound, WorkerUnavailable
from saccade.gateway.anthropic.answers import CountAnswer
from saccade.gateway.anthropic.chats import parse_count
from saccade.gateway.api.openapi import describe, server_version
from saccade.gateway.images.collect import Asker, ImageCollector
from saccade.gateway.limits.admission import Admission
from saccade.gateway.limits.byte_budget import ByteBudget, Reservation
from saccade.gateway.openai.answers import DetokenizeAnswer, ModelCard, ModelList, TokenizeAnswer
from saccade.gateway.openai.parameters import parse_detokenize, parse_tokenize
from saccade.gateway.openai.requests import ChatRequest, TokenizeRequest
from saccade.gateway.processes.siblings import Siblings
from saccade.gateway.prompt.draft import PromptDrafter
from saccade.gateway.served_models.model_registry import ModelRegistry
from saccade.gateway.served_models.served_model import ServedModel
from saccade.gateway.server.body import COPIES, BodyReader
from saccade.gateway.server.client_address import TrustedProxies
from saccade.gateway.server.disconnection import while_connected
from saccade.gateway.server.middleware import WARNINGS
from saccade.gateway.tenants.account import ACCOUNT, Account
from saccade.telemetry import METRICS_CONTENT_TYPE, Metrics


@dataclass(frozen=True)
class Endpoints:
    """One method for each endpoint; each raises SaccadeError for what it cannot answer."""

    admission: Admission
    model_registry: ModelRegistry
    prompts: PromptDrafter
    images: ImageCollector
    metrics: Metrics
    bodies: BodyReader
    memory: ByteBudget
    proxies: TrustedProxies
    strict_parameters: bool
    siblings: Siblings | None = None

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return _json(ModelList([_card(name, served) for name, served in self.model_registry.names()]))

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{model}."""
        name = request.path_params["model"]
        return _json(_card(name, self._served(name)))

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: the ids a prompt or a chat becomes, images expanded; text never becomes special tokens."""
        with self.begin(request) as memory:
            body = await self.bodies.read(request.scope, request.receive, memory)
            async with self.admission.turn(len(body)):
                asked, request.scope[WARNINGS] = parse_tokenize(body, self.strict_parameters)
            served = self._served(asked.model)
            if (asked.prompt is None) == (asked.messages is None):
                raise InvalidValue("Send either `prompt` or `messages`.", "prompt")
            if asked.messages is None:
                with self.admission.admit(_account(request).tenant.id):
                    token_ids = await self.prompts.token_ids(served, asked.prompt or "")
            else:
                counting = self._chat_token_ids(request, served, asked, memory)
                token_ids = await while_connected(request.receive, counting)
        return _json(TokenizeAnswer(count=len(token_ids), max_model_len=served.max_model_len, tokens=token_ids))

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens: how many tokens the prompt of a chat has, images expanded."""
        with self.begin(request) as memory:
            body = await self.bodies.read(request.scope, request.receive, memory)
            async with self.admission.turn(len(body)):
                asked, request.scope[WARNINGS], names = parse_count(body, self.strict_parameters)
            with names.in_errors():
                counting = self._chat_token_ids(request, self._served(asked.model), asked, memory)
                token_ids = await while_connected(request.receive, counting)
        return _json(CountAnswer(len(token_ids)))

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: the text of token ids, special tokens as they are written."""
        with self.begin(request) as memory:
            body = await self.bodies.read(request.scope, request.receive, memory)
            async with self.admission.turn(len(body)):
                asked, request.scope[WARNINGS] = parse_detokenize(body, self.strict_parameters)
            with self.admission.admit(_account(request).tenant.id):
                return _json(DetokenizeAnswer(await self.prompts.text_of(self._served(asked.model), asked.tokens)))

    async def live(self, request: Request) -> Response:
        """GET /live: the process runs and its event loop turns."""
        return _json({"status": "live"})

    async def ready(self, request: Request) -> Response:
        """GET /ready, /health and /ping, which SageMaker calls by POST too: requests can be served now."""
        if self.admission.draining:
            raise Draining("The server is shutting down.")
        if not self.model_registry.ready:
            raise WorkerUnavailable("No worker is ready.")
        return _json({"status": "ready"})

    async def load(self, request: Request) -> Response:
        """GET /load: how many requests are being served, by all processes that share the port."""
        if self.siblings is None:
            return _json({"server_load": self.admission.num_requests})
        return _json({"server_load": sum(work.num_requests for work in await self.siblings.works())})

    async def show_metrics(self, request: Request) -> Response:
        """GET /metrics: of this process, or of all processes that share the port, each with a label."""
        page = self.metrics.render() if self.siblings is None else await self.siblings.metrics()
        return Response(page, media_type=METRICS_CONTENT_TYPE)

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return _json({"version": server_version()})

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json."""
        return _json(describe([served.name for served in self.model_registry.models()]))

    async def _chat_token_ids(
        self, request: Request, served: ServedModel, asked: ChatRequest | TokenizeRequest, memory: Reservation
    ) -> list[int]:
        account = _account(request)
        chat = await self.prompts.read_long(served, asked)
        memory.keep(memory.num_bytes // COPIES)
        account.begin_images(len(chat.images))
        asker = Asker(account.tenant.id, account.tenant.salt)
        images = await self.images.collect(served, chat.images, asker, memory)
        num_bytes = sum(len(image.encoded) for image in images)
        account.use_images(num_bytes)
        with self.admission.admit(account.tenant.id):
            layouts = [image.layout for image in images]
            return (await self.prompts.draft(served, asked, chat, layouts, num_bytes)).token_ids

    @contextmanager
    def begin(self, request: Request) -> Iterator[Reservation]:
        """Count the request that the block serves, and yield what counts its bytes.

        Raises Draining, QueueFull and RateLimitExceeded where it would not be served.
        """
        account = _account(request)
        tenant = account.tenant.id
        self.admission.check(tenant)
        client = tenant or self.proxies.client_of(request.scope)
        with account.request(), self.memory.reservation(client) as memory:
            yield memory

    def _served(self, name: str | None) -> ServedModel:
        """Return the model *name*; None means the only one there is."""
        if name is not None:
            return self.model_registry.get(name)
        match self.model_registry.models():
            case [served]:
                return served
            case []:
                raise WorkerUnavailable("No worker is ready yet; try again shortly.")
            case several:
                raise ModelNotFound(f"Name one of the models: {', '.join(s.name for s in several)}.", "model")


def _account(request: Request) -> Account:
    account: Account = request.scope[ACCOUNT]
    return account


def _card(name: str, served: ServedModel) -> ModelCard:
    return ModelCard(id=name, created=served.created, max_model_len=served.max_model_len)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
