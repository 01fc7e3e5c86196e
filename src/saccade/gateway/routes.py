"""The gateway as one ASGI application: its parts, put together, and the paths that lead to them."""

from collections.abc import Awaitable, Callable, Mapping

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router, request_response
from starlette.types import ASGIApp, Receive, Scope, Send

from saccade.gateway.admission import Admission
from saccade.gateway.border import ROUTE, Guarded, Identified, announced_bytes
from saccade.gateway.catalogue import Catalogue
from saccade.gateway.chat import ChatCompletions
from saccade.gateway.config import GatewayConfig
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
        self.admission = Admission(config.max_requests, config.max_pixel_bytes)
        self.metrics.requests_in_flight.set_function(lambda: self.admission.num_requests)
        catalogue = Catalogue(fleet, models)
        self._preparation = Preparation(config, pool, self.metrics)
        preparer = self._preparation.preparer
        endpoints = Endpoints(
            self.admission, catalogue, preparer, self.metrics, config.max_body_bytes, config.strict_parameters
        )
        chat = ChatCompletions(
            admission=self.admission,
            catalogue=catalogue,
            preparer=preparer,
            dispatcher=Dispatcher(fleet),
            metrics=self.metrics,
            max_body_bytes=config.max_body_bytes,
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
        if scope["type"] == "http":
            await self.admission.start(announced_bytes(scope))
        await self._app(scope, receive, send)


class _Named:
    """Notes which route was taken: metrics and logs name it rather than the path that a client wrote."""

    def __init__(self, path: str, app: ASGIApp) -> None:
        self._path = path
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ROUTE] = self._path
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
