"""`saccade worker`: an engine and its gRPC server, for gateways that run elsewhere."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import uvloop
from cyclopts import Group, Parameter
from cyclopts.validators import Number
from rich.console import Console

from saccade.cli.flags import ENGINE, LogLevel, check_without_model, engine_config, model_folder
from saccade.cli.screen import REMOTE_CODE, StartProgress, show_summary, warn
from saccade.cli.torch_build import installed_torch, unused_cuda
from saccade.consoles import new_console
from saccade.engine.config import EngineSettings, SplitSettings
from saccade.engine.installed import require_engine
from saccade.errors import StartupError
from saccade.log_setup import configure_logging
from saccade.processes.parent_socket import ParentSocket, Serving
from saccade.tracing.tracer import NO_TRACES, TraceSettings
from saccade.transport import lasting_task, private_sockets, shared_memory
from saccade.transport.access import Access
from saccade.transport.credentials import read_authorities, read_identity, read_token
from saccade.worker.engine_process import Timeouts
from saccade.worker.service import WorkerConfig, WorkerFront
from saccade.worker.tokenspeed.port import TokenSpeedPort

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 9000

Uids = Annotated[tuple[int, ...], Parameter(negative="", show_default=False)]


SPLIT = SplitSettings()


@Parameter(name="*", group=Group("Access", sort_key=1))
@dataclass(frozen=True)
class AccessFlags:
    """Address and access of the gRPC server."""

    host: str | None = None
    "Listen over TCP on this address, 127.0.0.1 with --port alone; without either, on this user's Unix socket."
    port: Annotated[int | None, Parameter(validator=Number(gte=0, lte=65535))] = None
    "Listen over TCP on this port, 9000 with --host alone; 0 takes any free one."
    uds: Path | None = None
    "Listen on this Unix socket; a missing folder is created."
    allowed_uids: Uids = ()
    "A user that may connect to the socket, in addition to its owner and root; may be given many times. Needs --uds."
    worker_token_file: Path | None = None
    "A file with the token that gateways must send over TCP; only its owner and group may be able to read it."
    tls_cert: Path | None = None
    "The worker's certificate for TLS, PEM."
    tls_key: Path | None = None
    "The key of --tls-cert, PEM."
    tls_client_ca: Path | None = None
    "Require a certificate of this authority from gateways, PEM."
    kv_events_token_ids: Annotated[bool, Parameter(negative="")] = False
    "Include the token ids of blocks, which are the prompts, in the feed of cache events."
    serve_tokenspeed: str | None = None
    "Serve SMG gateways too, over TokenSpeed's wire at this HOST:PORT; cache events there need --kv-events-token-ids."
    serve_tokenspeed_to_anyone: Annotated[bool, Parameter(negative="")] = False
    "Allow --serve-tokenspeed at an address that other machines can reach, although this wire has no credentials."
    tracing: TraceSettings = NO_TRACES

    def bind(self) -> str:
        """Return `host:port` or `unix:/path`. Raises StartupError."""
        over_tcp = self.host is not None or self.port is not None
        if self.uds is not None and over_tcp:
            raise StartupError("A worker listens on --uds, or on --host and --port: pass one of them.")
        if over_tcp:
            host = self.host or DEFAULT_HOST
            port = DEFAULT_PORT if self.port is None else self.port
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if self.uds is None and self.allowed_uids:
            raise StartupError(
                "--allowed-uids needs --uds: the default socket is in a folder that only this user can enter."
            )
        return f"unix:{self.uds or private_sockets.default_path()}"

    def access(self) -> Access:
        """Return the allowed callers. Raises StartupError if a file is wrong."""
        return Access(
            token=read_token(self.worker_token_file) if self.worker_token_file is not None else None,
            identity=read_identity(self.tls_cert, self.tls_key),
            client_authorities=read_authorities(self.tls_client_ca, "--tls-client-ca"),
            allowed_uids=self.allowed_uids,
        )

    def tokenspeed(self) -> TokenSpeedPort | None:
        """Return where TokenSpeed's wire is served, or None for nowhere. Raises StartupError."""
        if self.serve_tokenspeed is None:
            if self.tracing.endpoint is not None:
                raise StartupError(
                    "--otlp-traces-endpoint needs --serve-tokenspeed: Saccade's own gateways send the spans of workers."
                )
            if self.serve_tokenspeed_to_anyone:
                raise StartupError("--serve-tokenspeed-to-anyone needs --serve-tokenspeed HOST:PORT.")
            return None
        port = TokenSpeedPort(
            self.serve_tokenspeed, self.serve_tokenspeed_to_anyone, self.kv_events_token_ids, self.tracing
        )
        port.check()
        return port


ACCESS_FLAGS = AccessFlags()


def worker(
    model: str | None = None,
    *,
    access: AccessFlags = ACCESS_FLAGS,
    shutdown_timeout: Annotated[float, Parameter(validator=Number(gte=0))] = 30.0,
    split: SplitSettings = SPLIT,
    engine: EngineSettings = ENGINE,
    log_level: LogLevel = "INFO",
    summary: Annotated[bool, Parameter(show=False)] = True,
    parent_fd: Annotated[int | None, Parameter(show=False)] = None,
) -> None:
    """Serve a model to gateways: the engine and its gRPC front.

    Parameters
    ----------
    model
        A folder in hub layout, or a hub id. Without it, the small model that ships with Saccade.
    shutdown_timeout
        Seconds that running requests get to finish at shutdown; a second signal ends the worker immediately.
    log_level
        The least level that is logged.
    """
    parent = ParentSocket(parent_fd) if parent_fd is not None else None
    with parent.failures_reported() if parent is not None else contextlib.nullcontext():
        require_engine()
        console = new_console(stderr=True)
        if engine.trust_remote_code:
            warn(console, REMOTE_CODE)
        bind, transfer_bind, checked = access.bind(), split.bind(), access.access()
        checked.check(bind)
        tokenspeed = access.tokenspeed()
        if summary:  # else the parent prints it
            warn(console, unused_cuda(installed_torch()))
        check_without_model(engine)
        settings = engine_config(model, model_folder(model, engine), engine)
        settings = dataclasses.replace(
            settings,
            kv_events_token_ids=access.kv_events_token_ids,
            **(vars(split) | {"kv_transfer_bind": transfer_bind}),
        )
        settings.check()
        encoded = json.dumps(dataclasses.asdict(settings))
        command = (sys.executable, "-m", "saccade.engine", "--config", encoded, "--log-level", log_level)
        configure_logging(logging.getLevelNamesMapping()[log_level], serves_clients=True)
        timeouts = Timeouts(silence_seconds=engine.engine_silence)
        config = WorkerConfig(bind, command, timeouts, shutdown_timeout, checked, tokenspeed)
        uvloop.run(_serve(config, console, summary, parent))


async def _serve(config: WorkerConfig, console: Console, summary: bool, parent: ParentSocket | None) -> None:
    shared_memory.sweep()
    with StartProgress(console) as progress:
        served = WorkerFront(config, progress.show)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, served.stop)
        tasks = [asyncio.create_task(_announce(served, progress, console if summary else None, parent))]
        if parent is not None:
            tasks.append(asyncio.create_task(_stop_with(parent, served)))
        try:
            await served.run()
        finally:
            await lasting_task.end(*tasks)


async def _announce(
    served: WorkerFront, progress: StartProgress, console: Console | None, parent: ParentSocket | None
) -> None:
    description = await served.ready()
    progress.close()
    if console is not None:
        show_summary(console, description, served.server.address)
    if parent is not None:
        parent.report(Serving(served.server.address))


async def _stop_with(parent: ParentSocket, served: WorkerFront) -> None:
    await parent.until_closed()
    served.stop()
