"""The gateway's side of the fork server and its decode processes."""

import asyncio
import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading

import msgspec

from saccade.errors import InternalError, StartupError
from saccade.gateway import confinement
from saccade.gateway.child_lines import log_lines
from saccade.gateway.images.decode_pool.job import PID, READY, Confinement, ImageAnswer, Job, frame
from saccade.transport import framing

PROGRAM = "saccade.gateway.images.decode_pool.process"
START_SECONDS = 60.0
FORK_SECONDS = 10.0
END_SECONDS = 5.0
SEND_BUFFER_BYTES = 1 << 20
MAX_WORDS_BYTES = 64 << 10
"""Limit of an answer without its pixels: the gateway does not trust a decode process about lengths."""

ENVIRONMENT = {
    # malloc keeps buffers of ordinary images for the next one: fresh pages would double the time of a decode.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    # A library of processors advises to install torch, which these processes do without.
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}


class DecodeProcess:
    """A decode process, which takes one job at a time.

    *life* says which of the fork server's starts, counted from 1, this process comes from. *measures* are the
    confinement.MEASURES in force.
    """

    def __init__(
        self, pid: int, pidfd: int, connection: socket.socket, life: int, measures: tuple[str, ...] = ()
    ) -> None:
        connection.setblocking(False)
        self.pid = pid
        self.life = life
        self.measures = measures
        self._pidfd = pidfd
        self._connection = connection

    @property
    def alive(self) -> bool:
        """Whether the process can still take a job."""
        return self._pidfd >= 0 and not _ended(self._pidfd, 0.0)

    async def exchange(self, job: Job, slot: int | None = None) -> ImageAnswer:
        """Send a job and return its answer. *slot* is the descriptor of job.slot.

        The caller may close *slot* afterwards. Raises OSError if the process dies or its answer has a wrong length, and
        UNREADABLE for a malformed answer.
        """
        await self._send(frame(job), slot)
        length = framing.length(await self._receive(framing.PREFIX_BYTES))
        if length > job.num_pixel_bytes + MAX_WORDS_BYTES:
            raise ConnectionResetError
        answer = msgspec.msgpack.decode(await self._receive(length), type=ImageAnswer)
        if answer.inline is not None and len(answer.inline) != job.num_pixel_bytes:
            raise ConnectionResetError
        return answer

    def terminate(self) -> None:
        """Kill the process through its pidfd, which never refers to another process, even if the id is reused."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process, wait for its end, and close its descriptors; blocks for milliseconds. May be repeated."""
        if self._pidfd < 0:
            return
        self.terminate()
        pidfd, self._pidfd = self._pidfd, -1
        _ended(pidfd, END_SECONDS)
        os.close(pidfd)
        self._connection.close()

    async def _send(self, pieces: tuple[bytes, bytes], descriptor: int | None) -> None:
        # One call if they fit, since two would wake the process twice. The process has read all of its last job, so the
        # call sends at least some bytes, and the descriptor with them.
        rights = struct.pack("=i", descriptor) if descriptor is not None else b""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
        num_sent = self._connection.sendmsg(pieces, ancillary)
        for piece in pieces:
            if num_sent < len(piece):
                await asyncio.get_running_loop().sock_sendall(self._connection, memoryview(piece)[num_sent:])
            num_sent = max(0, num_sent - len(piece))

    async def _receive(self, length: int) -> bytearray:
        loop = asyncio.get_running_loop()
        data = bytearray(length)
        view, received = memoryview(data), 0
        while received < length:
            count = await loop.sock_recv_into(self._connection, view[received:])
            if count == 0:
                raise ConnectionResetError
            received += count
        return data


def _ended(pidfd: int, seconds: float) -> bool:
    """Wait at most *seconds* for a process to end; return whether it has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _confinement(connection: socket.socket) -> tuple[str, ...]:
    """Return the measures in a new decode process's first message. Raises OSError if none arrives."""
    length = framing.length(framing.receive(connection, framing.PREFIX_BYTES))
    try:
        return msgspec.msgpack.decode(framing.receive(connection, length), type=Confinement).holds
    except msgspec.DecodeError:
        raise ConnectionResetError from None


class DecodeServer:
    """The fork server, which fork() restarts if it has died.

    Its processes have *libraries* for models that run their own image processors. Its methods block, and are safe to
    call from several threads.
    """

    def __init__(self, memory_bytes: int, pdf_font_folder: str | None = None) -> None:
        self._memory_bytes = memory_bytes
        self._pdf_font_folder = pdf_font_folder
        self.libraries: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._logging: threading.Thread | None = None
        self._stopped = False
        self._num_starts = 0

    @property
    def life(self) -> int:
        """The number of the server's current life, or of the next if it has ended. A life's processes end with it."""
        process = self._process
        return self._num_starts + (process is None or process.poll() is not None)

    def start(self) -> None:
        """Start the server and wait until its imports are done. Raises StartupError."""
        with self._lock:
            self._start()

    def fork(self) -> DecodeProcess:
        """Return a new decode process. Raises StartupError."""
        with self._lock:
            if self._stopped:
                raise StartupError("The decode server has been stopped.")
            try:
                return self._fork()
            except OSError:
                self._end()
                self._start()
            try:
                return self._fork()
            except OSError:
                raise StartupError("The decode server does not fork.") from None

    def load_library(self, name: str) -> None:
        """Restart the server with the library *name* too, unless it has it; processes end. Raises InternalError."""
        with self._lock:
            if name in self.libraries or self._stopped:
                return
            self._end()
            before, self.libraries = self.libraries, (*self.libraries, name)
            try:
                self._start()
            except StartupError as error:
                self.libraries = before
                raise InternalError(
                    f"The gateway cannot load {name}, which processes this model's images; its log says why."
                ) from error

    def stop(self) -> None:
        """End the server; all its processes end with it."""
        with self._lock:
            self._stopped = True
            self._end()

    def _start(self) -> None:
        self._num_starts += 1
        try:
            ours = self._control = self._spawn()
        except OSError as error:
            raise StartupError(f"The decode server cannot be started: {error.strerror}.") from error
        ours.settimeout(START_SECONDS)
        try:
            ready = ours.recv(len(READY))
        except OSError:
            ready = b""
        if ready != READY:
            self._end()
            raise StartupError("The decode server did not start; the lines before say why.")
        ours.settimeout(FORK_SECONDS)

    def _spawn(self) -> socket.socket:
        """Start the program; return our end of its socket. Raises OSError."""
        ours, theirs = socket.socketpair()
        arguments = ["--fd", str(theirs.fileno()), "--memory-bytes", str(self._memory_bytes)]
        if self._pdf_font_folder is not None:
            arguments += ["--pdf-font-folder", self._pdf_font_folder]
        for library in self.libraries:
            arguments += ["--processor-library", library]
        output, self._logging = log_lines("decode processes")
        try:
            with theirs, open(output, "wb"):
                self._process = subprocess.Popen(
                    [sys.executable, "-m", PROGRAM, *arguments],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=confinement.environment(os.environ) | ENVIRONMENT,
                    start_new_session=True,
                )
        except OSError:
            ours.close()
            raise
        return ours

    def _fork(self) -> DecodeProcess:
        if self._control is None:
            raise ConnectionResetError
        ours, theirs = socket.socketpair()
        # Most images then go over in one call; the kernel takes what it allows of it.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        try:
            with theirs:
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
            message, descriptors, _, _ = socket.recv_fds(self._control, PID.size, 1)
            if not descriptors:
                raise ConnectionResetError
        except OSError:
            ours.close()
            raise
        (pid,) = PID.unpack(message)
        ours.settimeout(FORK_SECONDS)
        try:
            measures = _confinement(ours)
        except OSError:
            ours.close()
            os.close(descriptors[0])
            raise
        return DecodeProcess(pid, descriptors[0], ours, self._num_starts, measures)

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            # It holds no state, so it need not end cleanly.
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._logging is not None:
            # Its decode processes end with it. What it said last is then in the log, before what the gateway says.
            self._logging.join(END_SECONDS)
            self._logging = None
