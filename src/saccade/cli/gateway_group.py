"""The processes of `saccade gateway --gateway-processes N`: N gateways that share a port, and an indexer."""

import asyncio
import contextlib
import dataclasses
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from saccade import config
from saccade.cli import exit_codes
from saccade.cli.flags import is_ready
from saccade.errors import StartupError
from saccade.gateway.admin import HOST
from saccade.gateway.app import reserve
from saccade.gateway.config import INDEXER, Member, ServerSettings
from saccade.supervisor.tree import ChildSpec, Tree, until

STOP_SECONDS = 5.0
"""Time that a process may take to end after its drain."""


@Parameter(name="*", show=False)
@dataclass(frozen=True)
class MemberFlags:
    """The flags that a parent passes: `saccade serve`, or the supervisor of several gateway processes.

    *group_member* is a gateway's number or `indexer`, and empty if there is only one process. With *request_lines* each
    request has a short line on the terminal.
    """

    group_member: str = ""
    group_size: int = 1
    group_folder: Path | None = None
    request_lines: bool = False

    @property
    def is_indexer(self) -> bool:
        return self.group_member == INDEXER

    def member(self) -> Member | None:
        """Return which of several processes this is, None if it is the only one. Raises StartupError."""
        if not self.group_member:
            return None
        if self.group_folder is None or not (self.is_indexer or self.group_member.isdecimal()):
            raise StartupError("--group-member is set by Saccade itself; use --gateway-processes.")
        return Member(self.group_folder, 0 if self.is_indexer else int(self.group_member), self.group_size)


MEMBER_FLAGS = MemberFlags()


def run(server: ServerSettings, arguments: list[str], stop_seconds: float) -> int:
    """Run the processes until a signal; return the exit code. Raises StartupError.

    *arguments* are the flags of each process, without those of *server*. Each gets *stop_seconds* to end.
    """
    if not hasattr(socket, "SO_REUSEPORT") or not sys.platform.startswith("linux"):
        raise StartupError(
            "--gateway-processes over 1 needs Linux, whose kernel spreads connections over processes that share a port."
        )
    with reserved(server), tempfile.TemporaryDirectory(prefix="saccade-gateways-") as private:  # made with mode 0700
        specs = child_specs(server, arguments, Path(private), stop_seconds)
        return asyncio.run(Tree(specs, lambda: until(lambda: is_ready(server))).run())


@contextlib.contextmanager
def reserved(server: ServerSettings) -> Iterator[None]:
    """Reserve the ports for the processes, so that a port in use is reported once. Raises StartupError."""
    with contextlib.ExitStack() as holders:
        holders.enter_context(reserve(server.host, server.port))
        if server.admin_port is not None:
            holders.enter_context(reserve(HOST, server.admin_port, "--admin-port"))
        yield


def child_specs(
    server: ServerSettings, arguments: list[str], folder: Path, stop_seconds: float
) -> tuple[ChildSpec, ...]:
    """Return the gateway processes, which drain concurrently, and the indexer, which ends after them."""
    own = dataclasses.replace(server, gateway_processes=1)

    def spec(name: str, member: str, *, ends_with_previous: bool) -> ChildSpec:
        flags = MemberFlags(member, server.gateway_processes, folder)
        command, environment = config.program("gateway", *arguments, settings=(own, flags))
        return ChildSpec(
            name=name,
            command=command,
            stop_seconds=stop_seconds,
            environment=environment,
            error_codes=exit_codes.WITH_MESSAGE,
            ends_with_previous=ends_with_previous,
        )

    numbers = range(server.gateway_processes)
    gateways = [spec(f"gateway process {one}", str(one), ends_with_previous=True) for one in numbers]
    return (*gateways, spec(INDEXER, INDEXER, ends_with_previous=False))
