"""What is measured where: processes started and stopped, whether they answer, what they hold; machine and commit."""

import base64
import contextlib
import json
import os
import platform
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
MODEL = "tiny-vlm"
MIB = 1 << 20
STOP_SECONDS = 30.0


def end_with_what_was_started() -> None:
    """Leave every block when this program is told to end, so that what it started ends with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@contextlib.contextmanager
def process(command: Sequence[str], log: int, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run *command* until the block ends; whatever it started ends with it."""
    started = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env={**os.environ, **environment})
    try:
        yield started
    finally:
        below = psutil.Process(started.pid).children(recursive=True) if started.poll() is None else []
        started.send_signal(signal.SIGTERM)
        try:
            started.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
        for left in psutil.wait_procs(below, timeout=5.0)[1]:
            left.kill()


def answers(url: str) -> bool:
    """Whether a chat without images is answered."""
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 64}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(chat).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return b"choices" in response.read()
    except (urllib.error.URLError, OSError):
        return False


def png_url(png: bytes) -> str:
    """Return *png* as a data URL."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def pss_mib(pid: int) -> float:
    """Return the proportional set size of a process and all below it: shared pages count once."""
    root = psutil.Process(pid)
    total = 0
    for one in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += one.memory_full_info().pss
    return total / MIB


def machine() -> str:
    """Return the processor's name and the number of cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {os.cpu_count()} cores"


def commit() -> str:
    """Return the commit that is measured, with `-dirty` if other files than results and pages have been changed.

    A copy without a repository, as scripts/gpu makes it, has its commit in a file; without one the commit is empty.
    """
    if (copied := ROOT / "COMMIT").exists():
        return copied.read_text().strip()
    if shutil.which("git") is None:
        return ""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    # A program writes its results while others are still to be measured.
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results", ":!docs")
    return git("rev-parse", "--short=9", "HEAD") + ("-dirty" if changed else "")


def write(out: Path, module: str, rows: Sequence[Mapping[str, Any]], **facts: object) -> None:
    """Write *rows* as JSON, with machine, commit, the command that runs *module*, and more *facts*."""
    # Where things lie on this machine is nobody's business.
    command = shlex.join(["python", "-m", module, *(Path(word).name for word in sys.argv[1:])])
    everything = {"machine": machine(), "commit": commit(), "command": command, **facts, "rows": rows}
    out.write_text(json.dumps(everything, indent=1) + "\n")
