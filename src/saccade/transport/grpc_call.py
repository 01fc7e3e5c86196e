"""One streaming gRPC call, with the messages that it sends and receives. Source: gRPC's PROTOCOL-HTTP2.md."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol
from urllib.parse import unquote

import grpc

PREFIX_BYTES = 5
STATUS: Final = {str(code.value[0]).encode(): code for code in grpc.StatusCode}
BUSY: Final = (b"429", b"502", b"503", b"504")
"""HTTP statuses of proxies after which another attempt may succeed."""

logger = logging.getLogger(__name__)


class Receiver(Protocol):
    """Takes one call's messages, then its end. An error in a method affects no other call."""

    def message(self, payload: bytes) -> None:
        """Take a message."""

    def end(self, status: grpc.StatusCode, details: str) -> None:
        """Take the status that the call ends with."""


class Carrier(Protocol):
    """A call's connection."""

    def send(self, call: "Call") -> None:
        """Send the rest of *call*'s messages if the call has begun."""

    def cancel(self, call: "Call") -> None:
        """Forget *call*, and reset its stream if one is open."""


class Call:
    """A call to the method *path*, in progress."""

    def __init__(
        self,
        connection: Carrier,
        path: str,
        message: bytes | None,
        receiver: Receiver,
        metadata: Iterable[tuple[bytes, bytes]],
    ) -> None:
        self.path = path
        self.receiver = receiver
        self.metadata = metadata
        self.unsent = deque([] if message is None else [_prefixed(message)])
        self.takes_more = message is None
        self.num_uncredited_bytes = 0
        self.stream_id = 0
        self.status: tuple[grpc.StatusCode, str] = grpc.StatusCode.UNKNOWN, "the server sent no status"
        self._connection = connection
        self._partial = bytearray()

    def send(self, *parts: bytes) -> None:
        """Send one more message, which consists of *parts*. Only for a call that began without a message."""
        self.unsent.append(_prefixed(*parts))
        self._connection.send(self)

    def cancel(self) -> None:
        """Tell the server to stop. The receiver is not called again."""
        self._connection.cancel(self)

    def read_headers(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Note the status, if *headers* has one: trailers do, and so do the headers of an answer without messages."""
        values = dict(headers)
        if (http := values.get(b":status", b"200")) != b"200":
            code = grpc.StatusCode.UNAVAILABLE if http in BUSY else grpc.StatusCode.UNKNOWN
            self.status = code, f"HTTP status {http.decode(errors='replace')}"
        elif (text := values.get(b"grpc-status", b"")[:3]).isdigit():
            details = unquote(values.get(b"grpc-message", b"").decode(errors="replace"))
            self.status = STATUS.get(text, grpc.StatusCode.UNKNOWN), details

    def end(self, status: grpc.StatusCode, details: str) -> None:
        """End the call with *status*. Other calls on the connection go on, even if the receiver raises."""
        try:
            self.receiver.end(status, details)
        except Exception:
            logger.critical("the end of a call met an unforeseen error", exc_info=True)

    @property
    def num_unfinished_bytes(self) -> int:
        """The number of bytes that have arrived of an incomplete message."""
        return len(self._partial)

    def messages(self, data: bytes, max_bytes: Callable[[], int]) -> Iterator[bytes]:
        """Yield the messages that *data* completes. Raises ValueError for a compressed or overlong message."""
        num_bytes = len(data) - PREFIX_BYTES
        if not self._partial and num_bytes >= 0 and data.startswith(_prefix(num_bytes)):
            # The usual case: a message arrives alone and complete.
            yield data[PREFIX_BYTES:]
            return
        # To join the pieces of a long message each time would take time that grows with its square.
        self._partial += data
        while len(self._partial) >= PREFIX_BYTES:
            num_bytes = int.from_bytes(self._partial[1:PREFIX_BYTES], "big")
            if self._partial[0] or num_bytes > max_bytes():
                raise ValueError
            end = PREFIX_BYTES + num_bytes
            if end > len(self._partial):
                return
            message = bytes(self._partial[PREFIX_BYTES:end])
            del self._partial[:end]
            yield message


def _prefix(num_bytes: int) -> bytes:
    return b"\0" + num_bytes.to_bytes(4, "big")


def _prefixed(*parts: bytes) -> memoryview:
    return memoryview(b"".join((_prefix(sum(map(len, parts))), *parts)))
