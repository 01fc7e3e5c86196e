"""The gateway as one ASGI application: its parts, put together."""

import asyncio
from collections.abc import Mapping
from functools import partial
from random import Random

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope

from saccade.errors import InvalidApiKey, InvalidValue
from saccade.gateway.apis.chat import ChatCompletions
from saccade.gateway.apis.chat_endpoint import Api, ChatEndpoint
from saccade.gateway.apis.completions.writer import Completions
from saccade.gateway.apis.endpoints import Endpoints
from saccade.gateway.apis.files import Files
from saccade.gateway.apis.messages.writer import Messages
from saccade.gateway.apis.responses.store import ResponseStore
from saccade.gateway.apis.responses.writer import Responses
from saccade.gateway.apis.routes import routes
from saccade.gateway.config import GatewayConfig
from saccade.gateway.images.decode_pool.pool import DecodePool
from saccade.gateway.pipeline import Pipeline
from saccade.gateway.preparation import Preparation
from saccade.gateway.processes.shared_index import SharedIndex
from saccade.gateway.processes.siblings import Siblings
from saccade.gateway.request import COPIES
from saccade.gateway.served_models.model_registry import ModelRegistry
from saccade.gateway.server.access_log import AccessLog
from saccade.gateway.server.body import BodyReader
from saccade.gateway.server.client_address import TrustedProxies
from saccade.gateway.server.middleware import GuardMiddleware, Keys, TelemetryMiddleware
from saccade.gateway.server.origins import AllowedOrigins
from saccade.gateway.structured_output.grammars import RequestGrammars
from saccade.gateway.tenants.api_keys import ApiKeyStore
from saccade.gateway.tenants.metrics import TenantMetrics
from saccade.gateway.tenants.report import TenantReport, tenant_reports
from saccade.gateway.workers.cache_listener import CacheListener, CacheView
from saccade.gateway.workers.decision_metrics import DecisionMetrics
from saccade.gateway.workers.discovery import Discovery
from saccade.gateway.workers.dispatch import Dispatcher
from saccade.gateway.workers.engine_metrics import FleetCollector
from saccade.gateway.workers.pool import WorkerPool
from saccade.gateway.workers.route_report import RouteReport, route_report
from saccade.gateway.workers.routing_metrics import DispatchCollector, RoutingCollector, SourceCollector
from saccade.gateway.workers.worker_report import booked, exactness
from saccade.protocol.description import ModelFiles
from saccade.protocol.gateway_calls import TenantUsage, Work
from saccade.routing.index import BlockIndex
from saccade.routing.router import Router as FleetRouter
from saccade.telemetry import Metrics
from saccade.transport import lasting_task

LIMIT_HEADERS = tuple(
    f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")
)
EXPOSED_HEADERS = ("x-request-id", "retry-after", "x-saccade-warning", *LIMIT_HEADERS)


class Application:
    """The parts of a gateway; *asgi* is what a server calls.

    *admission* tells how busy the gateway is, and drains it; *metrics* is what it measures.

    *model_registry* has the models that it serves, *listener* what is known of the workers' caches, *members* which
    workers there are. *siblings* are the processes that share its port, None where it is alone.
    """

    def __init__(
        self,
        config: GatewayConfig,
        fleet: WorkerPool,
        pool: DecodePool,
        models: Mapping[str, ModelFiles],
        access_log: AccessLog | None = None,
    ) -> None:
        self.metrics = Metrics()
        num_processes = 1 if config.member is None else config.member.size
        self._api_keys = ApiKeyStore(config.api_keys, config.api_keys_file, config.admin_keys, num_processes)
        self._following: asyncio.Task[None] | None = None
        self.limits = config.limits()
        self.admission = self.limits.admission
        self.proxies = TrustedProxies(config.trusted_proxies)
        self.metrics.requests_in_flight.set_function(lambda: self.admission.num_requests)
        self._fleet = fleet
        self.model_registry = ModelRegistry(fleet, models, config.parsers)
        router = self._router = _fleet_router(config)
        self._index = None if config.member is None else SharedIndex(fleet, router, config.member.indexer)
        self.listener: CacheView = self._index or CacheListener(fleet, router)
        decisions = DecisionMetrics(self.metrics.registry, partial(exactness, listener=self.listener))
        dispatcher = Dispatcher(fleet, router, decisions, config.dispatch_limits, self._index)
        self.members = Discovery(fleet, dispatcher.num_requests_at, config.worker_sources.drain_seconds)
        self.metrics.registry.register(RoutingCollector(fleet, self.listener))
        self.metrics.registry.register(DispatchCollector(dispatcher))
        self.metrics.registry.register(SourceCollector(self.members))
        self.metrics.registry.register(TenantMetrics(self._api_keys))
        self.siblings = self._siblings(config)
        self.preparation = Preparation(config, pool, self.admission, self.metrics)
        bodies = BodyReader(
            self.limits,
            self.proxies,
            min(config.max_body_bytes, config.max_request_memory_bytes // COPIES),
        )
        pipeline = Pipeline(
            images=self.preparation.images,
            prompts=self.preparation.prompts,
            dispatcher=dispatcher,
            pixels=self.preparation.pixels,
            metrics=self.metrics,
        )
        endpoints = Endpoints(
            bodies=bodies,
            model_registry=self.model_registry,
            pipeline=pipeline,
            metrics=self.metrics,
            strict_parameters=config.strict_parameters,
            siblings=self.siblings,
        )
        self._grammars = RequestGrammars()
        self._chat = ChatCompletions(config.strict_parameters)
        responses = Responses(config.strict_parameters, _response_store(config))
        apis: dict[str, Api] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": Completions(config.strict_parameters),
            "/v1/messages": Messages(config.strict_parameters),
            "/v1/responses": responses,
        }
        self._chats = ChatEndpoint(
            bodies=bodies,
            model_registry=self.model_registry,
            prompts=self.preparation.prompts,
            grammars=self._grammars,
            pipeline=pipeline,
            ping_interval_seconds=config.ping_interval_seconds,
        )
        table = routes(self._chats, apis, endpoints, responses, self._files(config, bodies))
        hosts = (config.host, *config.allowed_hosts)
        guarded: ASGIApp = GuardMiddleware(
            Router(table, redirect_slashes=False),
            Keys(self._api_keys, config.metrics_without_key),
            AllowedOrigins(config.allowed_origins, hosts, keyless=self._api_keys.is_open),
        )
        self.asgi: ASGIApp = TelemetryMiddleware(_open_to(config.allowed_origins, guarded), self.metrics, access_log)

    async def start(self) -> None:
        """Prepare to fetch images, follow the keys file; with siblings, answer them, and connect to the indexer.

        Raises OSError.
        """
        await self.preparation.start()
        self._following = lasting_task.begin(self._api_keys.follow, "keys file")
        if self.siblings is not None:
            await self.siblings.start()
        if self._index is not None:
            self._index.start()

    async def close(self) -> None:
        """Stop looking for workers and listening to them, close connections and drop cached images."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        self._grammars.close()
        await self.members.close()
        await self.listener.close()
        if self.siblings is not None:
            await self.siblings.close()
        await self.preparation.close()

    async def preview(self, scope: Scope, receive: Receive, api_key: bytes) -> RouteReport:
        """Return where the chat in a request would go now if the tenant with *api_key* sent it. Raises SaccadeError."""
        try:
            account = self._api_keys.account(api_key)
        except InvalidApiKey as error:
            raise InvalidValue(
                "The caches of tenants are apart: name one of the gateway's API keys in the header x-api-key.",
                "x-api-key",
            ) from error
        return route_report(await self._chats.preview(self._chat, scope, receive, account), self._fleet, self.listener)

    async def tenants(self) -> list[TenantReport]:
        """Return what each tenant of the keys file may use and has used, at all processes that share the port."""
        usages = [self._usages()] if self.siblings is None else await self.siblings.usages()
        return tenant_reports(self._api_keys.named, usages)

    def _usages(self) -> dict[str, TenantUsage]:
        return {name: account.usage for name, account in self._api_keys.named.items()}

    def _siblings(self, config: GatewayConfig) -> Siblings | None:
        """Return what answers for all processes that share the port; have the engines' metrics shown once."""
        if config.member is None:
            self.metrics.registry.register(FleetCollector(self._fleet))
            return None
        of_engines = self.metrics.new_registry()
        of_engines.register(FleetCollector(self._fleet))
        return Siblings(config.member, self._work, self.forget_media, self.metrics.registry, of_engines, self._usages)

    def _files(self, config: GatewayConfig, bodies: BodyReader) -> Files:
        return Files(self.preparation.files, bodies, config.image_limits, self.preparation.threads)

    def _work(self) -> Work:
        """Return what this process is doing."""
        return Work(self.admission.num_requests, {url: booked(work) for url, work in self._router.work.items()})

    def forget_media(self) -> None:
        """Empty the caches of images and of URLs, except for what requests are using."""
        self.preparation.forget()


def _response_store(config: GatewayConfig) -> ResponseStore | None:
    """Return what keeps responses: nothing where several processes share the port, since they share no memory."""
    is_alone = config.member is None
    return ResponseStore(config.response_store_bytes) if is_alone and config.response_store_bytes else None


def _open_to(origins: tuple[str, ...], app: ASGIApp) -> ASGIApp:
    """Return *app* as web pages of *origins* may call it."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=EXPOSED_HEADERS,
    )


def _fleet_router(config: GatewayConfig) -> FleetRouter:
    return FleetRouter(
        config.routing_policy,
        BlockIndex(config.routing_index_bytes),
        Random(),
        config.routing_temperature,
        assumes=config.assumes_holdings,
    )
