"""Each cause of a failed connection has a sentence of its own, whichever client failed."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import httpx2
import openai
import pytest
from certificates import Files, files
from server import free_port
from tables import table

from saccade.bench.client import Server, new_session
from saccade.cli.fleet_checks import connection_fault
from saccade.errors import StartupError
from saccade.transport.credentials import NO_CREDENTIALS
from saccade.transport.unreachable import proxy_hint, why_unreachable

__all__ = ["files"]
SECONDS = 0.5
OTHER_HOST = "127.0.0.2"
"""An address that the workers' certificate does not have."""


def of_openai(url: str) -> str:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=SECONDS) as client:
        with pytest.raises(openai.APIConnectionError) as error:
            client.models.list()
        return why_unreachable(url, error.value, "Start it.")


def of_aiohttp(url: str) -> str:
    async def name() -> None:
        async with new_session(SECONDS) as session:
            await Server(url, session).named()

    with pytest.raises(StartupError) as error:
        asyncio.run(name())
    return str(error.value.message)


def of_httpx2(url: str) -> str:
    with pytest.raises(httpx2.HTTPError) as error:
        httpx2.get(url, timeout=SECONDS, verify=ssl.create_default_context(), trust_env=False)
    return why_unreachable(url, error.value, "Start it.")


@contextmanager
def accepting(answer: Callable[[socket.socket], None], host: str = "127.0.0.1") -> Iterator[int]:
    """The port of a listener on *host* that does *answer* with each of its connections."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            try:
                answer(connection)
            except OSError:  # the client did not like it
                connection.close()

    with closing(socket.create_server((host, 0))) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def with_tls(files: Files) -> Callable[[socket.socket], None]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.folder / "worker.pem", files.folder / "worker.key")
    return lambda connection: context.wrap_socket(connection, server_side=True).close()


def in_plain(connection: socket.socket) -> None:
    connection.settimeout(SECONDS)  # a client of gRPC keeps a connection whose answer it does not understand
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
    connection.recv(1 << 16)
    connection.close()


@pytest.mark.ci
@table("client", [of_openai, of_aiohttp, of_httpx2])
def test_cause_is_named(client: Callable[[str], str], files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    assert client(f"http://127.0.0.1:{free_port()}").startswith("No server answers at http://127.0.0.1:")
    assert "No name server knows the host of http://nowhere.invalid" in client("http://nowhere.invalid")
    kept: list[socket.socket] = []
    with accepting(kept.append) as port:
        assert "does not answer in time" in client(f"http://127.0.0.1:{port}")
    for connection in kept:
        connection.close()
    with accepting(socket.socket.close) as port:
        closed = client(f"http://127.0.0.1:{port}")
        assert "closed the connection" in closed
        assert "Perhaps its address begins with https://." in closed
    with accepting(in_plain) as port:
        plain = client(f"https://127.0.0.1:{port}")
        assert "does not speak TLS. Perhaps its address begins with http://." in plain
    with accepting(with_tls(files)) as port:
        url = f"https://127.0.0.1:{port}"
        private = client(url)
        assert f"{url} has a certificate of an authority that this machine does not know" in private
        assert private.endswith("SSL_CERT_FILE=ca.pem.")


@pytest.mark.ci
@table("client", [of_openai, of_httpx2])  # aiohttp reads the variable when it is imported
def test_a_private_authority_is_named_by_the_environment(
    client: Callable[[str], str], files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(files.folder / "ca.pem"))
    with accepting(with_tls(files), OTHER_HOST) as port:
        url = f"https://{OTHER_HOST}:{port}"
        assert client(url) == f"The certificate of {url} is for another address than that of the URL."


@pytest.mark.ci
async def test_doctor_names_the_cause_of_each_worker(files: Files) -> None:
    refused = await connection_fault(f"grpcs://127.0.0.1:{free_port()}", NO_CREDENTIALS)
    assert refused is not None
    assert refused.endswith("Start the worker, or correct the address.")
    with accepting(with_tls(files)) as port:
        private = await connection_fault(f"grpcs://localhost:{port}", NO_CREDENTIALS)
        assert private is not None
        assert private.endswith("--worker-tls-ca ca.pem.")
        assert await connection_fault(f"grpcs://localhost:{port}", files.credentials(tls=True)) is None
    with accepting(with_tls(files), OTHER_HOST) as port:
        url = f"grpcs://{OTHER_HOST}:{port}"
        other_name = await connection_fault(url, files.credentials(tls=True))
        assert other_name == f"The certificate of {url} is for another address than that of the URL."
    with accepting(in_plain) as port:
        assert await connection_fault(f"grpc://localhost:{port}", NO_CREDENTIALS) is None
    assert await connection_fault("unix:/nowhere", NO_CREDENTIALS) is None


@table(
    "variables, url, hint",
    [
        ({}, "http://a/v1", ""),
        (
            {"http_proxy": "http://me:secret@proxy:3128"},
            "http://a:80/v1",
            " The way there leads through the proxy proxy:3128 of HTTP_PROXY; NO_PROXY=a avoids it.",
        ),
        ({"http_proxy": "http://proxy:3128"}, "https://a/v1", ""),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "a"}, "http://a:80/v1", ""),
    ],
)
def test_hint_at_a_proxy(variables: dict[str, str], url: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert proxy_hint(url) == hint
