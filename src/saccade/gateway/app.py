"""The gateway's way in: create_app() for an ASGI server, serve() for a whole process."""

import asyncio
import gc
import os
import socket
from collections.abc import Mapping
from functools import partial
from types import FrameType, MappingProxyType

import structlog
import uvicorn

from saccade.errors import StartupError
from saccade.gateway.config import GatewayConfig
from saccade.gateway.connection import Connections
from saccade.gateway.engine_metrics import FleetCollector
from saccade.gateway.media_pool import MediaPool
from saccade.gateway.routes import Application
from saccade.gateway.workers import Fleet
from saccade.protocol.description import ModelFiles

NONE_GIVEN: Mapping[str, ModelFiles] = MappingProxyType({})
BACKLOG = 2048
ABORT_SECONDS = 2
"""What requests that outlived the drain get to clean up after themselves."""

COLLECTOR_THRESHOLDS = (10_000, 20, 50)
"""Fewer collections than Python's own: of what requests leave, almost nothing needs one."""

_logger = structlog.get_logger(__name__)


def create_app(
    config: GatewayConfig, fleet: Fleet, pool: MediaPool, models: Mapping[str, ModelFiles] = NONE_GIVEN
) -> Application:
    """Return the ASGI application. Call within a running event loop; start and close *fleet* and *pool* around it.

    *models* are files that stand in, by the model's name, for those that its workers send.
    """
    application = Application(config, fleet, pool, models)
    application.metrics.registry.register(FleetCollector(fleet))
    return application


async def serve(config: GatewayConfig, models: Mapping[str, ModelFiles] = NONE_GIVEN) -> None:
    """Serve until SIGTERM or SIGINT, then drain: running requests finish, new ones get 503, /ready too.

    A second signal ends it at once. Raises StartupError where the address is taken or a setting is wrong.
    """
    listener = listen(config.host, config.port)
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    pool = MediaPool(config.media)
    await pool.start()
    fleet = Fleet(config.worker_urls, pool.release, partial(pool.release, reusable=False), models)
    app = create_app(config, fleet, pool, models)
    lag = asyncio.create_task(app.metrics.watch_event_loop(), name="event loop lag")
    await app.start()
    await fleet.start()
    try:
        host, port = listener.getsockname()[:2]
        _logger.info("gateway listens", host=host, port=port, workers=config.worker_urls)
        await _DrainingServer(app, config.shutdown_timeout_seconds).serve([listener])
    finally:
        lag.cancel()
        await fleet.close()
        await app.close()
        await pool.close()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on *host* and *port*, 0 for any free one. Raises StartupError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        number = error.errno if isinstance(error, OSError) else None
        cause = os.strerror(number) if number is not None and number > 0 else "there is no such host"
        raise StartupError(f"Cannot listen on {host}:{port}: {cause}. Choose another --host or --port.") from error


class _DrainingServer(uvicorn.Server):
    """uvicorn, but a signal drains first: the port stays open meanwhile, to answer 503."""

    def __init__(self, app: Application, shutdown_timeout_seconds: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connections(),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=ABORT_SECONDS,
            )
        )
        self._admission = app.admission
        self._shutdown_timeout_seconds = shutdown_timeout_seconds
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; at the second signal, stop."""
        self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain(), name="drain")
        else:
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        _logger.info("draining", requests=self._admission.num_requests)
        if not await self._admission.drain(self._shutdown_timeout_seconds):
            _logger.warning("aborting requests that outlived the drain", requests=self._admission.num_requests)
        self.should_exit = True
