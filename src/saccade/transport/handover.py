"""Streams to gateways on one host, handed by the front that took them to the engine that writes to them.

So a step wakes the gateway, and nobody on the way. The front goes on reading commands; what it has to say itself the
engine sends for it: a stream has one writer. See docs/decisions/012-streams-handed-over.md.
"""

import contextlib
import socket
import struct
from collections.abc import Iterable

from saccade.transport.framing import framed
from saccade.transport.wire import TAKEN

NUMBER = struct.Struct("<Q")

MAX_UNSENT_BYTES = 64 << 20
"""Who is so far behind has stopped reading; the stream is ended, so that memory stays bounded."""


class Lender:
    """The front's end."""

    def __init__(self, connection: socket.socket) -> None:
        """Give the other end to the engine behind *connection*, as the first that is sent there."""
        self._socket, engines = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        # Of an engine that is gone already its channel tells.
        with engines, contextlib.suppress(OSError):
            socket.send_fds(connection, [b"\0"], [engines.fileno()])

    def lend(self, number: int, descriptor: int) -> None:
        """Have the engine write to the stream *descriptor* what is for connection *number*. Raises OSError."""
        socket.send_fds(self._socket, [NUMBER.pack(number)], [descriptor])

    def close(self) -> None:
        """Lend no more."""
        self._socket.close()


class LentStreams:
    """The engine's end: the streams that it writes to, by the number of their connection."""

    def __init__(self, connection: socket.socket) -> None:
        """Wait on *connection* for what a Lender gives first. Raises OSError where there is no front."""
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        if not descriptors:
            raise ConnectionError
        self._socket = socket.socket(fileno=descriptors[0])
        self._socket.setblocking(False)
        self._streams: dict[int, _Stream] = {}

    def fileno(self) -> int:
        """For select: readable where take() has something to take."""
        return self._socket.fileno()

    def take(self) -> None:
        """Take what was lent, and tell the gateways so."""
        with contextlib.suppress(BlockingIOError):
            while True:
                message, descriptors, _, _ = socket.recv_fds(self._socket, NUMBER.size, 1)
                if not descriptors:
                    return
                stream = _Stream(socket.socket(fileno=descriptors[0]))
                self._streams[NUMBER.unpack(message)[0]] = stream
                stream.send(TAKEN)

    def send(self, number: int, payload: bytes) -> bool:
        """Queue one frame; return whether connection *number* is one of these."""
        stream = self._streams.get(number)
        if stream is not None:
            stream.send(payload)
        return stream is not None

    def waiting(self) -> Iterable[socket.socket]:
        """Return the streams whose gateway is behind, for select."""
        return [stream.socket for stream in self._streams.values() if stream.unsent]

    def flush(self) -> None:
        """Send what gateways take by now."""
        for stream in self._streams.values():
            stream.flush()

    def drop(self, number: int) -> None:
        """Let go of a stream, where it is one of these."""
        stream = self._streams.pop(number, None)
        if stream is not None:
            stream.socket.close()

    def close(self) -> None:
        """Let go of all, and take no more."""
        self._socket.close()
        for number in tuple(self._streams):
            self.drop(number)


class _Stream:
    """One stream, and the end of what its gateway has not taken yet."""

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        self.socket = stream
        self.unsent = bytearray()

    def send(self, payload: bytes) -> None:
        self.unsent += framed(payload)
        self.flush()
        if len(self.unsent) > MAX_UNSENT_BYTES:
            self._end()

    def flush(self) -> None:
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:  # the gateway is gone
            self._end()

    def _end(self) -> None:
        """Say no more; the front sees the end of the stream and hangs up."""
        self.unsent.clear()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
