"""The conventions that both ends of the native wire share: addresses, limits, the service and its calls."""

import json
from typing import Final

from google.protobuf.message import Message

from saccade.errors import StartupError
from saccade.protocol.model_files import MAX_FILES_BYTES
from saccade.transport.proto import worker_pb2
from saccade.whole_numbers import read_port

SERVICE_NAME: str = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
CALLS: dict[str, tuple[str, type[Message], type[Message]]] = {
    "Describe": ("unary_unary", worker_pb2.DescribeRequest, worker_pb2.DescribeReply),
    "Stream": ("stream_stream", worker_pb2.GatewayFrame, worker_pb2.WorkerFrame),
    "KvEvents": ("unary_stream", worker_pb2.KvEventsRequest, worker_pb2.KvEventsFrame),
}
"""The service's calls: which directions are streams, in gRPC's words, and the messages there and back."""

MAX_MESSAGE_BYTES = 256 << 20
"""A prompt whose images travel inline must fit; same-host images lie in shared memory."""

MAX_REPLY_BYTES: Final = {"Describe": MAX_FILES_BYTES + (1 << 20), "KvEvents": 8 << 20}
"""Of what a worker sends. A description has the model's files and a few names. Our engines put 1024 events into a
message of the feed, about 150 kB; 5 MB if blocks of 1024 tokens come with their ids.
"""

MAX_COMMAND_BYTES = MAX_MESSAGE_BYTES - 1024
"""What one command may take; the rest is for the frame around it."""

TAKEN = b""
"""The first frame that a worker sends on a stream: the worker has accepted the stream."""

_LIMITS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_REPLIES = [
    {"name": [{"service": SERVICE_NAME, "method": method}], "maxResponseMessageBytes": most}
    for method, most in MAX_REPLY_BYTES.items()
]
CLIENT_OPTIONS: list[tuple[str, int | str]] = [
    *_LIMITS,
    ("grpc.service_config", json.dumps({"methodConfig": _REPLIES})),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    *_LIMITS,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]
PING_SECONDS = (10.0, 10.0)
"""When a gateway asks a worker whose stream is silent whether it lives, and when again."""

TLS_SCHEME = "grpcs://"


def target(url: str) -> str:
    """Return gRPC's form of the address in *url*, which is `grpc(s)://host:port` or `unix:/path`.

    Raises StartupError if *url* does not name a host and a port, or a socket.
    """
    if url.startswith("unix:"):
        return url
    address = url.removeprefix(TLS_SCHEME).removeprefix("grpc://").rstrip("/")
    host, _, port = address.rpartition(":")
    if not host or read_port(port) is None or "/" in address:
        raise StartupError(f"A worker's address is grpc://host:port, grpcs://host:port or unix:/path, not {url!r}.")
    return address


def stream_path(url: str) -> str | None:
    """Return the path of the stream socket next to gRPC's socket, or None unless *url* is a Unix socket."""
    return f"{url.removeprefix('unix:')}.stream" if url.startswith("unix:") else None
