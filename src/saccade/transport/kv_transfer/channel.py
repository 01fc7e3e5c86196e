"""One transfer's connection: messages with an authentication code that only holders of the transfer's key can compute.

The source, which is the prefill worker, sends a nonce of 16 bytes. The destination answers with the transfer's name and
its own nonce. After that only messages follow:

    u32 head length, u64 content length, head (msgpack), content, 16-byte code

The code is a blake3 of the message so far, a counter and the sender's side. Its key is derived from the transfer's key
and both nonces. So a damaged, forged, repeated or missing message ends the transfer. Contents are not encrypted.
"""

import asyncio
import hmac
import struct
from typing import Generic, TypeVar

import msgspec
from blake3 import blake3

from saccade.protocol.kv_transfer import FromDestination, FromSource
from saccade.transport.framing import UNREADABLE

NONCE_BYTES = 16
NAME_BYTES = 16
CODE_BYTES = 16
LENGTHS = struct.Struct("<IQ")
MAX_HEAD_BYTES = 256 << 20
"""For messages to the destination: Prefilled may have the log probabilities of a whole prompt."""

MAX_REPLY_BYTES = 64 << 10
"""For messages to the source. The first one comes before the other end has shown that it knows the key."""

BUFFER_BYTES = 4 << 20

Outgoing = TypeVar("Outgoing", FromSource, FromDestination)
Incoming = TypeVar("Incoming", FromSource, FromDestination)


class TransferFailed(Exception):
    """The transfer cannot go on. The other end is at fault unless *by_peer* is False.

    The message is a sentence for the operator, and may be shown to clients.
    """

    def __init__(self, message: str, *, by_peer: bool = True) -> None:
        super().__init__(message)
        self.by_peer = by_peer


class MessageCodes:
    """Computes the authentication codes for one side's messages, in order."""

    def __init__(self, session_key: bytes, side: bytes) -> None:
        self._key = session_key
        self._side = side
        self._number = 0

    def code(self, lengths: bytes, head: bytes, content: bytes) -> bytes:
        """Return the code for the side's next message."""
        self._number += 1
        hasher = blake3(self._side + self._number.to_bytes(8, "little") + lengths + head, key=self._key)
        return hasher.update(content).digest(CODE_BYTES)


class Channel(Generic[Outgoing, Incoming]):
    """Sends one side's messages and receives the other's.

    *most* has the largest allowed sizes of a received head and of its content, in bytes.
    """

    def __init__(
        self,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        counters: tuple[MessageCodes, MessageCodes],
        decoder: "msgspec.msgpack.Decoder[Incoming]",
        most: tuple[int, int],
    ) -> None:
        self._reader, self._writer = streams
        self._sent, self._received = counters
        self._decoder: msgspec.msgpack.Decoder[Incoming] = decoder
        self._max_head_bytes, self._max_content_bytes = most

    async def send_message(self, message: Outgoing, content: bytes = b"") -> None:
        """Send a message, and wait while too much is unsent. Raises TransferFailed if the connection breaks."""
        head = msgspec.msgpack.encode(message)
        lengths = LENGTHS.pack(len(head), len(content))
        try:
            self._writer.writelines((lengths, head, content, self._sent.code(lengths, head, content)))
            await self._writer.drain()
        except OSError as error:
            raise TransferFailed("The connection between the two workers broke.") from error

    async def receive(self) -> tuple[Incoming, bytes]:
        """Return the next message and its content.

        Raises TransferFailed if the other end is gone or breaks the protocol.
        """
        try:
            lengths = await self._reader.readexactly(LENGTHS.size)
            head_bytes, content_bytes = LENGTHS.unpack(lengths)
            if head_bytes > self._max_head_bytes or content_bytes > self._max_content_bytes:
                raise TransferFailed("The other worker sent a message that is too large.")
            head = await self._reader.readexactly(head_bytes)
            content = await self._reader.readexactly(content_bytes)
            code = await self._reader.readexactly(CODE_BYTES)
        except (OSError, EOFError) as error:
            raise TransferFailed("The other worker closed the connection.") from error
        if not hmac.compare_digest(code, self._received.code(lengths, head, content)):
            raise TransferFailed("A message was damaged on its way, or is not from the other worker.")
        try:
            return self._decoder.decode(head), content
        except UNREADABLE as error:
            raise TransferFailed("The other worker sent a message of another version of Saccade.") from error


SourceChannel = Channel[FromSource, FromDestination]
DestinationChannel = Channel[FromDestination, FromSource]


def name_of(key: bytes) -> bytes:
    """Return the name of the transfer with *key*. The name does not reveal the key."""
    return blake3(b"name of a KV transfer", key=key).digest(NAME_BYTES)


def source_channel(
    streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], key: bytes, nonces: bytes
) -> SourceChannel:
    """Return the prefill worker's end of a connection. It receives no contents."""
    to_destination, to_source = _counters(key, nonces)
    decoder: msgspec.msgpack.Decoder[FromDestination] = msgspec.msgpack.Decoder(FromDestination)
    return Channel(streams, (to_destination, to_source), decoder, (MAX_REPLY_BYTES, 0))


def destination_channel(
    streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], key: bytes, nonces: bytes, max_content_bytes: int
) -> DestinationChannel:
    """Return the decode worker's end of a connection."""
    to_destination, to_source = _counters(key, nonces)
    decoder: msgspec.msgpack.Decoder[FromSource] = msgspec.msgpack.Decoder(FromSource)
    return Channel(streams, (to_source, to_destination), decoder, (MAX_HEAD_BYTES, max_content_bytes))


def _counters(key: bytes, nonces: bytes) -> tuple[MessageCodes, MessageCodes]:
    session_key = blake3(b"session of a KV transfer" + nonces, key=key).digest()
    return MessageCodes(session_key, b"source"), MessageCodes(session_key, b"destination")
