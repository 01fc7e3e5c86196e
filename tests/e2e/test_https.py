"""`saccade serve` with TLS and several gateway processes, as a user starts it."""

import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import certificates
import pytest
from server import free_port

pytestmark = pytest.mark.ci
files = certificates.files


@contextmanager
def served(*arguments: str) -> Iterator[str]:
    """Run `saccade serve` until it prints a line to try it; yield what it has printed before."""
    command = [sys.executable, "-m", "saccade.cli.main", "serve", *arguments, "--dtype", "float32"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            printed = "".join(iter(process.stderr.readline, "Try it:\n"))
            yield printed
        finally:
            process.send_signal(signal.SIGINT)
            process.stderr.read()


def models(connection: http.client.HTTPConnection, path: str = "/v1/models") -> Any:
    connection.request("GET", path)
    return json.loads(connection.getresponse().read())["data"]


def test_https_by_two_processes(files: certificates.Files) -> None:
    port = free_port()
    certificate = (
        "--ssl-certfile",
        str(files.folder / "worker.pem"),
        "--ssl-keyfile",
        str(files.folder / "worker.key"),
    )
    context = ssl.create_default_context(cafile=files.folder / "ca.pem")
    with served(*certificate, "--port", str(port), "--gateway-processes", "2", "--root-path", "/vision") as printed:
        assert f"https://127.0.0.1:{port}/v1" in printed
        for _ in range(4):
            connection = http.client.HTTPSConnection("localhost", port, timeout=20, context=context)
            assert models(connection, "/vision/v1/models")[0]["id"] == "saccade-reader"
            connection.close()
