"""serve() that cannot start a server; test_llm.py has one that runs."""

import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import saccade
from saccade.errors import StartupError


@pytest.fixture
def serving_port() -> Iterator[int]:
    """A port at which an HTTP server answers."""
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_server_that_ends_before_it_is_ready_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(StartupError, match="ended with exit code 3 before it was ready"):
        saccade.serve()


def test_setting_is_checked_before_anything_starts() -> None:
    with pytest.raises(StartupError, match="There is no setting max_modle_len; did you mean max_model_len"):
        saccade.serve(max_modle_len=4096)


@pytest.mark.parametrize("settings", [{"uds": "/tmp/a.sock"}, {"ssl_certfile": "/tmp/a.pem"}])
def test_server_of_another_kind_of_address_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match="leave out uds and ssl_certfile"):
        saccade.serve(**settings)


def test_port_of_another_server_is_not_mistaken_for_the_own(serving_port: int) -> None:
    with pytest.raises(StartupError, match=f"A server answers at 127.0.0.1:{serving_port} already"):
        saccade.serve(port=serving_port)
