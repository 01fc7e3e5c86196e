"""`saccade batch` at a gateway with a database: the gateway runs the file, and goes on while the command does not run."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import scripted
from waiting import wait_until

from saccade.cli.main import run
from saccade.eval import server_batch
from saccade.gateway.apis.batches import lines, runner
from saccade.gateway.config import GatewayConfig
from saccade.gateway.state.settings import StateSettings

CHATS = "/v1/chat/completions"
NOTE = Path("in.results.jsonl.batch")
Open = Callable[..., Any]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_SECONDS", "PROGRESS_SECONDS", "PAUSE_SECONDS"):
        monkeypatch.setattr(runner, name, 0.05)
    monkeypatch.setattr(server_batch, "POLL_SECONDS", 0.05)


@pytest.fixture
def opening(tiny_qwen3_vl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Runs gateways over one new database; the files lie in the test's folder."""
    monkeypatch.chdir(tmp_path)

    @contextmanager
    def opened(**fields: Any) -> Iterator[scripted.Gateway]:
        config = GatewayConfig(batch_concurrency=2, state=StateSettings(str(tmp_path / "state")), **fields)
        with scripted.running(tiny_qwen3_vl, config) as gateway:
            gateway.answer_two_tokens()
            yield gateway

    return opened


def write(*names: str, url: str = CHATS, **models: str) -> None:
    """Write a file with a chat for each of *names*; *models* has those that are not the served one."""
    requests = (
        {
            "custom_id": name,
            "method": "POST",
            "url": url,
            "body": {"model": models.get(name, "tiny"), "messages": [{"role": "user", "content": name}]},
        }
        for name in names
    )
    Path("in.jsonl").write_text("".join(f"{json.dumps(request)}\n" for request in requests))


def command(gateway: scripted.Gateway, *flags: str) -> list[str]:
    return ["batch", "in.jsonl", "--url", f"http://127.0.0.1:{gateway.port}", *flags]


def results() -> dict[str, int]:
    """The status of each answer, in the order of the output."""
    answers = map(json.loads, Path("in.results.jsonl").read_text().splitlines())
    return {answer["custom_id"]: answer["response"]["status_code"] for answer in answers}


def counts(gateway: scripted.Gateway) -> list[tuple[int, int]]:
    """Requests and answers of the gateway's batches, the last one first."""
    with gateway.client() as client:
        found = [batch.request_counts for batch in client.batches.list()]
    return [(one.total, one.completed) for one in found if one is not None]


def test_a_gateway_runs_the_file(opening: Open, capsys: pytest.CaptureFixture[str]) -> None:
    write(*"dcba", c="none")
    with opening() as gateway:
        assert run(command(gateway)) == 1
        assert "4 requests: 3 good answers, 0 of them from before, in in.results.jsonl" in capsys.readouterr().out
        assert list(results().items()) == [("d", 200), ("c", 404), ("b", 200), ("a", 200)]
        write(*"dcba")
        assert run(command(gateway)) == 0
        assert "4 requests: 4 good answers, 3 of them from before" in capsys.readouterr().out
        assert counts(gateway) == [(1, 1), (4, 3)]
        assert run(command(gateway)) == 0
        assert len(gateway.worker.requests) == 4
    assert not NOTE.exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_ended_command_goes_on_with_its_batch(how: int, opening: Open) -> None:
    write(*"abcde")
    with opening() as gateway:
        may_answer = threading.Event()
        gateway.worker.script.insert(0, may_answer)
        words = [sys.executable, "-m", "saccade.cli.main", *command(gateway)]
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: NOTE.exists() and len(gateway.worker.requests) == 2)
        batch_id = NOTE.read_text()
        process.send_signal(how)
        _, said = process.communicate()
        if how == signal.SIGINT:
            assert f"{batch_id} goes on at the server" in said
            assert f"/v1/batches/{batch_id}/cancel" in said
            assert "the same command goes on" in said
        may_answer.set()
        assert run(command(gateway)) == 0
        assert list(results()) == list("abcde")
        assert (counts(gateway), len(gateway.worker.requests)) == ([(5, 5)], 5)


def test_a_cancelled_batch_leaves_the_rest_to_the_next_command(opening: Open) -> None:
    write(*"abcde")
    with opening() as gateway, gateway.client() as client:
        may_answer = threading.Event()
        gateway.worker.script.insert(0, may_answer)

        def cancel() -> None:
            wait_until(lambda: NOTE.exists() and len(gateway.worker.requests) == 2)
            client.batches.cancel(NOTE.read_text())
            wait_until(lambda: client.batches.retrieve(NOTE.read_text()).cancelling_at)
            threading.Event().wait(0.3)
            may_answer.set()

        thread = threading.Thread(target=cancel)
        thread.start()
        assert run(command(gateway)) == 1
        thread.join()
        assert list(results()) == list("ab")
        assert run(command(gateway)) == 0
        assert list(results()) == list("abcde")


def test_a_batch_that_is_gone_begins_anew(opening: Open) -> None:
    write("a")
    with opening() as gateway:
        NOTE.write_text("batch_gone")
        assert run(command(gateway)) == 0
        assert counts(gateway) == [(1, 1)]


def test_what_the_gateway_does_not_run_is_sent_one_by_one(
    opening: Open, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lines, "MAX_LINES", 2)
    write(*"abc")
    with opening(max_body_bytes=5000) as gateway:
        assert run(command(gateway)) == 0
        assert "A batch may have 2 requests. It gets the requests one by one." in capsys.readouterr().err
        assert set(results()) == set("abc")
        names = [str(number) for number in range(100)]
        write(*names)
        assert run(command(gateway)) == 0
        assert "body is over the limit of 5000 bytes. It gets the requests one by one." in capsys.readouterr().err
        assert set(names) <= set(results())
        assert counts(gateway) == [(0, 0)]  # the first, which failed
    assert not NOTE.exists()


def test_requests_are_sent_from_here_with_a_concurrency(opening: Open) -> None:
    write(*"abc")
    with opening() as gateway:
        assert run(command(gateway, "--concurrency", "1")) == 0
        assert list(results()) == list("abc")
        assert counts(gateway) == []


def test_a_gateway_without_a_database_gets_the_requests_one_by_one(
    tiny_qwen3_vl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(*"abc")
    with scripted.running(tiny_qwen3_vl) as gateway:
        gateway.answer_two_tokens()
        assert run(command(gateway)) == 0
        assert set(results()) == set("abc")
    assert "one by one" not in capsys.readouterr().err
