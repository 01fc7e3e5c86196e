"""The servers under test: vLLM as its users start it for speed, compiled and with its preloads, and `saccade serve`."""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine.cases import VLLM
from benchmarks.measured import MODEL, answers, free_ports, process, pss_mib

READY_SECONDS = 600.0
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Setup:
    """What a run was given. *vllm* is its virtual environment, *tcmalloc* the library it is to preload."""

    model: Path
    vllm: Path | None
    tcmalloc: Path | None
    logs: Path
    threads: int
    saccade_arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Running:
    """A server that answers, and the seconds until it did."""

    url: str
    pid: int
    start_seconds: float

    def pss_mib(self) -> float:
        """Return the proportional set size of the server and all below it: shared pages count once."""
        return pss_mib(self.pid)


@contextlib.contextmanager
def running(system: str, setup: Setup) -> Iterator[Running]:
    """Start *system* and stop it, with all that it started, at the end. Raises RuntimeError where it does not start."""
    command, environment = _vllm(setup) if system == VLLM else _saccade(setup)
    with started(system, command, environment, setup.logs) as server:
        yield server


@contextlib.contextmanager
def started(name: str, command: Sequence[str], environment: Mapping[str, str], logs: Path) -> Iterator[Running]:
    """Run *command* with a "--port" at its end, and stop it at the end. Raises RuntimeError if it does not answer."""
    (port,) = free_ports(1)
    url, begun = f"http://127.0.0.1:{port}", time.monotonic()
    words = [*command, "--port", str(port)]
    with (logs / f"{name}.log").open("ab") as log, process(words, log.fileno(), environment) as server:
        while not answers(url):
            if server.poll() is not None or time.monotonic() > begun + READY_SECONDS:
                raise RuntimeError(f"{name} did not become ready; its log tells more")
            time.sleep(POLL_SECONDS)
        yield Running(url, server.pid, round(time.monotonic() - begun, 1))


def _vllm(setup: Setup) -> tuple[list[str], dict[str, str]]:
    """Return vLLM's command: blocks of 32 tokens, for its CPU default of 128 caches no short prompt.

    Without --skip-mm-profiling, its start encodes an image of 16,384 tokens: over ten minutes at the 2b shape.
    """
    assert setup.vllm is not None
    environment = {
        **quiet(setup.threads),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "LD_PRELOAD": ":".join(map(str, preloads(setup))),
    }
    command = [str(setup.vllm / "bin" / "vllm"), "serve", str(setup.model), "--served-model-name", MODEL]
    command += ["--host", "127.0.0.1", "--dtype", "bfloat16", "--max-model-len", "8192"]
    command += ["--max-num-seqs", "16", "--enable-prefix-caching", "--block-size", "32"]
    command += [
        "--skip-mm-profiling",
        "--enable-prompt-tokens-details",
        "--limit-mm-per-prompt",
        '{"image":4,"video":0}',
    ]
    return command, environment


def preloads(setup: Setup) -> list[Path]:
    """Return the libraries that vLLM's guide for CPUs preloads: a faster malloc, and Intel's OpenMP."""
    assert setup.vllm is not None
    openmp = setup.vllm / "lib" / "libiomp5.so"
    return [path for path in (setup.tcmalloc, openmp) if path is not None and path.exists()]


def _saccade(setup: Setup) -> tuple[list[str], dict[str, str]]:
    """Return ours: all as by default but dtype; the engine takes its threads from OMP_NUM_THREADS."""
    command = [str(Path(sys.executable).with_name("saccade")), "serve", str(setup.model)]
    command += ["--served-model-name", MODEL, "--dtype", "bfloat16", "--no-summary"]
    return [*command, *setup.saccade_arguments], quiet(setup.threads)


def quiet(threads: int) -> dict[str, str]:
    """Return the environment of every system: so many threads, and no hub."""
    return {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
