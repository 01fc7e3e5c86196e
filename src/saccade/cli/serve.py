"""`saccade serve`: one gateway and one worker on this machine, or several workers of the same model."""

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from saccade import config
from saccade.cli import exit_codes
from saccade.cli.bundled import bundled
from saccade.cli.copies import workers_of_copies
from saccade.cli.flags import (
    ENGINE,
    MEDIA,
    SERVER,
    LogLevel,
    check_server_files,
    check_without_model,
    is_ready,
    model_folder,
    served_names,
)
from saccade.cli.screen import (
    REMOTE_CODE,
    ask_command,
    curl,
    open_host,
    shared_memory_problem,
    show_summary,
    takes_images,
    warn,
)
from saccade.cli.torch_build import installed_torch, unused_cuda
from saccade.connectors.native.client import WorkerClient
from saccade.consoles import new_console
from saccade.engine.config import EngineSettings
from saccade.engine.installed import require_engine
from saccade.gateway.config import MediaSettings, ServerSettings
from saccade.gateway.served_models.model_probe import ModelProbe
from saccade.llm.serving import api_url, reachable
from saccade.log_setup import configure_logging
from saccade.models.files import read_chat_template, read_model_files, with_chat_template, with_overrides
from saccade.private_folder import private_folder
from saccade.protocol.description import Description
from saccade.supervisor.tree import ChildSpec, Tree, until
from saccade.transport import shared_memory


def serve(
    model: str | None = None,
    *,
    server: ServerSettings = SERVER,
    engine: EngineSettings = ENGINE,
    media: MediaSettings = MEDIA,
    log_level: LogLevel = "WARNING",
    data_parallel_size: Annotated[config.Count, Parameter(name=("--data-parallel-size", "-dp"))] = 1,
    summary: Annotated[bool, Parameter(show=False)] = True,
) -> int:
    """Serve a model on this machine: one gateway, and a worker for each copy of the model.

    Parameters
    ----------
    model
        A folder in hub layout, or a hub id. Without it, the small model that ships with Saccade.
    log_level
        The least level that is logged.
    data_parallel_size
        Copies of the model, each with a worker of its own; they share out the GPUs, or the CPU's threads.
    """
    require_engine()
    console = new_console(stderr=True)
    warn(
        console,
        REMOTE_CODE if engine.trust_remote_code else None,
        unused_cuda(installed_torch()),
        open_host(server),
        shared_memory_problem(media.shared_memory_bytes),
    )
    check_server_files(server)
    check_without_model(engine)
    folder = model_folder(model, engine)
    names = served_names(model, folder, engine)
    # The worker reports errors in weights. Errors in files that only the gateway reads would be in the log only.
    template = read_chat_template(server.chat_template)
    files = with_overrides(
        *(read_model_files(folder), engine.hf_overrides, engine.override_generation_config, engine.generation_config),
        engine.model_impl,
    )
    ModelProbe(names[0], with_chat_template(files, template)).run_child()
    shared_memory.sweep()
    with private_folder("saccade-") as private:
        sockets = [private / f"worker-{index}.sock" for index in range(data_parallel_size)]
        # The worker gets a folder, so it needs no flags for a hub.
        named = dataclasses.replace(
            engine, served_model_name=names, trust_remote_code=False, revision=None, download_dir=None
        )
        workers = workers_of_copies(str(folder), sockets, named, log_level, server.shutdown_timeout_seconds)
        # Whoever starts a server on a terminal wants to see its requests.
        request_lines = summary and log_level == "WARNING" and console.is_terminal
        specs = (_gateway(sockets, server, media, log_level, request_lines), *workers)
        configure_logging(logging.getLevelNamesMapping()[log_level])
        return asyncio.run(_run(specs, sockets, server, media, console if summary else None))


def _gateway(
    sockets: Sequence[Path], server: ServerSettings, media: MediaSettings, log_level: str, request_lines: bool
) -> ChildSpec:
    workers = [word for socket in sockets for word in ("--worker-url", f"unix:{socket}")]
    words = ("gateway", *workers, "--log-level", log_level)
    lines = ["--request-lines"] if request_lines else []
    command, environment = config.program(*words, *lines, settings=(server, media))
    return ChildSpec(
        name="gateway",
        command=command,
        environment=environment,
        # Several gateway processes end one after the other only after their drain: processes, then their indexer.
        stop_seconds=server.shutdown_timeout_seconds + 5.0 * (1 if server.gateway_processes == 1 else 4),
        error_codes=exit_codes.WITH_MESSAGE,
    )


async def _run(
    specs: tuple[ChildSpec, ...],
    sockets: Sequence[Path],
    server: ServerSettings,
    media: MediaSettings,
    console: Console | None,
) -> int:
    async def until_ready() -> None:
        descriptions = [await _description_of(socket) for socket in sockets]
        await until(lambda: is_ready(server))
        if console is not None and descriptions[0] is not None:
            images = sorted(bundled("images").glob("texts/*.png"))
            image = images[0] if takes_images(descriptions[0]) else None
            url = api_url("localhost" if server.uds else reachable(server.host), server)
            commands = [curl(url, descriptions[0].model, image, server)]
            if url.startswith("http:") and server.uds is None:
                commands.insert(0, ask_command(url, image))
            address = api_url(server.host, server) if server.uds is None else f"unix:{server.uds}"
            if server.page and server.uds is None:
                address += f", and a page for browsers at {url.removesuffix('v1')}"
            show_summary(console, descriptions[0], address, commands, len(sockets), media)

    return await Tree(specs, until_ready).run()


async def _description_of(socket: Path) -> Description | None:
    """Return the description of the worker at *socket*, once it is ready."""
    worker = WorkerClient(f"unix:{socket}")

    async def is_ready_now() -> bool:
        return worker.ready

    await worker.start()
    try:
        await until(is_ready_now)
        return worker.description
    finally:
        await worker.close()
