"""`saccade serve` with a database: its processes share what clients store, and lose nothing of it when all are killed."""

import io
import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from chats import random_image
from server import Server, serving

from saccade.gateway.state.sqlite import FILE_NAME

pytestmark = pytest.mark.ci
NUM_ASKED = 12
"""Requests over connections of their own, which the kernel spreads over the processes."""


def content(server: Server, file: str) -> bytes:
    """A file's content, over a new connection."""
    with urllib.request.urlopen(f"{server.url}/v1/files/{file}/content", timeout=30) as response:
        return bytes(response.read())


def respond(server: Server, text: str, previous: str | None = None) -> Any:
    """A response, over a new connection."""
    fields = {"model": server.name, "input": text, "max_output_tokens": 2, "previous_response_id": previous}
    request = urllib.request.Request(
        f"{server.url}/v1/responses", json.dumps(fields).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_processes_share_a_database_that_outlives_them(tiny_qwen3_vl: Path, tmp_path: Path) -> None:  # F20
    buffer = io.BytesIO()
    random_image(70, 50, 1).save(buffer, "PNG")
    arguments = (str(tiny_qwen3_vl), "--gateway-processes", "2", "--state", str(tmp_path / "state"))
    with serving(*arguments) as server:
        with server.client() as client:
            file = client.files.create(file=("a.png", buffer.getvalue()), purpose="vision").id
        last = None
        for number in range(NUM_ASKED):
            assert content(server, file) == buffer.getvalue()
            last = respond(server, f"turn {number}", last)["id"]
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
    assert (tmp_path / "state" / FILE_NAME).exists()
    with serving(*arguments) as server:
        for _ in range(NUM_ASKED):
            assert content(server, file) == buffer.getvalue()
        assert respond(server, "go on", last)["previous_response_id"] == last
        request = urllib.request.Request(f"{server.url}/v1/files/{file}", method="DELETE")
        urllib.request.urlopen(request, timeout=30).close()
        for _ in range(NUM_ASKED):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                content(server, file)
