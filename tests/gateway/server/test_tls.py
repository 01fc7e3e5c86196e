"""HTTPS at the gateway's port: answers, streams, slow readers and clients that leave, as over plain TCP."""

import contextlib
import http.client
import json
import os
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import certificates
import pytest
import scripted
from tables import table
from waiting import wait_until

from saccade.errors import StartupError
from saccade.gateway.config import ConnectionLimits, GatewayConfig, TlsSettings, tls_context
from saccade.protocol.output import FinishReason, TokenDelta
from saccade.supervisor.tree import answers_ready

files = certificates.files
HASTY = ConnectionLimits(unread_seconds=0.5, sweep_seconds=0.1)
CHAT = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()


def settings(files: certificates.Files, *, mutual: bool = False) -> TlsSettings:
    """The flags of a server; with *mutual* it requires a certificate."""
    authority = files.folder / "ca.pem" if mutual else None
    return TlsSettings(files.folder / "worker.pem", files.folder / "worker.key", authority, 2 if mutual else 0)


def client_context(files: certificates.Files, *, mutual: bool = False) -> ssl.SSLContext:
    """What a client that knows the authority has."""
    context = ssl.create_default_context(cafile=files.folder / "ca.pem")
    context.check_hostname = False
    if mutual:
        context.load_cert_chain(files.folder / "gateway.pem", files.folder / "gateway.key")
    return context


@pytest.fixture(scope="module")
def secure(files: certificates.Files, tiny_qwen3_vl: Path) -> Iterator[scripted.Gateway]:
    config = GatewayConfig(tls=settings(files), connections=HASTY)
    with scripted.running(tiny_qwen3_vl, config, tls=client_context(files)) as gateway:
        gateway.answer_two_tokens()
        yield gateway


def post(body: bytes = CHAT) -> bytes:
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def test_answers_and_streams(secure: scripted.Gateway) -> None:
    assert secure.chat().json["usage"]["completion_tokens"] == 3
    assert secure.chat(stream=True).events[-1] == "[DONE]"
    assert secure.chat("long " * 100_000).status == 400  # a body of many TLS records


async def test_supervisor_sees_readiness_over_tls(secure: scripted.Gateway) -> None:
    assert await answers_ready("127.0.0.1", secure.port, over_tls=True)
    assert not await answers_ready("127.0.0.1", secure.port)


def test_long_stream_reaches_a_slow_reader_whole(secure: scripted.Gateway) -> None:
    secure.worker.script = [TokenDelta("r", [300] * 64) for _ in range(1500)]
    secure.worker.script += [TokenDelta("r", [secure.eos], FinishReason.STOP)]
    with secure.connect() as connection:
        connection.sendall(post())
        wait_until(lambda: not secure.metric("saccade_requests_in_flight"))
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.read().endswith(b"data: [DONE]\n\n")
    secure.answer_two_tokens()


def test_answer_that_nobody_reads_is_dropped(secure: scripted.Gateway) -> None:
    secure.worker.script = [TokenDelta("r", [300] * 64) for _ in range(4000)]
    secure.worker.script += [60.0]
    num_aborted = secure.worker.num_aborted
    with secure.connect() as connection:
        connection.sendall(post())
        wait_until(lambda: secure.worker.num_aborted > num_aborted)
        wait_until(lambda: not secure.connections.num_open)
    secure.answer_two_tokens()


def test_client_that_leaves_ends_its_request(secure: scripted.Gateway) -> None:
    secure.worker.script = [TokenDelta("r", [300]), 60.0]
    num_aborted = secure.worker.num_aborted
    with secure.connect() as connection:
        connection.sendall(post())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
    wait_until(lambda: secure.worker.num_aborted > num_aborted)
    secure.answer_two_tokens()


def test_client_that_does_not_speak_tls_is_disconnected(secure: scripted.Gateway) -> None:
    with socket.create_connection(("127.0.0.1", secure.port), timeout=20) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while connection.recv(1 << 16):
                pass
    assert secure.ask("GET", "/live").status == 200


def hello(context: ssl.SSLContext) -> bytes:
    """The first message of a handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


def test_client_that_does_not_end_its_handshake_is_disconnected(files: certificates.Files, tiny_qwen3_vl: Path) -> None:
    config = GatewayConfig(tls=settings(files), connections=ConnectionLimits(head_seconds=0.3))
    whole = hello(client_context(files))
    with scripted.running(tiny_qwen3_vl, config, described=False) as gateway:
        for begun in (b"", whole[:1], whole[:5], whole[: len(whole) // 2], whole[:-1], whole):
            with (
                socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as connection,
                contextlib.suppress(ConnectionError),
            ):
                connection.sendall(begun)
                # The server's part of the handshake comes before the end if the client's first message was whole.
                while connection.recv(1 << 16):
                    pass
        wait_until(lambda: not gateway.connections.num_open)


def test_a_server_name_that_no_certificate_has_gets_the_only_one(
    secure: scripted.Gateway, files: certificates.Files
) -> None:
    context = client_context(files)
    for name in ("nobody.test", "127.0.0.1", "a" * 63 + ".test"):
        with (
            socket.create_connection(("127.0.0.1", secure.port), timeout=20) as plain,
            context.wrap_socket(plain, server_hostname=name) as connection,
        ):
            connection.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_a_request_in_records_of_a_byte_is_answered(secure: scripted.Gateway) -> None:
    secure.answer_two_tokens()
    with secure.connect() as connection:
        for byte in post():
            connection.sendall(bytes([byte]))
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")


async def test_certificates_of_clients_may_be_required(files: certificates.Files, tiny_qwen3_vl: Path) -> None:
    config = GatewayConfig(tls=settings(files, mutual=True))
    with scripted.running(tiny_qwen3_vl, config, tls=client_context(files, mutual=True)) as gateway:
        assert gateway.ask("GET", "/live").status == 200
        assert await answers_ready("127.0.0.1", gateway.port, over_tls=True)
        gateway.tls = client_context(files)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            gateway.ask("GET", "/live")


@table(
    ("certfile", "keyfile", "ca_certs", "cert_reqs", "words"),
    [
        ("", "worker.key", "", 0, "need --ssl-certfile"),
        ("", "", "", 2, "need --ssl-certfile"),
        ("worker.pem", "worker.key", "", 1, "--ssl-cert-reqs over 0 needs --ssl-ca-certs"),
        ("worker.pem", "gateway.key", "", 0, "--ssl-certfile and --ssl-keyfile must be PEM"),
        ("worker.pem", "", "", 0, "--ssl-certfile and --ssl-keyfile must be PEM"),
        ("worker.pem", "locked.key", "", 0, "without a password"),
        ("none.pem", "worker.key", "", 0, "No such file or directory"),
        ("worker.pem", "worker.key", "worker.token", 2, "--ssl-ca-certs must be PEM"),
        ("worker.pem", "worker.key", "none.pem", 2, "--ssl-ca-certs: cannot read"),
    ],
)
def test_wrong_files_are_refused(
    certfile: str, keyfile: str, ca_certs: str, cert_reqs: int, words: str, files: certificates.Files
) -> None:
    if keyfile == "locked.key":
        locked = ["openssl", "ec", "-in", "worker.key", "-out", "locked.key", "-aes256", "-passout", "pass:secret"]
        subprocess.run(locked, cwd=files.folder, check=True, capture_output=True)
    paths = [files.folder / name if name else None for name in (certfile, keyfile, ca_certs)]
    with pytest.raises(StartupError, match=words):
        tls_context(TlsSettings(*paths, cert_reqs=cert_reqs))  # type: ignore[arg-type]


async def test_unix_socket_replaces_the_port(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    uds = tmp_path / "new" / "front.sock"
    uds.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(uds))
    with scripted.running(tiny_qwen3_vl, GatewayConfig(uds=uds)) as gateway:
        gateway.answer_two_tokens()
        assert os.stat(uds).st_mode & 0o777 == 0o600
        assert gateway.chat(stream=True).events[-1] == "[DONE]"
        assert await answers_ready("localhost", 0, uds=uds)
        with pytest.raises(StartupError, match="another process listens there"):
            scripted.app.listen_unix(uds)


def test_requests_may_have_the_root_path(tiny_qwen3_vl: Path) -> None:
    with scripted.running(tiny_qwen3_vl, GatewayConfig(root_path="/vision")) as gateway:
        for path in ("/vision/v1/models", "/v1/models"):
            assert gateway.ask("GET", path).status == 200
        assert gateway.ask("GET", "/vision/openapi.json").json["servers"] == [{"url": "/vision"}]
        assert gateway.ask("GET", "/visionary/v1/models").status == 404
        assert gateway.ask("GET", "/vision").status == 404
