"""What the gateway holds during a siege and after it: memory at its peak, cores in use, connections of attackers."""

import contextlib
import threading
import time
from collections.abc import Mapping

import psutil
from faults import roles, segments
from server import Server

from benchmarks.reliability.memory import memory

GATEWAY = "gateway"
GATEWAY_ROLES = (GATEWAY, "fork server", "decode process")
TREE, PRIVATE, PSS = "gateway tree", "gateway without /dev/shm", "gateway tree with pages of files (PSS)"
LOOK_SECONDS, ROLES_SECONDS = 0.05, 1.0
NETWORKS = {"attackers": "127.0.1.", "their image hosts": "127.0.2."}
"""Beginnings of the addresses that attackers and their image hosts use."""

MUST_BE_ZERO = (
    *("saccade_requests_in_flight", "saccade_slots_in_use", "vllm:num_requests_running", "vllm:num_requests_waiting"),
)


class Watch:
    """Within its block: `peaks` are the highest MiB without pages of files of the gateway's roles, of its tree together
    and of the gateway without shared memory; and the highest proportional set size of the tree. `cores` is how many
    cores each role of the server kept busy, once the block has ended.
    """

    def __init__(self, server: Server) -> None:
        self.peaks: dict[str, float] = {}
        self.cores: dict[str, float] = {}
        self._server = server
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Watch":
        self._began, self._before = time.monotonic(), _cpu_seconds(self._server)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        seconds = time.monotonic() - self._began
        after = _cpu_seconds(self._server)
        self.cores = {role: max(0.0, after[role] - self._before.get(role, 0.0)) / seconds for role in after}

    def _look(self) -> None:
        pids: dict[str, list[int]] = {}
        read_at = 0.0
        while not self._ended.wait(LOOK_SECONDS):
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if time.monotonic() - read_at > ROLES_SECONDS:
                    processes = roles(self._server)
                    pids = {role: [one.pid for one in processes.get(role, ())] for role in GATEWAY_ROLES}
                    read_at = time.monotonic()
                self._take(pids)

    def _take(self, pids: Mapping[str, list[int]]) -> None:
        now = dict.fromkeys((*GATEWAY_ROLES, TREE, PRIVATE, PSS), 0.0)
        for role, numbers in pids.items():
            for pid in numbers:
                # A decode process may have ended since its role was read.
                with contextlib.suppress(OSError):
                    usage = memory(pid)
                    now[role] += usage.own
                    now[TREE] += usage.own
                    now[PSS] += usage.pss
                    now[PRIVATE] += usage.anonymous if role == GATEWAY else 0.0
        self.peaks = {name: max(value, self.peaks.get(name, 0.0)) for name, value in now.items()}


def private_mib(server: Server) -> float:
    """Return the gateway's memory now, without shared memory and pages of files."""
    return sum(memory(process.pid).anonymous for process in roles(server).get(GATEWAY, ()))


def _cpu_seconds(server: Server) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for role, processes in roles(server).items():
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                seconds[role] = seconds.get(role, 0.0) + times.user + times.system
    return seconds


def pids(server: Server) -> dict[str, set[int]]:
    """Return the server's processes by role."""
    return {role: {process.pid for process in processes} for role, processes in roles(server).items()}


def left_behind(server: Server, before: Mapping[str, set[int]], until: float) -> list[str]:
    """Return in words what is there that was not there *before*, as soon as nothing is or when *until* has come."""
    while True:
        try:
            remains = _left(server, before)
        except (OSError, LookupError, psutil.NoSuchProcess) as error:
            remains = [f"the server does not tell ({type(error).__name__})"]
        if not remains or time.monotonic() > until:
            return remains
        time.sleep(0.2)


def _left(server: Server, before: Mapping[str, set[int]]) -> list[str]:
    now = pids(server)
    remains = [f"{name} = {value:.0f}" for name in MUST_BE_ZERO if (value := server.metric(name))]
    remains += _connections(server)
    for role, numbers in now.items():
        if (more := len(numbers) - len(before.get(role, ()))) > 0:
            remains.append(f"{more} more processes: {role}")
    # Decode processes may be ended for what an image costs; nothing else may.
    for role in before.keys() - {"decode process"}:
        remains += [f"process replaced: {role}"] if before[role] - now.get(role, set()) else []
    if orphans := [name for name in segments(server) if name.split("-")[1] in _numbers(before) - _numbers(now)]:
        remains.append(f"{len(orphans)} segments of dead processes in /dev/shm")
    return remains


def _numbers(processes: Mapping[str, set[int]]) -> set[str]:
    return {str(pid) for numbers in processes.values() for pid in numbers}


def _connections(server: Server) -> list[str]:
    remote = [
        connection.raddr.ip
        for process in roles(server).get(GATEWAY, ())
        for connection in process.net_connections("tcp")
        if connection.raddr
    ]
    counts = {what: sum(ip.startswith(net) for ip in remote) for what, net in NETWORKS.items()}
    return [f"{count} open connections of {what}" for what, count in counts.items() if count]
