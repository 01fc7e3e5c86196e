"""The gateway as one ASGI application: its parts, put together, and the paths that lead to them."""

from collections.abc import Awaitable, Callable, Mapping

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router, request_response
from starlette.types import ASGIApp, Receive, Scope, Send

from saccade.gateway.access_log import AccessLog
from saccade.gateway.admission import Admission
from saccade.gateway.auth import Keys
from saccade.gateway.body_reader import COPIES, BodyReader
from saccade.gateway.border import ROUTE, SALT, Guarded, Identified
from saccade.gateway.byte_budget import ByteBudget
from saccade.gateway.catalogue import Catalogue
from saccade.gateway.chat import ChatCompletions
from saccade.gateway.clients import TrustedProxies
from saccade.gateway.config import GatewayConfig
from saccade.gateway.connection import CONNECTION
from saccade.gateway.dispatch import Dispatcher
from saccade.gateway.endpoints import Endpoints
from saccade.gateway.media_pool import MediaPool
from saccade.gateway.preparation import Preparation
from saccade.gateway.web_pages import WebPages, check_json
from saccade.gateway.workers import Fleet
from saccade.protocol.description import ModelFiles
from saccade.telemetry import Metrics

EXPOSED_HEADERS = ("x-request-id", "retry-after", "x-saccade-warning")


class Application:
    """An ASGI application. *admission* tells how busy it is and drains it; *metrics* is what it measures."""

    def __init__(
        self,
        config: GatewayConfig,
        fleet: Fleet,
        pool: MediaPool,
        models: Mapping[str, ModelFiles],
        access_log: AccessLog | None = None,
    ) -> None:
        self.metrics = Metrics()
        self.admission = Admission(config.max_requests, config.max_pixel_bytes, config.max_tenant_requests)
        self.memory = ByteBudget(config.max_request_memory_bytes, config.memory_wait_seconds)
        self.proxies = TrustedProxies(config.trusted_proxies)
        self.metrics.requests_in_flight.set_function(lambda: self.admission.num_requests)
        catalogue = Catalogue(fleet, models)
        self._preparation = Preparation(config, pool, self.admission, self.memory, self.metrics)
        preparer = self._preparation.preparer
        bodies = BodyReader(self.admission, min(config.max_body_bytes, config.max_request_memory_bytes // COPIES))
        endpoints = Endpoints(
            admission=self.admission,
            catalogue=catalogue,
            preparer=preparer,
            metrics=self.metrics,
            bodies=bodies,
            memory=self.memory,
            proxies=self.proxies,
            strict_parameters=config.strict_parameters,
        )
        chat = ChatCompletions(
            admission=self.admission,
            bodies=bodies,
            memory=self.memory,
            proxies=self.proxies,
            catalogue=catalogue,
            preparer=preparer,
            dispatcher=Dispatcher(fleet),
            metrics=self.metrics,
            ping_interval_seconds=config.ping_interval_seconds,
            strict_parameters=config.strict_parameters,
        )
        guarded: ASGIApp = Guarded(
            Router(_routes(chat, endpoints), redirect_slashes=False),
            Keys(config.api_keys, config.metrics_without_key),
            WebPages(config.allowed_origins, (config.host, *config.allowed_hosts), keyless=not config.api_keys),
        )
        if config.allowed_origins:
            guarded = CORSMiddleware(
                guarded,
                allow_origins=config.allowed_origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),
                expose_headers=EXPOSED_HEADERS,
            )
        self._app = Identified(guarded, self.metrics, access_log)

    async def start(self) -> None:
        """Make ready to fetch pictures."""
        await self._preparation.start()

    async def close(self) -> None:
        """Let go of connections and of pictures that were kept."""
        await self._preparation.close()

    def forget_media(self) -> None:
        """Empty the caches of pictures and of URLs, but for what requests are using."""
        self._preparation.forget()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self._app(scope, receive, send)


class _Named:
    """Notes which route was taken, and over which connection a valid key came.

    Metrics and logs name the route rather than the path that a client wrote.

    A body, where there is one, must say that it is JSON.
    """

    def __init__(self, path: str, app: ASGIApp, takes_json: bool) -> None:
        self._path = path
        self._app = app
        self._takes_json = takes_json

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ROUTE] = self._path
        if scope[SALT] and CONNECTION in scope:
            scope[CONNECTION].vouch()
        if self._takes_json:
            check_json(scope["headers"])
        await self._app(scope, receive, send)


def _routes(chat: ASGIApp, endpoints: Endpoints) -> list[Route]:
    return [
        Route("/v1/chat/completions", _Named("/v1/chat/completions", chat, takes_json=True), methods=["POST"]),
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
    """Return the route of *path* for one method."""
    return Route(path, _Named(path, request_response(endpoint), takes_json), methods=[method])
