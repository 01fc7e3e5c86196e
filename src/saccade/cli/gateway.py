"""`saccade gateway`: an HTTP server for workers that run elsewhere.

With --gateway-processes over 1, several gateways share a port, and an index that one more process keeps.
"""

import asyncio
import contextlib
import dataclasses
import logging
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import uvloop
from cyclopts import Group, Parameter

from saccade import config
from saccade.cli import exit_codes
from saccade.cli.flags import MEDIA, SERVER, LogLevel, check_server_files, default_name, is_ready
from saccade.cli.worker_access import WORKER_ACCESS, WorkerAccess
from saccade.config import Many
from saccade.errors import StartupError
from saccade.fleet.address import check_url
from saccade.fleet.pool import WorkerPool
from saccade.fleet.settings import NO_SOURCES, RoutingSettings, SourceConfig
from saccade.fleet.sources import check_dns_url
from saccade.fleet.traffic_file import TrafficFile
from saccade.gateway import app, siblings
from saccade.gateway.admin import HOST
from saccade.gateway.app import reserve
from saccade.gateway.config import INDEXER, GatewayConfig, MediaSettings, Member, ServerSettings
from saccade.gateway.served_models.model_probe import ModelProbe
from saccade.log_setup import configure_logging
from saccade.models.files import read_chat_template, read_model_files, with_chat_template
from saccade.private_folder import private_folder
from saccade.protocol.description import ModelFiles
from saccade.supervisor.checkpoint import resolve_model
from saccade.supervisor.tree import ChildSpec, Tree, until
from saccade.transport.credentials import WorkerCredentials

STOP_SECONDS = 5.0
"""Time that a process may take to end after its drain."""


ROUTING = RoutingSettings()


@Parameter(name="*", show=False)
@dataclass(frozen=True)
class MemberFlags:
    """The flags that a parent passes: `saccade serve`, or the supervisor of several gateway processes.

    *group_member* is a gateway's number or `indexer`, and empty if there is only one process. With *request_lines*,
    each request gets a short line on the terminal.
    """

    group_member: str = ""
    group_size: int = 1
    group_folder: Path | None = None
    request_lines: bool = False

    @property
    def is_indexer(self) -> bool:
        return self.group_member == INDEXER

    def member(self) -> Member | None:
        """Return which of several processes this is, or None if it is the only one. Raises StartupError."""
        if not self.group_member:
            return None
        if self.group_folder is None or not (self.is_indexer or self.group_member.isdecimal()):
            raise StartupError("--group-member is set by Saccade itself; use --gateway-processes.")
        return Member(self.group_folder, 0 if self.is_indexer else int(self.group_member), self.group_size)


MEMBER_FLAGS = MemberFlags()


@Parameter(name="*", group=Group("Workers", sort_key=2))
@dataclass(frozen=True)
class WorkerFlags:
    """Where workers come from, and the gateway's credentials for Saccade and vLLM workers over TCP."""

    worker_access: WorkerAccess = WORKER_ACCESS
    sources: SourceConfig = NO_SOURCES

    def credentials(self, urls: tuple[str, ...]) -> WorkerCredentials:
        """Return the credentials. Raises StartupError if a file is wrong, or if no worker can use the TLS flags."""
        return self.worker_access.credentials(urls if self.sources.file is None else ())


WORKER_FLAGS = WorkerFlags()


def gateway(
    *,
    worker_url: Many = (),
    workers: WorkerFlags = WORKER_FLAGS,
    routing: RoutingSettings = ROUTING,
    model: Many = (),
    server: ServerSettings = SERVER,
    media: MediaSettings = MEDIA,
    log_level: LogLevel = "INFO",
    group: MemberFlags = MEMBER_FLAGS,
) -> int:
    """Serve the OpenAI API over workers that run elsewhere.

    Parameters
    ----------
    worker_url
        A worker: unix:/path, grpc://host:port, grpcs://host:port with TLS; tokenspeed://host:port for a TokenSpeed
        worker; sglang://host:port for an SGLang worker, with ?prefill=host:port at its end if it only decodes;
        vllm://host:port or vllms://host:port with TLS for a vLLM server, with ?ranks=N at its end if it has N
        data-parallel ranks. May be given many times.
    model
        Files of a served model, a folder in hub layout or a hub id, instead of those that its workers send; as
        NAME=MODEL if the workers have another name for it. May be given many times.
    log_level
        The least level that is logged.
    """
    sources = workers.sources
    for url in sources.dns:
        check_dns_url(url)
    if not (worker_url or sources or server.admin_port):
        raise StartupError(
            "A gateway needs a --worker-url such as grpc://HOST:PORT, or --workers-file, --worker-dns or --admin-port."
        )
    if server.gateway_processes > 1 and not (worker_url or sources):
        raise StartupError("--gateway-processes over 1 needs a --worker-url, or --workers-file or --worker-dns.")
    for url in worker_url:
        check_url(url)
    if sources.traffic_file is not None:
        TrafficFile(sources.traffic_file).create()
    check_server_files(server)
    credentials = workers.credentials(worker_url)
    logs = configure_logging(logging.getLevelNamesMapping()[log_level], serves_clients=True)
    logs = dataclasses.replace(logs, has_short_lines=group.request_lines)
    template = read_chat_template(server.chat_template)
    models = dict(_model_files(one, template) for one in model)
    if server.gateway_processes > 1:
        arguments = [word for url in worker_url for word in ("--worker-url", url)]
        arguments += [word for one in model for word in ("--model", one)]
        arguments += [word for flags in (workers, routing, media) for word in config.to_arguments(flags)]
        arguments += ["--log-level", log_level, *(["--request-lines"] if group.request_lines else [])]
        return _run_several(server, arguments)
    member = group.member()
    if member is not None and group.is_indexer:
        # The indexer sends no request, and so holds no slot.
        worker_pool = WorkerPool((), lambda _: None, model_files=models, credentials=credentials)
        uvloop.run(siblings.serve_index(worker_pool, member.indexer, worker_url, sources, routing.routing_index_bytes))
        return 0
    gateway_config = GatewayConfig(
        **(vars(server) | vars(media) | vars(routing)),
        worker_urls=worker_url,
        worker_credentials=credentials,
        worker_sources=sources,
    )
    uvloop.run(app.serve(gateway_config if member is None else gateway_config.shared(member), models, logs))
    return 0


def _model_files(model: str, template: bytes | None) -> tuple[str, ModelFiles]:
    """Return a model's name and files, with *template* if it is not None.

    Raises StartupError if the files are wrong, before the first request.
    """
    name, _, source = model.rpartition("=")
    folder = resolve_model(source, weights=False)
    name = name or default_name(source, folder)
    files = with_chat_template(read_model_files(folder), template)
    ModelProbe(name, files).run_child()
    return name, files


def _run_several(server: ServerSettings, arguments: list[str]) -> int:
    """Run several gateway processes until a signal; return the exit code. Raises StartupError.

    *arguments* are the flags of each process, without those of *server*.
    """
    if not hasattr(socket, "SO_REUSEPORT") or not sys.platform.startswith("linux"):
        raise StartupError(
            "--gateway-processes over 1 needs Linux, whose kernel spreads connections over processes that share a port."
        )
    with contextlib.ExitStack() as stack:
        # The ports are reserved for the processes, so that a port in use is reported once.
        stack.enter_context(reserve(server.host, server.port))
        if server.admin_port is not None:
            stack.enter_context(reserve(HOST, server.admin_port, "--admin-port"))
        folder = stack.enter_context(private_folder("saccade-gateways-"))
        specs = _child_specs(server, arguments, folder)
        return asyncio.run(Tree(specs, lambda: until(lambda: is_ready(server))).run())


def _child_specs(server: ServerSettings, arguments: list[str], folder: Path) -> tuple[ChildSpec, ...]:
    """Return the gateway processes, which drain concurrently, and the indexer, which ends after them."""
    own = dataclasses.replace(server, gateway_processes=1)

    def spec(name: str, member: str, *, ends_with_previous: bool) -> ChildSpec:
        flags = MemberFlags(member, server.gateway_processes, folder)
        command, environment = config.program("gateway", *arguments, settings=(own, flags))
        return ChildSpec(
            name=name,
            command=command,
            stop_seconds=server.shutdown_timeout_seconds + STOP_SECONDS,
            environment=environment,
            error_codes=exit_codes.WITH_MESSAGE,
            ends_with_previous=ends_with_previous,
            beats_at=sockets[member],
        )

    first, numbers = Member(folder, 0, server.gateway_processes), range(server.gateway_processes)
    sockets = {INDEXER: first.indexer} | {str(one): dataclasses.replace(first, number=one).own for one in numbers}
    gateways = [spec(f"gateway process {one}", str(one), ends_with_previous=True) for one in numbers]
    return (*gateways, spec(INDEXER, INDEXER, ends_with_previous=False))
