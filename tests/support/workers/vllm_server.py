"""A real vLLM for CPUs, started for a test from the environment that `make peers` made, and stopped with it."""

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server import free_port

from saccade.processes.parent_death import tied

READY_SECONDS = 900
BLOCK_SIZE = 32


@dataclass(frozen=True)
class VllmServer:
    """A vLLM that is ready, and publishes its cache events at the ZeroMQ endpoint *events*."""

    port: int
    events: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, path: str, body: dict[str, Any] | None = None, *, method: str | None = None) -> Any:
        """Return the JSON that it answers; raises urllib.error.HTTPError."""
        encoded = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", encoded, headers, method=method)
        with urllib.request.urlopen(request, timeout=120) as response:
            content = response.read()
        return json.loads(content) if content else None


def environment() -> Path:
    """Return vLLM's environment."""
    folder = os.environ.get("SACCADE_VLLM_VENV")
    if folder is None:
        raise RuntimeError("SACCADE_VLLM_VENV names no environment with vLLM; `make peers` makes one.")
    return Path(folder)


@contextlib.contextmanager
def vllm(model: Path, scratch: Path, *arguments: str, num_blocks: int = 512, name: str = "m") -> Iterator[VllmServer]:
    """Serve *model* by vLLM with prefix caching, cache events and tokens-in; *scratch* takes its log."""
    port, events_port, replay_port = free_port(), free_port(), free_port()
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        # vLLM listens only if `*` or `::` is in the address, and this is the loopback interface.
        "endpoint": f"tcp://[::ffff:127.0.0.1]:{events_port}",
        "replay_endpoint": f"tcp://127.0.0.1:{replay_port}",
        "topic": "kv@m",
    }
    command = [
        *(str(environment() / "bin/vllm"), "serve", str(model), "--served-model-name", name),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "1024"),
        *("--max-num-seqs", "8", "--enforce-eager", "--enable-prefix-caching", "--block-size", str(BLOCK_SIZE)),
        *("--num-gpu-blocks-override", str(num_blocks), "--enable-prompt-tokens-details", "--enable-scale-out"),
        *("--limit-mm-per-prompt", '{"image":4,"video":0}', "--kv-events-config", json.dumps(events), *arguments),
    ]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    log = scratch / "vllm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            tied(command, signal.SIGTERM), env=inherited | settings, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        server = VllmServer(port, f"tcp://127.0.0.1:{events_port}")
        _wait(server, process, log)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(server: VllmServer, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        with contextlib.suppress(OSError, urllib.error.URLError):
            server.call("/health")
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"vLLM did not start (exit code {process.poll()}):\n{log.read_text()[-4000:]}")
        time.sleep(0.2)
