"""Middleware: gives every request an id and an account, and turns every failure into an error response.

Each part is an ASGI application around the next; the outermost comes first:

    TelemetryMiddleware     removes a slash at the end of the path, gives the request an id, logs and counts it
    (CORS)                  Starlette's, if origins are allowed
    GuardMiddleware         checks the request's origin and key, turns errors into responses
    NamedRoute              names the route, inside Starlette's router
"""

import asyncio
import difflib
import re
import secrets
import time
from collections.abc import Awaitable, Iterator

import structlog
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saccade.errors import (
    Draining,
    InternalError,
    InvalidApiKey,
    InvalidValue,
    MethodNotAllowed,
    RateLimitExceeded,
    RouteNotFound,
    SaccadeError,
    StartupError,
    UnsupportedContentEncoding,
)
from saccade.gateway.config import ServerSettings
from saccade.gateway.server.access_keys import MESSAGES_PATH, METRICS_PATH, Keys
from saccade.gateway.server.access_log import NO_ROUTE, POLLED, PROBES, AccessLog, span_attributes
from saccade.gateway.server.body import ClientDisconnected
from saccade.gateway.server.connection import CONNECTION
from saccade.gateway.server.content_coding import ACCEPTED
from saccade.gateway.server.errors import UNFORESEEN, drop_tracebacks, encode_error, encode_messages_error, send_json
from saccade.gateway.server.origins import AllowedOrigins, check_json
from saccade.gateway.tenants.account import ACCOUNT, Account
from saccade.gateway.tenants.api_keys import ApiKeyStore
from saccade.telemetry import Metrics
from saccade.tracing.tracer import Tracer

MAX_NEAR_CHARACTERS = 64
"""A longer path is no misspelt route."""

PAGE_PATHS = frozenset({"/", "/docs"})
"""Paths of the page for browsers, which contains nothing of the server's."""


REQUEST_ID = "saccade.request_id"
ROUTE = "saccade.route"
"""Keys of the ASGI scope that the middleware sets."""

WARNINGS = "saccade.warnings"
"""Key of the ASGI scope for the warning about parameters without effect."""

LIMIT_HEADERS = tuple(
    f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")
)
EXPOSED_HEADERS = ("x-request-id", "retry-after", "x-saccade-warning", *LIMIT_HEADERS)
RETRY_AFTER_SECONDS = 1
CLIENT_CLOSED = 499
"""Logged if a client disconnected before its answer began; never sent."""

_REQUEST_ID_FORM = re.compile(rb"[\x21-\x7e]{1,128}")
_logger = structlog.get_logger(__name__)


class TelemetryMiddleware:
    """Gives every request an id (the client's x-request-id if it is well formed), and logs, counts and traces it.

    It removes a slash at the end of a path, so that keys, origins, routes and logs all see one path.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, access_log: AccessLog, tracer: Tracer | None = None) -> None:
        self._app = app
        self._metrics = metrics
        self._access_log = access_log
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        scope["path"] = _without_slash(scope["path"])
        request_id = _request_id(scope)
        scope[REQUEST_ID] = request_id
        status = CLIENT_CLOSED

        async def send_identified(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                if scope["path"].startswith(MESSAGES_PATH):
                    message["headers"].append((b"request-id", request_id.encode()))  # what Anthropic's clients read
                if warning := scope.get(WARNINGS):
                    message["headers"].append((b"x-saccade-warning", warning.encode()))
            await send(message)

        start = time.perf_counter()
        # Every request has its own task, so nothing needs to be unbound.
        structlog.contextvars.bind_contextvars(request_id=request_id)
        line = self._access_log.begin_line(request_id, scope["method"], status)
        trace = None
        if self._tracer is not None and scope["path"] not in POLLED:
            trace = self._tracer.begin_trace(scope["headers"])
        try:
            await self._app(scope, receive, send_identified)
        finally:
            route = scope.get(ROUTE, NO_ROUTE)
            self._metrics.requests_total.labels(route, str(status)).inc()
            line.route = route
            line.status = status
            line.seconds = round(time.perf_counter() - start, 4)
            line.is_warned = bool(scope.get(WARNINGS))
            if (account := scope.get(ACCOUNT)) is not None:
                line.tenant = account.tenant.name
            self._access_log.end_line(line)
            if self._tracer is not None and trace is not None:
                has_failed = line.status >= 500 or (line.status == 200 and line.code is not None)
                self._tracer.end_trace(trace, f"{line.method} {route}", span_attributes(line), has_failed=has_failed)


def guarded(
    app: ASGIApp,
    config: ServerSettings,
    api_keys: ApiKeyStore,
    metrics: Metrics,
    access_log: AccessLog,
    tracer: Tracer | None,
) -> ASGIApp:
    """Wrap *app* in all middleware, with CORS for the allowed origins."""
    hosts = (config.host, *config.allowed_hosts)
    origins = AllowedOrigins(config.allowed_origins, hosts, keyless=api_keys.is_open)
    open_paths = {METRICS_PATH} if config.metrics_without_key else set()
    keys = Keys(api_keys, open_paths | PAGE_PATHS if config.page else open_paths)
    app = GuardMiddleware(app, keys, origins)
    if config.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )
    app = TelemetryMiddleware(app, metrics, access_log, tracer)
    return below(config.root_path, app) if config.root_path else app


def below(root_path: str, app: ASGIApp) -> ASGIApp:
    """Wrap *app* so that it serves paths with and without the prefix *root_path*."""

    async def without_root(scope: Scope, receive: Receive, send: Send) -> None:
        scope["root_path"] = root_path
        if scope["path"].startswith(f"{root_path}/"):
            scope["path"] = scope["path"].removeprefix(root_path)
        await app(scope, receive, send)

    return without_root


class GuardMiddleware:
    """Checks path and raw headers, and turns every exception of the application into a response.

    PROBES pass unchecked. For all other paths it checks Host and Origin, then the key, and then routes the request.
    Response headers say what is left of the tenant's limits.
    """

    def __init__(self, app: ASGIApp, keys: Keys, web_pages: AllowedOrigins) -> None:
        self._app = app
        self._keys = keys
        self._web_pages = web_pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; an error becomes a response unless the response has begun."""
        started = False
        headers: dict[str, str] = {}

        async def send_watched(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), *_limit_headers(scope)]
            await send(message)

        try:
            # Without an app in the scope, Starlette's router would answer unknown paths itself, in plain text.
            scope["app"] = self
            if scope["path"] not in PROBES:
                self._web_pages.check_request(scope["method"], scope["headers"])
            scope[ACCOUNT] = self._keys.account(scope["path"], scope["headers"])
            # Nothing waits between this and the charge, so what is drawn now is there for this request.
            await scope[ACCOUNT].prepare()
            await self._app(scope, receive, send_watched)
        except ClientDisconnected:
            return
        except asyncio.CancelledError:
            # Only a shutdown of the server cancels a whole request. Without this, uvicorn answers 500 in plain text.
            failure: SaccadeError = Draining("The server is shutting down and could not wait for this answer.")
        except Exception as error:
            failure = _failure(error, scope)
            if isinstance(failure, MethodNotAllowed):
                headers["allow"] = ", ".join(_allowed_methods(scope))
            drop_tracebacks(error)
        else:
            return
        is_messages = scope["path"].startswith(MESSAGES_PATH)
        body = encode_messages_error(failure) if is_messages else encode_error(failure)
        if not started:
            await send_json(send_watched, failure.status, body, headers | _headers(failure))


class NamedRoute:
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
            scope[CONNECTION].mark_authenticated(scope[ACCOUNT].tenant.id)
        if self._takes_json:
            check_json(scope["headers"])
        return self._app(scope, receive, send)


def _without_slash(path: str) -> str:
    """Return *path* without the single slash that some clients write at its end; two slashes stay."""
    return path[:-1] if path.endswith("/") and len(path) > 1 and path[-2] != "/" else path


def _request_id(scope: Scope) -> str:
    request_id: bytes = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return request_id.decode() if _REQUEST_ID_FORM.fullmatch(request_id) else secrets.token_hex(16)


def _failure(error: Exception, scope: Scope) -> SaccadeError:
    match error:
        case SaccadeError():
            return error
        case HTTPException():
            return _routing_failure(error, scope)
        case _:
            _logger.exception("unforeseen error")
            return InternalError(UNFORESEEN)


def _routing_failure(error: HTTPException, scope: Scope) -> SaccadeError:
    match error.status_code:
        case 404:
            hint = _hint(scope["path"], scope.get("router"))
            return RouteNotFound(f"There is no {scope['path']} here{hint or '.'}", reason="There is no such path here.")
        case 405:
            method = scope["method"]
            return MethodNotAllowed(f"{scope['path']} does not take {method}.", reason=f"It does not take {method}.")
        case _:
            return InvalidValue("The request could not be read.")


def _allowed_methods(scope: Scope) -> list[str]:
    """Return the methods of all routes with the path in *scope*, since each route knows only its own."""
    router: Router = scope["router"]
    routes = [
        route for route in router.routes if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE
    ]
    return sorted({method for route in routes for method in route.methods or ()})


def _hint(path: str, router: Router | None) -> str:
    """Return a hint for the error about an unknown *path*, or "" if *router* has nothing similar."""
    if path.startswith("/api/"):
        return (
            ": Ollama's API is not served. Send chats to /v1/chat/completions, and list the models by GET /v1/models."
        )
    routes = [] if router is None else [route.path for route in router.routes if isinstance(route, Route)]
    near = difflib.get_close_matches(path[:MAX_NEAR_CHARACTERS], routes, 1, cutoff=0.8)
    return f"; did you mean {near[0]}?" if near and "{" not in near[0] else ""


def _limit_headers(scope: Scope) -> Iterator[tuple[bytes, bytes]]:
    account: Account | None = scope.get(ACCOUNT)
    return iter(()) if account is None else account.headers()


def _headers(error: SaccadeError) -> dict[str, str]:
    if isinstance(error, InvalidApiKey):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, UnsupportedContentEncoding):
        return {"accept-encoding": ACCEPTED}
    if isinstance(error, RateLimitExceeded):
        return {"retry-after": str(error.retry_after_seconds)}
    if error.status in (429, 503):
        return {"retry-after": str(RETRY_AFTER_SECONDS)}
    # OpenAI clients retry a 500, and this error would occur again.
    if isinstance(error, InternalError | StartupError):
        return {"x-should-retry": "false"}
    return {}
