"""The gateways under test, each with a worker of its own behind it."""

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measured import MODEL, answers, free_ports, process, pss_mib

READY_SECONDS = 60.0
SMG, TOKENSPEED, NATIVE = "smg", "saccade, TokenSpeed wire", "saccade, native wire"
SYSTEMS = (SMG, TOKENSPEED, NATIVE)


@dataclass(frozen=True)
class Setup:
    """What a run was given: SMG's executable, the folder with libturbojpeg, more arguments for our gateway."""

    smg: Path | None
    turbojpeg: Path | None
    logs: Path
    gateway_arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Running:
    """A gateway that answers, and the worker behind it."""

    url: str
    gateway: subprocess.Popen[bytes]
    worker: subprocess.Popen[bytes]

    def pss_mib(self) -> float:
        """Return the proportional set size of the gateway and all below it: shared pages count once."""
        return pss_mib(self.gateway.pid)

    def metrics(self) -> str:
        """Return our gateway's metrics in Prometheus' format."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            return str(response.read().decode())


@contextlib.contextmanager
def running(system: str, setup: Setup, folder: Path, *, caches: bool) -> Iterator[Running]:
    """Start *system* in front of a worker that serves the model in *folder*; stop both at the end."""
    worker_port, port, metrics_port = free_ports(3)
    kind = "native_worker" if system == NATIVE else "tokenspeed_worker"
    worker_command = [sys.executable, "-m", f"benchmarks.gateway.{kind}", str(folder), "--model", MODEL]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((setup.logs / f"{system.replace(', ', '-').replace(' ', '-')}.log").open("ab"))
        worker = stack.enter_context(process([*worker_command, "--port", str(worker_port)], log.fileno(), {}))
        wait(worker, lambda: _listens(worker_port))
        if system == SMG:
            command, environment = _smg(setup, worker_port, port, metrics_port, caches=caches)
        else:
            command, environment = _saccade(system, setup, worker_port, port, caches=caches), {}
        gateway = stack.enter_context(process(command, log.fileno(), environment))
        started = Running(f"http://127.0.0.1:{port}", gateway, worker)
        wait(gateway, lambda: answers(started.url))
        yield started


def _smg(
    setup: Setup, worker_port: int, port: int, metrics_port: int, *, caches: bool
) -> tuple[list[str], dict[str, str]]:
    """Return SMG as its users would start it for the least work: shared memory, libturbojpeg, few log lines."""
    command = [str(setup.smg), "launch", "--backend", "tokenspeed"]
    command += ["--worker-urls", f"grpc://127.0.0.1:{worker_port}", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port), "--log-level", "warn"]
    command += ["--multimodal-tensor-transport", "auto"]
    command += ["--mm-pixel-cache-mb", "2048"] if caches else []
    return command, {"LD_LIBRARY_PATH": str(setup.turbojpeg)} if setup.turbojpeg else {}


def _saccade(system: str, setup: Setup, worker_port: int, port: int, *, caches: bool) -> list[str]:
    scheme = "grpc" if system == NATIVE else "tokenspeed"
    command = [str(Path(sys.executable).with_name("saccade")), "gateway", "--log-level", "WARNING"]
    command += ["--worker-url", f"{scheme}://127.0.0.1:{worker_port}", "--host", "127.0.0.1", "--port", str(port)]
    command += [] if caches else ["--mm-processor-cache-gb", "0"]
    return [*command, *setup.gateway_arguments]


def wait(started: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    """Wait until *condition* holds. Raises RuntimeError where the process ends, or takes too long."""
    deadline = time.monotonic() + READY_SECONDS
    while not condition():
        if started.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{started.args} did not become ready; its log tells more")
        time.sleep(0.1)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True
