"""Few modules may open network connections, and one of them to an address that a request names."""  # F6

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from parsed_sources import parsed_modules
from tables import table

import saccade

pytestmark = pytest.mark.guard

ROOT = Path(saccade.__file__).parent

CLIENTS = {
    "aiohttp", "ftplib", "grpc", "http.client", "httpx", "httpx2", "huggingface_hub", "openai", "pycares", "pycurl",
    "requests", "smtplib", "urllib.request", "urllib3", "websockets", "xmlrpc.client", "zmq",
}  # fmt: skip
"""Libraries that connect to somebody."""

CONNECTING = {
    "connect", "connect_ex", "create_connection", "create_datagram_endpoint", "create_unix_connection", "insecure_channel",
    "open_connection", "open_unix_connection", "secure_channel", "sendto", "sock_connect", "start_connection",
}  # fmt: skip
"""Calls that connect to somebody."""

ALLOWED = {
    "media/fetch.py": {"aiohttp"},  # addresses from requests, judged at the socket
    "media/resolver.py": {"aiohttp", "pycares"},  # the interface of a resolver; the operating system's name servers
    "media/response_limits.py": {"aiohttp"},  # reads what fetch.py's connections receive
    "transport/credentials.py": {
        "grpc",
        "insecure_channel",
        "secure_channel",
    },  # workers, whose addresses the operator gives
    # uses such a channel; a worker on this host, whose socket the operator names
    "connectors/native/client.py": {"grpc", "create_unix_connection"},
    "connectors/smg/client.py": {"grpc", "insecure_channel"},  # the same
    "connectors/smg/answer.py": {"grpc"},  # names of status codes
    "connectors/smg/kv_events.py": {"grpc"},  # reads from a client's channel
    "connectors/vllm/http.py": {"aiohttp"},  # workers, whose addresses the operator gives
    "connectors/vllm/client.py": {"aiohttp"},  # names of errors
    "connectors/events/publisher.py": {"zmq", "connect"},  # publishers that workers name
    "transport/kv_transfer/destination.py": {"open_connection"},  # a prefill worker, whose address the gateway gives
    "transport/grpc_calls.py": {"grpc", "create_connection"},  # workers, whose addresses the operator gives
    "transport/grpc_call.py": {"grpc"},  # names of status codes
    "connectors/native/feed.py": {"grpc"},  # reads from a client's channel
    "transport/gateway_streams.py": {"grpc"},  # names of status codes
    "transport/server.py": {"grpc"},  # listens
    "transport/access.py": {"grpc"},  # refuses calls to the same
    "transport/local_calls.py": {"create_unix_connection"},  # processes of the same gateway, in a private folder
    "transport/private_sockets.py": {"connect"},  # its own socket's path, to see whether it is in use
    "worker/service.py": {"grpc"},  # listens
    "worker/local_client.py": {"grpc", "connect"},  # names of status codes; streams within its own process
    "worker/tokenspeed/border.py": {"grpc"},  # names of status codes
    "worker/tokenspeed/server.py": {"grpc"},  # listens
    "worker/tokenspeed/service.py": {"grpc", "connect"},  # names of status codes; streams within its own process
    "cli/admin_port.py": {"httpx2"},  # a gateway's admin port, which the operator names
    "gateway/state/postgres.py": {"connect"},  # the server that the operator names
    "gateway/state/sqlite.py": {"connect"},  # opens a file
    "transport/engine_channel.py": {"create_connection"},  # a socket pair that its parent made
    "supervisor/tree.py": {"open_connection", "open_unix_connection"},  # its own children, on loopback
    "supervisor/ray_worker.py": {"open_connection"},  # the socket of its own worker
    "supervisor/ray_cluster.py": {
        "create_connection"
    },  # the cluster that the operator names, to see whether it is there
    "supervisor/checkpoint.py": {"httpx2", "huggingface_hub"},  # the hub, at start-up
    "supervisor/cached_models.py": {"huggingface_hub"},  # its cache on this machine
    "cli/fleet_checks.py": {"open_connection"},  # workers that the operator names
    "cli/machine_checks.py": {"httpx2"},  # this machine's own port
    "bench/client.py": {"aiohttp"},  # the servers that the user names
    "cli/demo.py": {"openai"},  # its own server or gateway, on loopback
    "cli/served_model.py": {"openai"},  # the server that the user names
    "cli/client.py": {"openai"},  # names of types
    "cli/batch.py": {"openai"},  # the server that the user names
    "eval/server_batch.py": {"openai"},  # errors and types
    "transport/unreachable.py": {"urllib.request"},  # the proxies of the environment: it opens no connection
    "llm/serving.py": {"http.client"},  # its own child, on loopback
}
"""Who may, and how; the generated protocol code aside."""


def _connections(tree: ast.AST) -> Iterator[str]:
    """Yield the libraries of CLIENTS that *tree* imports, by any spelling, and the calls of CONNECTING."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                modules = [f"{module}.{alias.name}" for alias in names]
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                modules = [module]
            case ast.Call(func=ast.Attribute(attr=call) | ast.Name(id=call)) if call in CONNECTING:
                yield call
                continue
            case _:
                continue
        for module in modules:
            yield from (client for client in CLIENTS if f"{module}.".startswith(f"{client}."))


def test_only_listed_modules_connect() -> None:
    found = {str(path.relative_to(ROOT)): set(_connections(module)) for path, module in parsed_modules().items()}
    strangers = {path: ways for path, ways in found.items() if not ways <= ALLOWED.get(path, set())}
    assert strangers == {}


def test_no_allowance_is_stale() -> None:
    used = {path: set(_connections(parsed_modules()[ROOT / path])) for path in ALLOWED}
    assert used == ALLOWED


@table(
    ("source", "found"),
    [
        ("import aiohttp", "aiohttp"),
        ("import aiohttp.client as web", "aiohttp"),
        ("from urllib.request import urlopen", "urllib.request"),
        ("from urllib import request", "urllib.request"),
        ("from http import client", "http.client"),
        ("def f():\n    import requests", "requests"),
        ("importlib.import_module('httpx')", "httpx"),
        ("socket.create_connection(('h', 80))", "create_connection"),
        ("s.connect(('h', 80))", "connect"),
        ("await asyncio.open_connection('h', 80)", "open_connection"),
        ("import urllib.parse, http", None),
        ("from huggingface import hub", None),
    ],
)
def test_guard_sees(source: str, found: str | None) -> None:
    assert set(_connections(ast.parse(source))) == ({found} if found else set())
