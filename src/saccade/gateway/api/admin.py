"""The operator's port: a second listener on loopback, with its own keys, for commands that no tenant may give."""

from collections.abc import Awaitable, Callable, Collection

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from saccade.errors import StartupError, WorkerUnavailable
from saccade.gateway.api.routes import route
from saccade.gateway.fleet.cache_listener import CacheView
from saccade.gateway.fleet.route_report import RouteReport
from saccade.gateway.fleet.worker_report import worker_report
from saccade.gateway.fleet.workers import Fleet
from saccade.gateway.group.siblings import Siblings, booked_together
from saccade.gateway.http.access_log import AccessLog
from saccade.gateway.http.auth import Keys
from saccade.gateway.http.middleware import GuardMiddleware, TelemetryMiddleware
from saccade.gateway.http.web_pages import WebPages
from saccade.telemetry import Metrics

HOST = "127.0.0.1"
TENANT_HEADER = "x-api-key"

Preview = Callable[[Scope, Receive, bytes], Awaitable[RouteReport]]
"""Tells where the chat in a request would go if the tenant with an API key sent it; b"" names no key."""


class Admin:
    """An ASGI application that shows workers and routes, and empties caches. Every path needs one of *keys*.

    *listener* knows what the workers of *fleet* hold; *preview* tells where a chat would go; *forget_media* empties the
    caches of the gateway. *siblings* are the processes that share the port. Raises StartupError where there is no key.
    """

    def __init__(
        self,
        keys: Collection[str],
        fleet: Fleet,
        listener: CacheView,
        preview: Preview,
        forget_media: Callable[[], None],
        metrics: Metrics,
        access_log: AccessLog | None = None,
        siblings: Siblings | None = None,
    ) -> None:
        if not keys:
            raise StartupError("--admin-port needs an --admin-key.")
        self._fleet = fleet
        self._listener = listener
        self._preview = preview
        self._forget_media = forget_media
        self._siblings = siblings
        router = Router(
            [
                route("GET", "/workers", self.workers),
                route("POST", "/route", self.route, takes_json=True),
                route("POST", "/reset_prefix_cache", self.reset_prefix_cache),
                route("POST", "/reset_mm_cache", self.reset_mm_cache),
            ],
            redirect_slashes=False,
        )
        guarded = GuardMiddleware(router, Keys(keys), WebPages((), (), keyless=False))
        self._app = TelemetryMiddleware(guarded, metrics, access_log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def workers(self, request: Request) -> Response:
        """GET /workers: each worker's health and load, what is known of its caches, and what is booked there.

        The booked work is that of all processes that share the port; the breaker is this process's.
        """
        reports = [worker_report(worker, self._fleet, self._listener) for worker in self._fleet.clients]
        if self._siblings is not None:
            works = await self._siblings.works()
            reports = [msgspec.structs.replace(report, booked=booked_together(works, report.url)) for report in reports]
        return _json({"workers": reports})

    async def route(self, request: Request) -> Response:
        """POST /route: where the chat in the body would go now, and why. It is not sent there.

        The header x-api-key names the tenant whose caches count; it may be left out where the gateway has no API keys.
        """
        api_key = request.headers.get(TENANT_HEADER, "").encode()
        return _json(await self._preview(request.scope, request.receive, api_key))

    async def reset_prefix_cache(self, request: Request) -> Response:
        """POST /reset_prefix_cache: the workers drop every KV block that no running request uses."""
        return self._reset(prefix=True)

    async def reset_mm_cache(self, request: Request) -> Response:
        """POST /reset_mm_cache: the gateway drops pictures and URLs, the workers encodings that no request uses."""
        missed = []
        if self._siblings is None:
            self._forget_media()
        else:
            missed = await self._siblings.forget_media()
        answer = self._reset(media=True)
        if missed:
            raise WorkerUnavailable(
                f"These gateway processes did not take the command: {', '.join(missed)}; the others did. Send it again."
            )
        return answer

    def _reset(self, *, prefix: bool = False, media: bool = False) -> Response:
        """Send the command; requests that the gateway sends later find the caches empty."""
        missed = self._fleet.reset_caches(prefix=prefix, media=media)
        if missed:
            raise WorkerUnavailable(f"These workers did not take the command: {', '.join(missed)}; the others did.")
        return Response()


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
