"""Ties a child process to its parent by a socket: the child reports there, and ends when the parent's end closes.

The parent-death signal comes when the thread that started the child ends. A socket closes when the process ends.
"""

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from saccade.errors import SaccadeError

FLAG = "--parent-fd"
"""The child's flag for its end of the socket."""


class Serving(msgspec.Struct, frozen=True, tag=True):
    """The child serves at *url*."""

    url: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The child ends with the error *sentence* before it serves."""

    sentence: str


_REPORTS: msgspec.json.Decoder[Serving | Failed] = msgspec.json.Decoder(Serving | Failed)


def start_tied(command: Sequence[str], environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start *command* in a session of its own; return it and the parent's end of the socket. Raises OSError.

    Input is empty, and output goes where this process's own does.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [*command, FLAG, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    return process, ours


async def read_report(reader: asyncio.StreamReader) -> Serving | Failed | None:
    """Return the child's report, or None if the child ended without one."""
    line = await reader.readline()
    return _REPORTS.decode(line) if line else None


class ParentSocket:
    """The child's end of the socket, which has the descriptor *fd*."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._socket.set_inheritable(False)

    @contextlib.contextmanager
    def failures_reported(self) -> Iterator[None]:
        """Report a SaccadeError that ends the block."""
        try:
            yield
        except SaccadeError as error:
            self.report(Failed(error.message))
            raise

    def report(self, report: Serving | Failed) -> None:
        """Send *report* to the parent, if it still lives."""
        with contextlib.suppress(OSError):
            self._socket.sendall(msgspec.json.encode(report) + b"\n")

    async def until_closed(self) -> None:
        """Wait until the parent has closed its end, or has ended."""
        with contextlib.suppress(ConnectionResetError):  # the parent has ended before it read the report
            while await asyncio.get_running_loop().sock_recv(self._socket, 1):
                pass
