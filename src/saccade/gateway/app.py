"""The gateway's entry points: create_app() for an ASGI server, serve() for a whole process."""

import asyncio
import contextlib
import dataclasses
import gc
import os
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType, MappingProxyType

import structlog
import uvicorn
from prometheus_client import ProcessCollector
from starlette.types import ASGIApp

from saccade.errors import StartupError
from saccade.fleet.pool import WorkerPool
from saccade.fleet.sources import find_workers
from saccade.gateway.admin import HOST, Admin
from saccade.gateway.application import Application
from saccade.gateway.config import ConnectionLimits, GatewayConfig, tls_context
from saccade.gateway.images.decode_pool.pool import DecodePool
from saccade.gateway.malloc import give_back_large_blocks
from saccade.gateway.server.access_log import PROBES, AccessLog, LogMetrics, access_log
from saccade.gateway.server.connections import Connections, allow_descriptors
from saccade.log_writer import LogOutput
from saccade.protocol.description import ModelFiles
from saccade.transport import lasting_task, private_sockets

NONE_GIVEN: Mapping[str, ModelFiles] = MappingProxyType({})
BACKLOG = 2048
ADMIN_CONNECTIONS = ConnectionLimits(max_connections=32, max_per_address=33)
"""All come from one address, so the limit per address is higher: it would refuse instead of closing idle ones."""

SEND_BUFFER_BYTES = 256 << 10
"""The kernel's buffer for an answer that a client reads slowly; by default it would be megabytes."""

ABORT_SECONDS = 2
"""Time for requests that are still running after the drain to clean up."""

UNREADY_SECONDS = 20.0
"""How long a process of several keeps its port closed while no model can be served; then it answers 503."""

UNREADY_POLL_SECONDS = 0.05

COLLECTOR_THRESHOLDS = (10_000, 20, 50)
"""Fewer collections than by default: requests leave almost no reference cycles."""

_logger = structlog.get_logger(__name__)


def create_app(
    config: GatewayConfig,
    worker_pool: WorkerPool,
    pool: DecodePool,
    models: Mapping[str, ModelFiles] = NONE_GIVEN,
    logs: LogOutput | None = None,
) -> Application:
    """Return the ASGI application. Needs a running event loop; the caller starts and closes *worker_pool* and *pool*.

    *models* maps model names to files that replace the workers' own. *logs* gets a line for every request.
    """
    application = Application(config, worker_pool, pool, models, access_log(logs))
    registry = application.metrics.registry
    ProcessCollector(registry=registry)
    if logs is not None:
        registry.register(LogMetrics(logs))
    return application


async def serve(
    config: GatewayConfig, models: Mapping[str, ModelFiles] = NONE_GIVEN, logs: LogOutput | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then drain: running requests finish; new requests and /ready get 503.

    A second signal ends the server at once. Raises StartupError if the address is taken, if a setting is wrong, or if
    the fleet is fixed and none of its models can be served.
    """
    # A process of several has its ports reserved by its parent, and opens them when it can serve.
    listeners = None if config.member is not None else _listeners(config)
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    give_back_large_blocks()
    async with connected(config, models, logs) as app:
        lag = lasting_task.begin(app.metrics.watch_event_loop, "event loop lag")
        try:
            if listeners is None:
                await _until_settled(app)
            listener, admin_listener = listeners or _listeners(config)
            host, port = listener.getsockname()[:2] if config.uds is None else (str(config.uds), None)
            _logger.info("gateway listens", host=host, port=port, workers=config.worker_urls)
            async with administered(app, config.admin_keys, admin_listener, access_log(logs)):
                await DrainingServer(app, config).serve([listener])
                if config.has_fixed_fleet and _is_settled(app.model_registry.unservable):
                    raise app.model_registry.unservable.result()
        finally:
            if config.uds is not None:
                config.uds.unlink(missing_ok=True)
            lag.cancel()


@contextlib.asynccontextmanager
async def connected(
    config: GatewayConfig, models: Mapping[str, ModelFiles] = NONE_GIVEN, logs: LogOutput | None = None
) -> AsyncIterator[Application]:
    """Run a gateway, connected to its workers but without a port, while the block runs. Raises StartupError."""
    pool = DecodePool(config)
    await pool.start()
    discard = partial(pool.release, reusable=False)
    worker_pool = WorkerPool((), pool.release, discard, models, config.worker_credentials, config.assume_same_release)
    app = create_app(config, worker_pool, pool, models, logs)
    try:
        await app.start()
        await find_workers(app.routing.discovery, config.worker_urls, config.worker_sources)
        yield app
    finally:
        await app.routing.discovery.close()
        await worker_pool.close()
        await app.close()
        await pool.close()


def _is_settled(reason: asyncio.Future[StartupError]) -> bool:
    return reason.done() and not reason.cancelled()


def _listeners(config: GatewayConfig) -> tuple[socket.socket, socket.socket | None]:
    """Return the socket for the API, and the one for the admin port if there is one. Raises StartupError."""
    shares = config.member is not None
    listener = listen(config.host, config.port, shares=shares) if config.uds is None else listen_unix(config.uds)
    if config.admin_port is None:
        return listener, None
    return listener, listen(HOST, config.admin_port, "--admin-port", shares=shares)


async def _until_settled(app: Application) -> None:
    """Wait until a model can be served or it is clear that none ever can, but at most UNREADY_SECONDS.

    Without this wait, a process that has just restarted would answer 503 to requests that the others could serve.
    """
    registry = app.model_registry
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(UNREADY_SECONDS):
            while not registry.ready and not registry.unservable.done():  # noqa: ASYNC110
                await asyncio.sleep(UNREADY_POLL_SECONDS)


def listen(host: str, port: int, flags: str = "--host or --port", *, shares: bool = False) -> socket.socket:
    """Return a socket that listens on *host* and *port*; port 0 takes any free port.

    With *shares*, other processes of this user may listen there too if they also share; each connection goes to one of
    them. Raises a StartupError that names *flags*.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=shares)
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(host, port, flags, error) from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return listener


def listen_unix(path: Path) -> socket.socket:
    """Return a socket that listens at *path*, for this user only. It replaces a socket file that is not in use.

    Raises StartupError.
    """
    private_sockets.prepare_folder(path, ())
    try:
        if path.is_socket():
            path.unlink()
        listener = private_sockets.bound(path, ())
    except OSError as error:
        raise StartupError(f"Cannot listen on {path}: {error.strerror}. Choose another --uds.") from error
    listener.listen(BACKLOG)
    return listener


def reserve(host: str, port: int, flags: str = "--host or --port") -> socket.socket:
    """Return a socket that does not listen, but reserves *host* and *port* for the processes that will share them.

    Raises StartupError if that fails, for example because another program listens there, even one that would share.
    """
    listen(host, port, flags).close()
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        holder.bind((host, port))
    except OSError as error:
        holder.close()
        raise _cannot_listen(host, port, flags, error) from error
    return holder


def _cannot_listen(host: str, port: int, flags: str, error: Exception) -> StartupError:
    number = error.errno if isinstance(error, OSError) else None
    cause = os.strerror(number) if number is not None and number > 0 else "there is no such host"
    return StartupError(f"Cannot listen on {host}:{port}: {cause}. Choose another {flags}.")


@contextlib.asynccontextmanager
async def administered(
    app: Application, keys: tuple[str, ...], listener: socket.socket | None, log: AccessLog
) -> AsyncIterator[None]:
    """Serve the admin port on *listener*, unless it is None, while the block runs. Raises StartupError."""
    if listener is None:
        yield
        return
    server = _AdminServer(_settings(Admin(keys, app, log), Connections(ADMIN_CONNECTIONS)))
    serving = lasting_task.begin(lambda: server.serve([listener]), "admin port")
    try:
        yield
    finally:
        server.should_exit = True
        await serving


def _settings(app: ASGIApp, connections: Connections, tls: ssl.SSLContext | None = None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        ssl_context_factory=None if tls is None else lambda *_: tls,
        http=connections,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=ABORT_SECONDS,
    )


class _AdminServer(uvicorn.Server):
    """The process's second uvicorn server; it handles no signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains before it stops; meanwhile the port stays open, and new requests get 503."""

    def __init__(self, app: Application, config: GatewayConfig) -> None:
        num_connections = allow_descriptors(config.connections.max_connections)
        limits = dataclasses.replace(config.connection_limits, max_connections=num_connections)
        probes = PROBES.union(f"{config.root_path or ''}{path}" for path in PROBES)
        self._connections = Connections(limits, app.bodies.proxies.is_trusted, probes)
        app.memory.add_parts(self._connections.memory_part)
        super().__init__(_settings(app.asgi, self._connections, tls_context(config.tls)))
        self._admission = app.limits.admission
        self._shutdown_timeout_seconds = config.shutdown_timeout_seconds
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None
        if config.has_fixed_fleet:
            app.model_registry.unservable.add_done_callback(self._stop_if_unservable)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on *sockets*. A TLS handshake gets as much time as a request's head, instead of a minute."""
        if self.config.ssl is None:
            await super().startup(sockets)
            return
        await super().startup([])
        protocol = partial(self._connections, config=self.config, server_state=self.server_state, app_state={})
        self.servers = [
            await self._loop.create_server(
                protocol,
                sock=listener,
                ssl=self.config.ssl,
                ssl_handshake_timeout=self._connections.limits.head_seconds,
                ssl_shutdown_timeout=self._connections.limits.drain_seconds,
            )
            for listener in sockets or ()
        ]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start to drain at the first signal, and stop at the second."""
        self._loop.call_soon_threadsafe(self._begin)

    def _stop_if_unservable(self, reason: asyncio.Future[StartupError]) -> None:
        """Stop a server that has served nothing and never can."""
        self.should_exit = self.should_exit or not reason.cancelled()

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
