"""Where `saccade worker` listens, what it asks of gateways, and what gateways show."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from certificates import Files, files
from tables import table
from waiting import until

from saccade.cli.gateway import WorkerFlags
from saccade.cli.main import make_app, run
from saccade.cli.worker import AccessFlags
from saccade.connectors.native.client import WorkerClient
from saccade.errors import StartupError
from saccade.transport import shared_memory
from saccade.transport.access import Access
from saccade.transport.credentials import WorkerCredentials

__all__ = ["files"]


@pytest.mark.parametrize(
    ("flags", "bind"),
    [
        (AccessFlags(port=0), "127.0.0.1:0"),
        (AccessFlags(port=7), "127.0.0.1:7"),
        (AccessFlags(host="10.0.0.7"), "10.0.0.7:9000"),
        (AccessFlags(host="::1", port=7), "[::1]:7"),
        (AccessFlags(uds=Path("w.sock")), "unix:w.sock"),
    ],
)
def test_address_follows_the_flags(flags: AccessFlags, bind: str) -> None:
    assert flags.bind() == bind


def test_without_flags_the_address_is_a_socket_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert AccessFlags().bind() == f"unix:{tmp_path}/saccade/worker.sock"


@table(
    ("arguments", "words"),
    [
        (["--uds", "w.sock", "--port", "7"], "--uds"),
        (["--allowed-uids", "7"], "--uds"),
        (["--worker-token-file", "/nowhere"], "--worker-token-file"),
        (["--tls-cert", "/nowhere"], "--tls-key"),
        (["--role", "prefill", "--kv-transfer-bind", "0.0.0.0:7"], "--kv-transfer-bind"),
        (["--role", "prefill", "--kv-transfer-bind", "[::]:7"], "--kv-transfer-bind"),
        (["--role", "prefill", "--kv-transfer-bind", "7"], "--kv-transfer-bind"),
        (["--role", "prefill", "--kv-transfer-bind", "127.0.0.1:" + "0" * 5000 + "7"], "--kv-transfer-bind"),
        (["--role", "decode", "--kv-transfer-bind", "127.0.0.1:7"], "--kv-transfer-bind"),
        (["--serve-tokenspeed", "50051"], "HOST:PORT"),
        (["--serve-tokenspeed", "0.0.0.0:50051"], "--serve-tokenspeed-to-anyone"),
        (["--serve-tokenspeed-to-anyone"], "--serve-tokenspeed HOST:PORT"),
        (["--otlp-traces-endpoint", "http://127.0.0.1:4317"], "needs --serve-tokenspeed"),
    ],
)
def test_flags_that_do_not_fit_are_refused_before_the_model_is_loaded(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert run(["worker", "/nowhere/at/all", *arguments]) == 1
    shown = capsys.readouterr().err
    assert words in shown
    assert "There is no folder" not in shown


def test_file_flags_become_access_and_credentials(files: Files) -> None:
    names = ("worker.token", "worker.pem", "worker.key", "ca.pem", "gateway.pem", "gateway.key")
    token, certificate, key, authority, own, own_key = (str(files.folder / name) for name in names)
    words = ["worker", "m", "--worker-token-file", token, "--tls-cert", certificate, "--tls-key", key]
    words += ["--tls-client-ca", authority, "--allowed-uids", "7", "--allowed-uids", "8", "--kv-events-token-ids"]
    _, bound, _ = make_app(None).parse_args(words, exit_on_error=False, print_error=False)
    asked = bound.arguments["access"]
    assert asked.kv_events_token_ids
    assert asked.access() == Access(files.token, files.worker, files.authorities, (7, 8))
    words = ["gateway", "--worker-token-file", token, "--worker-tls-ca", authority, "--worker-tls-cert", own]
    words += ["--worker-tls-key", own_key]
    _, bound, _ = make_app(None).parse_args(words, exit_on_error=False, print_error=False)
    shown = bound.arguments["workers"]
    assert shown.credentials(("grpcs://w:1",)) == WorkerCredentials(files.token, files.authorities, files.gateway)
    assert shown.credentials(("vllms://w:1",)) == shown.credentials(("grpcs://w:1",))
    with pytest.raises(StartupError, match="grpcs://"):
        shown.credentials(("grpc://w:1", "unix:/w.sock", "vllm://w:1"))
    assert WorkerFlags().credentials(("grpc://w:1",)) == WorkerCredentials()


@pytest.mark.ci
async def test_worker_without_flags_listens_for_its_user_alone(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "saccade.cli.main", "worker", str(tiny_qwen3_vl), "--max-model-len", "512"]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    socket = tmp_path / "saccade" / "worker.sock"
    process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=subprocess.PIPE)
    client = WorkerClient(f"unix:{socket}")
    await client.start()
    try:
        await until(lambda: client.ready or process.returncode is not None)
        assert client.ready
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (socket.parent, socket, Path(f"{socket}.stream"))]
        assert modes == [0o700, 0o600, 0o600]
        assert client.description is not None
        assert client.description.shm_namespace == shared_memory.readers()
    finally:
        await client.close()
        process.send_signal(signal.SIGTERM)
        _, said = await process.communicate()
    assert f"unix:{socket}" in said.decode()
    assert list(socket.parent.iterdir()) == []
