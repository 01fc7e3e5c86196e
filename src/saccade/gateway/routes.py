"""The gateway as one ASGI application: its parts, put together, and the paths that lead to them."""

from collections.abc import Awaitable, Callable, Mapping

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router, request_response
from starlette.types import ASGIApp, Receive, Scope, Send

from saccade.gateway.admission import Admission
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
from saccade.gateway.workers import Fleet
from saccade.protocol.description import ModelFiles
from saccade.telemetry import Metrics

EXPOSED_HEADERS = ("x-request-id", "retry-after", "x-saccade-warning")


class Application:
    """An ASGI application. *admission* tells how busy it is and drains it; *metrics* is what it measures."""

    def __init__(self, config: GatewayConfig, fleet: Fleet, pool: MediaPool, models: Mapping[str, ModelFiles]) -> None:
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
        guarded: ASGIApp = Guarded(Router(_routes(chat, endpoints), redirect_slashes=False), config.api_keys)
        if config.allowed_origins:
            guarded = CORSMiddleware(
                guarded,
                allow_origins=config.allowed_origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),
                expose_headers=EXPOSED_HEADERS,
            )
        self._app = Identified(guarded, self.metrics)

    async def start(self) -> None:
        """Make ready to fetch pictures."""
        await self._preparation.start()

    async def close(self) -> None:
        """Let go of connections and of pictures that were kept."""
        await self._preparation.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self._app(scope, receive, send)


class _Named:
    """Notes which route was taken, and over which connection a valid key came.

    Metrics and logs name the route rather than the path that a client wrote.
    """

    def __init__(self, path: str, app: ASGIApp) -> None:
        self._path = path
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ROUTE] = self._path
        if scope[SALT] and CONNECTION in scope:
            scope[CONNECTION].vouch()
        await self._app(scope, receive, send)


def _routes(chat: ASGIApp, endpoints: Endpoints) -> list[Route]:
    return [
        Route("/v1/chat/completions", _Named("/v1/chat/completions", chat), methods=["POST"]),
        _route("GET", "/v1/models", endpoints.models),
        _route("GET", "/v1/models/{model:path}", endpoints.model),
        _route("POST", "/tokenize", endpoints.tokenize),
        _route("POST", "/detokenize", endpoints.detokenize),
        _route("GET", "/live", endpoints.live),
        _route("GET", "/ready", endpoints.ready),
        _route("GET", "/health", endpoints.ready),
        _route("GET", "/metrics", endpoints.show_metrics),
        _route("GET", "/version", endpoints.version),
        _route("GET", "/openapi.json", endpoints.openapi),
    ]


def _route(method: str, path: str, endpoint: Callable[[Request], Awaitable[Response]]) -> Route:
    return Route(path, _Named(path, request_response(endpoint)), methods=[method])
