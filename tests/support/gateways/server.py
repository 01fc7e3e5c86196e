"""Run the real `saccade serve` for a test, as a user would, and stop it."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import openai
import psutil
from chats import openai_client

READY_SECONDS = 120
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Server:
    """A running `saccade serve`."""

    port: int
    process: subprocess.Popen[bytes]
    key: str = "none"
    log: Path | None = None
    """What all its processes wrote, where it was asked for."""

    @property
    def url(self) -> str:
        """The server's root, without /v1."""
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: object) -> openai.OpenAI:
        """An openai client that does not retry."""
        return openai_client(self.url, **{"api_key": self.key, **options})

    @property
    def model(self) -> str:
        """The name it serves."""
        return self.client().models.list().data[0].id

    @cached_property
    def name(self) -> str:
        """The same, asked once."""
        return self.model

    def tree(self) -> list[psutil.Process]:
        """The server's process and everything below it."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def engine(self) -> psutil.Process:
        """The engine's process."""
        return next(process for process in self.tree() if "saccade.engine" in process.cmdline())

    def metrics(self) -> str:
        """All metrics, in Prometheus' text format."""
        request = urllib.request.Request(f"{self.url}/metrics", headers={"authorization": f"Bearer {self.key}"})
        with urllib.request.urlopen(request, timeout=10) as response:
            return str(response.read().decode())

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples over its other labels."""
        lines = [line for line in self.metrics().splitlines() if line.split("{")[0].split(" ")[0] == name]
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in wanted)]
        if not values:
            raise LookupError(f"no metric {name}")
        return sum(values)

    def settled(self, name: str) -> float:
        """The metric once the engine's counters, which arrive a few times a second, stand still."""
        value, seen = self.metric(name), -1.0
        while value != seen:
            time.sleep(0.6)
            value, seen = self.metric(name), value
        return value

    def is_ready(self) -> bool:
        """Whether /ready answers 200."""
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def wait_until_ready(self, seconds: float = READY_SECONDS) -> None:
        """Wait for /ready; raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"not ready; exit code {self.process.poll()}")
            time.sleep(0.05)


def slots(processes: Iterable[psutil.Process]) -> set[str]:
    """The names of the shared-memory segments that *processes* own, or owned."""
    owners = {str(process.pid) for process in processes}
    return {path.name for path in SHARED_MEMORY.glob("saccade-*") if path.name.split("-")[1] in owners}


def free_port() -> int:
    """A port nobody listens on, below those that the kernel gives to connections and would take in between."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def serving(
    *arguments: str,
    key: str = "none",
    before: Sequence[str] = (),
    log: Path | None = None,
    word: Literal["serve", "gateway"] = "serve",
) -> Iterator[Server]:
    """Start `saccade serve`, or another *word*, with *arguments*, by the command *before* where there is one; wait until
    it is ready, and stop it. Unless told otherwise `serve` computes in float32. What it writes on stderr goes to *log*.
    """
    port = free_port()
    exact = () if "--dtype" in arguments or word != "serve" else ("--dtype", "float32")
    command = [*before, sys.executable, "-m", "saccade.cli.main", word, *arguments, *exact, "--port", str(port)]
    stderr = log.open("wb") if log is not None else None
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=stderr, start_new_session=True)
    server = Server(port, process, key, log)
    try:
        server.wait_until_ready()
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            if stderr is not None:
                stderr.close()


@contextlib.contextmanager
def program(*words: str, before: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """Run `saccade WORDS`, by the command *before* where there is one."""
    command = [*before, sys.executable, "-m", "saccade.cli.main", *words]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)
