"""`saccade top`: a gateway's board in a terminal."""

import contextlib
import os
import pty
import signal
import subprocess
import sys

import msgspec
import pytest
from rich.console import Console
from server import free_port, serving
from tables import table

from saccade.cli.main import run
from saccade.cli.top import frame
from saccade.fleet.breaker import BreakerReport
from saccade.fleet.report import Holdings, WorkerReport
from saccade.gateway.admin import Board
from saccade.gateway.tenants.report import TenantReport
from saccade.protocol.engine_load import Load
from saccade.protocol.gateway_calls import Booked, RequestError, TenantUsage

KEY = "an-admin-key-of-32-characters-or-more"
WORKER = WorkerReport(
    url="grpc://a:1",
    model="[m]",
    version="1.2",
    fingerprint=None,
    kv_transfer_address=None,
    block_size=16,
    role="both",
    ready=True,
    draining=False,
    excluded="",
    breaker=BreakerReport(),
    exactness="EXACT",
    reason="",
    holdings=Holdings(blocks=0, states=0),
    booked=Booked(),
    load=Load(num_running=3, num_waiting=2, num_blocks=100, num_free_blocks=75, generated_tokens_total=50),
)
QUIET = Board(
    version="1.2",
    time=10.0,
    num_processes=1,
    num_requests=0,
    num_waiting=0,
    prefix_hit_rate=None,
    encoder_hit_rate=None,
    workers=[WORKER],
    tenants=[],
    errors=[],
)


def shown(board: Board, before: Board) -> list[str]:
    """The lines of a frame."""
    console = Console(width=160)
    with console.capture() as capture:
        console.print(frame(board, before))
    return [" ".join(line.split()) for line in capture.get().splitlines() if line.strip()]


def test_frame_has_rates_states_tenants_and_errors() -> None:
    load = Load(num_blocks=100, num_free_blocks=75, generated_tokens_total=90)
    excluded = msgspec.structs.replace(WORKER, url="grpc://b:1", load=None, excluded="it is not ready", model=None)
    tenant = TenantReport(
        tenant="acme",
        group="",
        priority=0,
        requests_per_minute=None,
        tokens_per_minute=None,
        image_bytes_per_minute=None,
        usage=TenantUsage(requests=7, refused=1, prompt_tokens=100, cached_tokens=40, completion_tokens=9),
    )
    error = RequestError(
        time=0.0,
        request_id="r",
        method="POST",
        route="/v1/chat/completions",
        status=400,
        code="invalid_image",
        field="messages[0]",
        message="[bold]",
        model=None,
        worker=None,
        tenant="",
    )
    board = msgspec.structs.replace(
        QUIET,
        time=12.0,
        num_requests=5,
        num_waiting=2,
        prefix_hit_rate=0.5,
        encoder_hit_rate=0.25,
        workers=[msgspec.structs.replace(WORKER, load=load), excluded],
        tenants=[tenant],
        errors=[error] * 30,
    )
    head, _, first, second, _, usage, _, *errors = shown(board, QUIET)
    assert "5 requests, 2 of them waiting cached: 50% of prompt tokens, 25% of images" in head
    assert first == "grpc://a:1 ready 0 0 25% 20 [m]"
    assert second == "grpc://b:1 it is not ready 0 0 - 0"
    assert usage == "acme 7 1 100 40 9"
    assert len(errors) == 10
    assert errors[0].endswith("400 invalid_image /v1/chat/completions messages[0]: [bold]")


def test_frame_of_a_quiet_gateway_has_workers_only() -> None:
    head, _, worker = shown(QUIET, QUIET)
    assert "cached: - of prompt tokens, - of images" in head
    assert worker == "grpc://a:1 ready 3 2 25% 0 [m]"


@pytest.mark.parametrize("color", ["", "1"])
def test_a_pipe_gets_the_board_once(
    color: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", color)
    boards = iter([QUIET])
    monkeypatch.setattr("saccade.cli.top.read_answer", lambda *_: next(boards))
    assert run(["top", "--url", "http://127.0.0.1:9", "--admin-key", KEY]) == 0
    assert "grpc://a:1" in capsys.readouterr().out


@table(
    ("words", "sentence"),
    [([], "needs an --admin-key"), (["--admin-key", KEY], "No server answers at http://127.0.0.1:9.")],
)
def test_what_cannot_be_shown_is_explained(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--url", "http://127.0.0.1:9", *words]) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.ci
def test_board_of_a_running_gateway(capsys: pytest.CaptureFixture[str]) -> None:
    port = str(free_port())
    flags = ["--url", f"http://127.0.0.1:{port}", "--admin-key", KEY]
    with serving("--admin-port", port, "--admin-key", KEY) as server:
        server.client().chat.completions.create(model=server.name, messages=[{"role": "user", "content": "Hello?"}])
        assert run(["top", *flags]) == 0
        assert "ready" in capsys.readouterr().out
        assert run(["top", *flags[:-1], "another"]) == 1
        assert "it has no such --admin-key" in capsys.readouterr().err
        reader, terminal = pty.openpty()
        live = subprocess.Popen([sys.executable, "-m", "saccade.cli.main", "top", *flags], stdout=terminal)
        os.close(terminal)
        written = b""
        while written.count(b"tokens/s") < 3:
            written += os.read(reader, 4096)
        live.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # what Linux has for the end of a terminal
            while os.read(reader, 4096):
                pass
        assert live.wait(20) == 0
        os.close(reader)
