"""Two hosts on one machine: each is a network namespace and a mount namespace with a /dev/shm of its own."""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

SHARED = "ip link set lo up && echo ready && exec sleep 600"
OWN = f"mount -t tmpfs none /dev/shm && {SHARED}"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
NAMES = ("host-one", "host-two")


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield for each host the command that runs another one there; they reach each other at ADDRESSES."""
    with contextlib.ExitStack() as running:
        outer = running.enter_context(_held(("unshare", "-Urmn", "sh", "-c", SHARED)))
        inside = enter(outer, "--user", "--net", "--mount", "--preserve-credentials")
        first, second = (
            running.enter_context(_held((*inside, "unshare", "--mount", "--net", "sh", "-c", OWN))) for _ in range(2)
        )
        # nsenter and unshare become the command that they run, so these are the processes in the namespaces.
        ends = [("name", name, "netns", str(pid)) for name, pid in zip(NAMES, (first, second), strict=True)]
        subprocess.run((*inside, "ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]), check=True)
        hosts = tuple(enter(pid, "--user", "--net", "--mount", "--preserve-credentials") for pid in (first, second))
        for host, name, address in zip(hosts, NAMES, ADDRESSES, strict=True):
            subprocess.run((*host, "ip", "addr", "add", f"{address}/24", "dev", name), check=True)
            subprocess.run((*host, "ip", "link", "set", name, "up"), check=True)
        yield hosts[0], hosts[1]


def enter(pid: int, *kinds: str) -> tuple[str, ...]:
    """Return the command that runs another one in the namespaces of a process."""
    return ("nsenter", "--target", str(pid), f"--wdns={Path.cwd()}", *kinds)


@contextlib.contextmanager
def _held(command: Sequence[str]) -> Iterator[int]:
    """Run *command*, which holds namespaces and says when it is ready; yield its process id."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
