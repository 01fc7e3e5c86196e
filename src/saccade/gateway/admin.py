"""The operator's own port: a second listener on loopback, with keys of its own, for what no tenant may do."""

from collections.abc import Callable, Collection

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from saccade.errors import StartupError, WorkerUnavailable
from saccade.gateway.access_log import AccessLog
from saccade.gateway.auth import Keys
from saccade.gateway.border import Guarded, Identified
from saccade.gateway.routes import route
from saccade.gateway.web_pages import WebPages
from saccade.gateway.workers import Fleet
from saccade.telemetry import Metrics

HOST = "127.0.0.1"


class Admin:
    """An ASGI application that empties caches. Everything on it asks for one of *keys*.

    *forget_media* empties those of the gateway itself. Raises StartupError where there is no key.
    """

    def __init__(
        self,
        keys: Collection[str],
        fleet: Fleet,
        forget_media: Callable[[], None],
        metrics: Metrics,
        access_log: AccessLog | None = None,
    ) -> None:
        if not keys:
            raise StartupError("--admin-port needs an --admin-key.")
        self._fleet = fleet
        self._forget_media = forget_media
        router = Router(
            [
                route("POST", "/reset_prefix_cache", self.reset_prefix_cache),
                route("POST", "/reset_mm_cache", self.reset_mm_cache),
            ],
            redirect_slashes=False,
        )
        guarded = Guarded(router, Keys(keys), WebPages((), (), keyless=False))
        self._app = Identified(guarded, metrics, access_log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self._app(scope, receive, send)

    async def reset_prefix_cache(self, request: Request) -> Response:
        """POST /reset_prefix_cache: the workers forget every KV block that no running request uses."""
        return self._reset(prefix=True)

    async def reset_mm_cache(self, request: Request) -> Response:
        """POST /reset_mm_cache: the gateway forgets pictures and URLs, the workers encodings that no request uses."""
        self._forget_media()
        return self._reset(media=True)

    def _reset(self, *, prefix: bool = False, media: bool = False) -> Response:
        """Send the command; what the gateway sends to a worker later finds the caches empty."""
        missed = self._fleet.reset_caches(prefix=prefix, media=media)
        if missed:
            raise WorkerUnavailable(f"These workers did not take the command: {', '.join(missed)}; the others did.")
        return Response()
