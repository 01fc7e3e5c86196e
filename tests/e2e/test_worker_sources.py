"""A gateway that starts with no worker serves as soon as its file names one, and not after the file drops it."""

import json
import urllib.request
from pathlib import Path

import pytest
from server import Server, free_port, program
from waiting import wait_until


def ask(server: Server) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "words " * 40}], "max_tokens": 2}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.load(response)["usage"]["completion_tokens"] >= 1


@pytest.mark.conformance
@pytest.mark.parametrize("processes", [1, 2])
def test_workers_file_is_followed_while_the_gateway_runs(processes: int, tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    file, socket, port = tmp_path / "workers", tmp_path / "worker" / "w.sock", free_port()
    flags = ("--gateway-processes", str(processes), "--decode-processes", "1")
    engine = ("--served-model-name", "tiny", "--max-model-len", "512", "--dtype", "float32")
    with (
        program("gateway", "--workers-file", str(file), "--port", str(port), *flags) as gateway,
        program("worker", str(tiny_qwen3_vl), "--uds", str(socket), *engine),
    ):
        server = Server(port, gateway)
        wait_until(lambda: _lives(server))
        assert not server.is_ready()
        file.write_text(f"unix:{socket}\n")
        # Every call is a new connection, and reaches any of the processes.
        wait_until(lambda: all(server.is_ready() for _ in range(24)))
        ask(server)
        file.write_text("# none today\n")
        wait_until(lambda: not any(server.is_ready() for _ in range(24)))
        wait_until(lambda: str(socket) not in server.metrics())
        file.write_text(f"unix:{socket}\n")
        wait_until(lambda: all(server.is_ready() for _ in range(24)))
        for _ in range(4):
            ask(server)


def _lives(server: Server) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}/live", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False
