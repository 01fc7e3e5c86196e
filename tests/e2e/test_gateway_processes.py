"""Two gateway processes that share a port, over two real workers: they share what is known, and the death of one of
them, or of the indexer, ends no service.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server import free_port

from benchmarks.fleet import gate
from benchmarks.fleet.load import ask_all
from benchmarks.fleet.plan import Plan
from benchmarks.fleet.running import Gateway, NotMeasured, gateway
from saccade.fleet.shared import UNREACHABLE

pytestmark = pytest.mark.conformance
WAIT_SECONDS = 60


@pytest.fixture(scope="module")
def running(fleet_workers: list[str], fleet_folder: Path) -> Iterator[Gateway]:
    """A gateway of two processes, both ready."""
    flags = ("--gateway-processes", "2", "--shutdown-timeout", "20")
    with gateway(fleet_workers, "auto", fleet_folder / "gateway.log", flags) as started:
        wait_until(lambda: processes_on_page(started) == {"0", "1", "indexer"})
        wait_until(lambda: connections_spread(started) == {"0", "1"})
        yield started


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            if condition():
                return
        except NotMeasured:
            pass
        assert time.monotonic() < deadline, condition
        time.sleep(0.05)


def page(running: Gateway) -> str:
    with urllib.request.urlopen(f"{running.url}/metrics", timeout=10) as response:
        return str(response.read().decode())


def samples(running: Gateway, name: str) -> list[Any]:
    families = text_string_to_metric_families(page(running))
    return [sample for family in families for sample in family.samples if sample.name == name]


def processes_on_page(running: Gateway) -> set[str]:
    return {sample.labels["gateway_process"] for sample in samples(running, "process_cpu_seconds_total")}


def connections_spread(running: Gateway) -> set[str]:
    """Which processes have answered; every call is a connection of its own."""
    counts = samples(running, "saccade_http_requests_total")
    return {one.labels["gateway_process"] for one in counts if one.labels["route"] == "/metrics"}


def process(running: Gateway, member: str) -> psutil.Process:
    """The process *member* of the gateway: its number, or `indexer`."""
    for child in psutil.Process(running.pid).children():
        with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            words = child.cmdline()
            if "--group-member" in words and words[words.index("--group-member") + 1] == member:
                return child
    raise NotMeasured(f"there is no process {member}")


def num_held(running: Gateway) -> int:
    """The blocks that all workers together are known to hold."""
    return sum(worker["holdings"]["blocks"] for worker in running.workers())


def reasons(running: Gateway) -> set[str]:
    return {worker["reason"] for worker in running.workers()}


def test_repeats_land_on_the_holder_as_with_one_process(
    running: Gateway, fleet_plan: Plan, fleet_chats: list[dict[str, Any]]
) -> None:  # E5, E6, E7
    """The gate is that of a gateway of one process: the best possible hit rate, which the workers' counts confirm."""
    running.reset()
    outcome = gate.measure(running, fleet_plan, fleet_chats)
    assert gate.failures(outcome) == []
    assert outcome.num_repeats == 20
    placed = samples(running, "saccade_router_kv_hit_rate_count")
    assert {one.labels["gateway_process"] for one in placed if one.value} == {"0", "1"}
    # What the engines report is the same in all processes, and is on the page once.
    running_samples = samples(running, "vllm:num_requests_running")
    assert len(running_samples) == 2
    assert all("gateway_process" not in one.labels for one in running_samples)


def test_state_of_a_single_process_is_refused_by_name(running: Gateway) -> None:
    with pytest.raises(urllib.error.HTTPError, match="400") as refused:
        urllib.request.urlopen(f"{running.url}/v1/files", timeout=10)
    assert "--gateway-processes" in json.load(refused.value)["error"]["message"]


def test_work_of_all_processes_is_shown(running: Gateway) -> None:
    running.wait_until_idle()
    for _ in range(8):
        with urllib.request.urlopen(f"{running.url}/load", timeout=10) as response:
            assert json.loads(response.read()) == {"server_load": 0}
        assert [worker["booked"]["requests"] for worker in running.workers()] == [0, 0]


def test_killed_gateway_process_is_restarted_and_service_goes_on(
    running: Gateway, fleet_chats: list[dict[str, Any]]
) -> None:
    ask_all(running.url, fleet_chats, [0], 1)
    wait_until(lambda: num_held(running) > 0)
    killed = process(running, "1")
    os.kill(killed.pid, signal.SIGKILL)
    wait_until(lambda: not killed.is_running())  # it is reaped, so its sockets are closed
    for _ in range(4):
        assert ask_all(running.url, fleet_chats, [0], 1)[0].cached_tokens > 0
    wait_until(lambda: process(running, "1").pid != killed.pid)
    # The new process opens its port when it can serve: no client is refused meanwhile.
    deadline = time.monotonic() + WAIT_SECONDS
    while connections_spread(running) != {"0", "1"}:
        assert running.is_ready()
        assert time.monotonic() < deadline
    assert all(one.cached_tokens for one in ask_all(running.url, fleet_chats, [0] * 8, 2))
    wait_until(lambda: processes_on_page(running) == {"0", "1", "indexer"})


def test_killed_indexer_is_restarted_and_service_goes_on(
    running: Gateway, fleet_chats: list[dict[str, Any]]
) -> None:  # E5
    ask_all(running.url, fleet_chats, [0], 1)
    running.wait_until_idle()
    wait_until(lambda: num_held(running) > 0)
    held = num_held(running)
    killed = process(running, "indexer")
    os.kill(killed.pid, signal.SIGSTOP)
    wait_until(lambda: reasons(running) == {UNREACHABLE})
    # Either process may answer, and each notices by itself.
    wait_until(lambda: {worker["exactness"] for worker in running.workers()} == {"NONE"})
    assert all(one.prompt_tokens for one in ask_all(running.url, fleet_chats, [1, 2, 3, 4], 2))
    os.kill(killed.pid, signal.SIGKILL)
    wait_until(lambda: process(running, "indexer").pid != killed.pid)
    running.wait_until_exact()
    wait_until(lambda: num_held(running) >= held)  # either process answers
    # Both processes ask the new indexer, which knows the caches by their snapshots.
    for _ in range(8):
        route = running.route(fleet_chats[0])
        assert max(one["overlap_blocks"] for one in route["candidates"]) == (route["prompt_tokens"] - 1) // 16
    running.wait_until_idle()


def test_port_in_use_is_one_sentence(running: Gateway, fleet_workers: list[str]) -> None:
    """Also where the program that has the port would share it."""
    command = [sys.executable, "-m", "saccade.cli.main", "gateway", "--worker-url", fleet_workers[0]]
    flags = ["--gateway-processes", "2", "--port", str(running.port)]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"127.0.0.1:{running.port}: Address already in use. Choose another --host or --port." in done.stderr


def test_signal_ends_all_processes(fleet_workers: list[str]) -> None:
    port = free_port()
    command = [sys.executable, "-m", "saccade.cli.main", "gateway", "--worker-url", fleet_workers[0]]
    flags = ["--gateway-processes", "2", "--port", str(port), "--log-level", "WARNING"]
    with subprocess.Popen([*command, *flags]) as started:
        wait_until(lambda: len(psutil.Process(started.pid).children()) == 3 and answers(port))
        below = psutil.Process(started.pid).children(recursive=True)
        started.send_signal(signal.SIGTERM)
        assert started.wait(WAIT_SECONDS) == 0
    wait_until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in below))


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
