"""HTTP to a vLLM server: addresses, connections, answers in JSON, and streams of server-sent events."""

import io
import socket
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakSet

import aiohttp
import msgspec

from saccade.connectors.rank_urls import RankedAddresses
from saccade.errors import WorkerFailed, WorkerUnavailable
from saccade.json_counts import num_brackets, num_commas
from saccade.transport.credentials import WorkerCredentials
from saccade.transport.framing import UNREADABLE

ADDRESSES = RankedAddresses("vLLM", "vllm://", "vllms://")

CONNECT_SECONDS = 10.0
IDLE_SECONDS = 2.0
"""An idle connection is closed before vLLM's server would close it, after 5 s."""

MAX_REPLY_BYTES = 64 << 20
MAX_REPLY_BRACKETS, MAX_REPLY_VALUES = 65_536, 1 << 20
"""Of arrays and objects, and of commas. The longest reply is the form of an image, whose values are base64."""

MAX_EVENT_BYTES = 32 << 20
"""The longest event repeats a prompt's token ids."""

DONE = b"[DONE]"
UNREACHABLE = "The worker cannot be reached; try again shortly."
RANK_HEADER = "X-data-parallel-rank"
JSON = {"Content-Type": "application/json"}

_FAULTS: tuple[tuple[type[Exception], str], ...] = (
    (aiohttp.ClientSSLError, "no secure connection can be made; look at the certificates and --worker-tls-ca"),
    (aiohttp.ClientConnectorDNSError, "the name of the host is not known"),
    (aiohttp.ClientConnectorError, "no server listens at this address"),
    (TimeoutError, "it took too long"),
)


@dataclass(frozen=True)
class VllmAddress:
    """A server, or its data-parallel *rank*. *origin* is `http://host:port` or `https://host:port`."""

    origin: str
    host: str
    rank: int | None = None


def address(url: str) -> VllmAddress:
    """Return where the address of one worker leads. Raises StartupError."""
    target = ADDRESSES.read_worker(url)
    scheme = "https" if target.server.startswith(ADDRESSES.tls_scheme) else "http"
    parts = urlsplit(target.server)
    return VllmAddress(f"{scheme}://{parts.netloc}", parts.hostname or "", target.rank)


class Http:
    """Sends requests to the server at *to*, with *credentials*. Create it in the event loop that uses it."""

    def __init__(self, to: VllmAddress, credentials: WorkerCredentials) -> None:
        headers = {} if credentials.token is None else {"Authorization": f"Bearer {credentials.token}"}
        if to.rank is not None:
            headers[RANK_HEADER] = str(to.rank)
        self._session = aiohttp.ClientSession(
            to.origin,
            headers=headers,
            connector=aiohttp.TCPConnector(
                limit=0,
                ssl=credentials.tls_context() if to.origin.startswith("https:") else True,
                keepalive_timeout=IDLE_SECONDS,
                socket_factory=_socket,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        )
        self._streams: WeakSet[aiohttp.ClientResponse] = WeakSet()

    @property
    def closed(self) -> bool:
        return self._session.closed

    async def close(self) -> None:
        """Close every connection; reading an open stream then raises aiohttp.ClientConnectionError."""
        for response in self._streams:
            # aiohttp closes the connections, but a task that reads from one would wait for ever.
            response.content.set_exception(aiohttp.ClientConnectionError())
        await self._session.close()

    async def get(self, path: str, seconds: float) -> tuple[int, bytes]:
        """Return the status and body of the answer to a GET, which must come within *seconds*."""
        return await self._whole("GET", path, None, seconds)

    async def post(self, path: str, body: bytes, seconds: float) -> tuple[int, bytes]:
        """Return the status and body of the answer to a POST of JSON, which must come within *seconds*."""
        return await self._whole("POST", path, body, seconds)

    async def stream(
        self, path: str, body: bytes, traceparent: str | msgspec.UnsetType = msgspec.UNSET
    ) -> aiohttp.ClientResponse:
        """POST JSON and return the answer once its head has arrived. Close the answer to abort it."""
        headers = {**JSON, "traceparent": traceparent} if traceparent else JSON
        try:
            # Bytes would be written in one piece, which blocks the event loop.
            response = await self._session.post(path, data=io.BytesIO(body), headers=headers, allow_redirects=False)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise WorkerUnavailable(UNREACHABLE) from error
        except RuntimeError as error:
            # aiohttp raises this if close() was called while it made the request.
            if not self.closed:
                raise
            raise WorkerUnavailable(UNREACHABLE) from error
        self._streams.add(response)
        return response

    async def _whole(self, method: str, path: str, body: bytes | None, seconds: float) -> tuple[int, bytes]:
        try:
            async with self._session.request(
                method,
                path,
                data=body,
                headers=JSON if body is not None else None,
                timeout=aiohttp.ClientTimeout(total=seconds),
                allow_redirects=False,
            ) as response:
                return response.status, await read_body(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            fault = next((words for kind, words in _FAULTS if isinstance(error, kind)), "the connection broke")
            raise WorkerUnavailable(f"{path} was not answered: {fault}.") from error


async def read_body(response: aiohttp.ClientResponse) -> bytes:
    """Return the whole body. Raises WorkerUnavailable if it has more than MAX_REPLY_BYTES."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_REPLY_BYTES:
            raise WorkerUnavailable(f"An answer of the worker has more than {MAX_REPLY_BYTES} bytes.")
    return bytes(body)


async def events(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    """Yield the data of each server-sent event except the last, DONE, until the stream ends.

    Each of vLLM's events is one line. Raises WorkerFailed if one has more than MAX_EVENT_BYTES, and aiohttp's errors if
    the connection breaks.
    """
    begun = bytearray()
    async for piece in response.content.iter_any():
        lines, newline, rest = piece.rpartition(b"\n")
        if newline:
            for line in bytes(begun + lines).split(b"\n"):
                data = line[len(b"data:") :].strip()
                if line.startswith(b"data:") and data != DONE:
                    yield data
            begun.clear()
        begun += rest
        if len(begun) > MAX_EVENT_BYTES:
            raise WorkerFailed("The worker sent an event that is too long.")


def parsed(body: bytes) -> Any:
    """Return the JSON in *body*. Raises WorkerUnavailable for anything else, and for too many values."""
    check_reply(body)
    try:
        return msgspec.json.decode(body)
    except UNREADABLE as error:
        raise WorkerUnavailable("The worker answered with something that is not JSON.") from error


def check_reply(body: bytes) -> None:
    """Raise WorkerUnavailable if decoding the JSON in *body* would make too many objects."""
    is_long = body.count(b",") > MAX_REPLY_VALUES or body.count(b"[") + body.count(b"{") > MAX_REPLY_BRACKETS
    if is_long and (
        num_brackets(body, MAX_REPLY_BRACKETS) > MAX_REPLY_BRACKETS
        or num_commas(body, MAX_REPLY_VALUES) > MAX_REPLY_VALUES
    ):
        raise WorkerUnavailable("The worker answered with more values than any answer has.")


def _socket(info: tuple[Any, ...]) -> socket.socket:
    """Return a socket that notices a vanished peer while a request waits for its first token."""
    family, kind, protocol, *_ = info
    connection = socket.socket(family, kind, protocol)
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
