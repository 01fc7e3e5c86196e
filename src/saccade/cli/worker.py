"""`saccade worker`: the gRPC side by itself."""

import asyncio
import dataclasses
import json
import logging
import signal
import sys
from pathlib import Path
from typing import Annotated

import uvloop
from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console

from saccade.cli.flags import ENGINE_FLAGS, EngineFlags, LogLevel, engine_config
from saccade.cli.screen import StartProgress, show_summary, warn_of_remote_code, warn_of_unused_cuda
from saccade.supervisor.checkpoint import resolve_model
from saccade.telemetry import configure_logging
from saccade.transport import shared_memory
from saccade.worker.engine_process import Patience
from saccade.worker.service import Worker, WorkerConfig

DEFAULT_PORT = 9000


def worker(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = DEFAULT_PORT,
    uds: Path | None = None,
    shutdown_timeout: Annotated[float, Parameter(validator=Number(gte=0))] = 30.0,
    engine: EngineFlags = ENGINE_FLAGS,
    log_level: LogLevel = "INFO",
    summary: Annotated[bool, Parameter(show=False)] = True,
) -> None:
    """Serve a model to gateways: the engine and its gRPC front.

    Parameters
    ----------
    model
        A folder in hub layout, or a hub id.
    host
        Address to listen on. Gateways are not authenticated: open it to a network you trust only.
    port
        Port to listen on; 0 takes any free one.
    uds
        Listen on this Unix socket instead.
    shutdown_timeout
        Seconds that running requests get to finish at shutdown; a second signal ends it at once.
    log_level
        The least that is logged.
    """
    console = Console(stderr=True)
    if engine.trust_remote_code:
        warn_of_remote_code(console)
    if summary:  # else the parent has said it
        warn_of_unused_cuda(console)
    folder = resolve_model(model)
    settings = json.dumps(dataclasses.asdict(engine_config(model, folder, engine)))
    command = (sys.executable, "-m", "saccade.engine", "--config", settings, "--log-level", log_level)
    bind = f"unix:{uds}" if uds is not None else f"{host}:{port}"
    configure_logging(logging.getLevelNamesMapping()[log_level])
    config = WorkerConfig(bind, command, Patience(silence_seconds=engine.engine_silence), shutdown_timeout)
    uvloop.run(_serve(config, console, summary))


async def _serve(config: WorkerConfig, console: Console, summary: bool) -> None:
    shared_memory.sweep()
    with StartProgress(console) as progress:
        served = Worker(config, progress.show)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, served.stop)
        announcing = asyncio.create_task(_announce(served, progress, console if summary else None))
        try:
            await served.run()
        finally:
            announcing.cancel()


async def _announce(served: Worker, progress: StartProgress, console: Console | None) -> None:
    description = await served.ready()
    progress.close()
    if console is not None:
        show_summary(console, description, served.server.address)
