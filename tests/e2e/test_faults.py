"""Faults: no wrong answer, requests fail by name, service returns, nothing is left behind."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import faults
import psutil
import pytest
from chats import openai_messages, random_image
from faults import RIGHT, Ask, Quiet, strike, wait_for
from server import Server, serving, slots

pytestmark = pytest.mark.ci

SILENCE_SECONDS = 5
KV_BYTES = faults.NUM_BLOCKS * (32 << 10)


@pytest.fixture(scope="module")
def server(tiny_qwen3_vl: Path) -> Iterator[Server]:
    """One server for all faults: after each it must be as good as before."""
    flags = ("--kv-cache-memory-bytes", str(KV_BYTES), "--engine-silence", str(SILENCE_SECONDS))
    with serving(str(tiny_qwen3_vl), *faults.FLAGS, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def quiet(server: Server) -> Quiet:
    """What it answers in peace."""
    return Quiet(server)


@pytest.fixture
def short_lived(tiny_qwen3_vl: Path) -> Iterator[Server]:
    """A server of its own for a test that ends it."""
    with serving(str(tiny_qwen3_vl), "--served-model-name", "tiny", "--max-model-len", "4096") as running:
        yield running


FAILED = {"500 worker_failed", "error event worker_failed"}
BROKEN = {"broken connection", "broken stream (RemoteProtocolError)", "broken stream (ReadError)"}
AWAY = {"503 worker_unavailable"}
CASES: dict[str, tuple[set[str], set[str]]] = {
    "kill -9 engine": (FAILED | AWAY, FAILED | AWAY),
    "kill -9 worker's front": (FAILED | AWAY, FAILED | AWAY),
    "kill -9 gateway": (BROKEN, BROKEN | AWAY),
    "kill -9 fork server": ({RIGHT}, set()),
    "missing slots": ({RIGHT}, set()),
    "worker out of blocks": ({RIGHT}, set()),
    "malformed frames": ({RIGHT}, set()),
}


BEFORE_LANDING = ("kill -9 engine",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.ci if name in BEFORE_LANDING else pytest.mark.conformance) for name in CASES],
)
def test_service_returns_after_a_fault(server: Server, quiet: Quiet, name: str) -> None:  # [eng] 16, 18
    running, later = CASES[name]
    front = faults.only(server, "worker").pid
    seen = strike(server, quiet, faults.FAULTS[name])
    assert (faults.only(server, "worker").pid == front) == (name != "kill -9 worker's front")
    assert set(seen.running) <= running | {RIGHT}, seen
    assert set(seen.later) <= later | {RIGHT}, seen
    assert seen.left == ()
    if RIGHT not in running:
        assert seen.running[RIGHT] < faults.NUM_RUNNING, "nothing was running"


@pytest.mark.conformance
def test_paused_engine_resumes(server: Server, quiet: Quiet) -> None:
    engine = server.engine().pid
    seen = strike(server, quiet, partial(faults.pause, 1.0))
    assert (set(seen.running), set(seen.later), seen.left) == ({RIGHT}, {RIGHT}, ())
    assert server.engine().pid == engine


@pytest.mark.conformance
def test_engine_that_hangs_is_replaced(server: Server, quiet: Quiet) -> None:
    hanging = server.engine()
    seen = strike(server, quiet, faults.hang)
    assert set(seen.running) <= FAILED | AWAY | {RIGHT}
    assert (set(seen.later) <= AWAY | FAILED | {RIGHT}, seen.left) == (True, ())
    assert not hanging.is_running()


@pytest.mark.conformance
def test_full_shared_memory_is_slower_and_not_wrong(
    server: Server, quiet: Quiet, tiny_qwen3_vl: Path
) -> None:  # [eng] 19
    # What the other server answered is the measure; its slots were never full.
    quiet.learn(*faults.MANY_IMAGES)
    with serving(str(tiny_qwen3_vl), *faults.FLAGS, before=faults.IN_SMALL_SHARED_MEMORY) as full:
        faults.fill(full, quiet.of(full))


def test_disconnected_client_frees_the_engine(server: Server) -> None:
    with server.client() as client:
        stream = client.chat.completions.create(
            model=server.name,
            messages=openai_messages(random_image(96, 96, 1), "Go on."),
            max_tokens=900,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        stream.close()
    wait_for(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.metric("saccade_slots_in_use") == 0


@pytest.mark.conformance
def test_killed_supervisor_leaves_no_process(short_lived: Server) -> None:
    tree = short_lived.tree()
    short_lived.process.kill()
    assert psutil.wait_procs(tree, timeout=60)[1] == []


def test_signal_drains_and_leaves_no_process_and_no_segment(server: Server) -> None:
    """The last test of the server: its supervisor has lived through all faults."""
    tree = server.tree()
    ask = Ask(1, 300, stream=True)
    expected = ask.text(server)
    assert slots(tree)
    assert len(tree) >= 4  # supervisor, gateway, worker, engine, decode processes

    def drain() -> None:
        os.kill(server.process.pid, signal.SIGTERM)
        wait_for(lambda: not server.is_ready())

    assert ask.text(server, on_first=drain) == expected
    assert server.process.wait(60) == 0
    assert psutil.wait_procs(tree, timeout=60)[1] == []
    assert not slots(tree)
