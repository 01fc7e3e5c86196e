"""Try a model's files in a limited child before the gateway loads them.

A tokenizer.json can unfold to gigabytes, its patterns and a chat template can run without end, and native code that
fails to get memory ends its process. So ModelProbe first loads the files in a child, `python -m
saccade.gateway.served_models.model_probe`, confined as decode processes are, with limits on time and memory.
The gateway loads the files only where the child succeeds.

The child gets the files as one message on its standard input, and writes one line on its standard output when it
begins with a file, and one with the result.
"""

import math
import os
import resource
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import msgspec
import structlog

from saccade.errors import StartupError
from saccade.gateway import confinement
from saccade.gateway.served_models.served_model import ServedModel
from saccade.protocol.description import ModelFiles

PROGRAM = "saccade.gateway.served_models.model_probe"
MAX_ANSWER_BYTES = 64 << 10
SAMPLE_CHARACTERS = 8192
SAMPLES = ("a", " ", "0", "\n", "-", "é", "图", "Ab 1, ")
"""Repeated to SAMPLE_CHARACTERS: where a pattern takes exponential time, it mostly does so over repetitions."""


@dataclass(frozen=True)
class ProbeLimits:
    """What loading a model's files may take. *memory_bytes* is beyond the child's imports and the files themselves."""

    seconds: float = 30.0
    memory_bytes: int = 2 << 30


class _Task(msgspec.Struct, frozen=True):
    """What the child is to load."""

    name: str
    files: ModelFiles
    limits: ProbeLimits


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the child: it begins with a file, it refuses the model, or all files passed."""

    begins: str | None = None
    refused: str | None = None
    passed: bool = False


class ModelProbe:
    """One try of a model's files. run() blocks; stop() may be called from another thread, and ends it early."""

    def __init__(self, name: str, files: ModelFiles, limits: ProbeLimits | None = None) -> None:
        self._task = _Task(name, files, limits or ProbeLimits())
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def run(self) -> None:
        """Load the files in a child. Raises StartupError, which names the file and the cause, where they fail."""
        given = os.memfd_create("saccade-model-files")
        with open(given, "wb") as file:
            file.write(msgspec.msgpack.encode(self._task))
            file.flush()
            os.lseek(given, 0, os.SEEK_SET)
            process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM],
                stdin=given,
                stdout=subprocess.PIPE,
                env=confinement.environment(os.environ),
            )
        with process:
            self._process = process
            try:
                if self._is_stopped:
                    process.kill()
                said, in_time = _output_of(process, self._task.limits.seconds)
            finally:
                process.kill()
        self._judge(said, in_time, process.returncode)

    def stop(self) -> None:
        """End the child, if there is one."""
        self._is_stopped = True
        if self._process is not None:
            self._process.kill()

    def _judge(self, said: bytes, in_time: bool, status: int) -> None:
        """Raise StartupError unless the child reported that all files passed."""
        try:
            lines = [msgspec.json.decode(line, type=_Line) for line in said.splitlines()]
        except msgspec.DecodeError:
            lines = []
        if any(line.passed for line in lines):
            return
        refused = next((line.refused for line in lines if line.refused), None)
        if refused is not None:
            raise StartupError(refused)
        begun = [line.begins for line in lines if line.begins]
        file, limits = begun[-1] if begun else "The model's files", self._task.limits
        if not in_time or status == -signal.SIGXCPU:
            raise StartupError(f"{file}: loading takes longer than {limits.seconds:g} seconds; the file is refused.")
        if status >= 0:
            raise StartupError(f"{file}: loading fails (exit code {status}); the file is damaged or not supported.")
        raise StartupError(
            f"{file}: loading ends its process by signal {-status}; the file is damaged, or takes more than "
            f"{limits.memory_bytes >> 20} MiB of memory."
        )


def _output_of(process: subprocess.Popen[bytes], seconds: float) -> tuple[bytes, bool]:
    """Return the output of *process* until it ends, and whether it ended within *seconds*."""
    if process.stdout is None:
        return b"", True
    said, end = b"", time.monotonic() + seconds
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    while len(said) < MAX_ANSWER_BYTES:
        if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            return said, False
        piece = os.read(process.stdout.fileno(), MAX_ANSWER_BYTES)
        if not piece:
            process.wait()
            return said, True
        said += piece
    return said, True


def try_files(task: _Task) -> _Line:
    """Load a model's files and use them once, in this process; return the last line of the output."""
    file = "The model's files"

    def begin(name: str) -> None:
        nonlocal file
        file = name
        _say(_Line(begins=name))

    try:
        served = ServedModel.from_files(task.name, task.files, 0, begin)
        begin(served.tokenizer_file)
        for sample in SAMPLES:
            text = sample * (SAMPLE_CHARACTERS // len(sample))
            served.tokenizer.decode(served.tokenizer.encode_text(text))
    except StartupError as error:
        return _Line(refused=error.message)
    except MemoryError:
        mib = task.limits.memory_bytes >> 20
        return _Line(refused=f"{file}: loading takes more than {mib} MiB of memory; the file is refused.")
    except RecursionError:
        return _Line(refused=f"{file} is nested too deeply.")
    return _Line(passed=True)


def _say(line: _Line) -> None:
    # Not through sys.stdout, whose buffer a process that is killed takes along.
    os.write(sys.stdout.fileno(), msgspec.json.encode(line) + b"\n")


def main() -> None:
    task = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=_Task)
    seconds = math.ceil(task.limits.seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    # Jinja and the codecs load parts of themselves when they are first used.
    confinement.confine(task.limits.memory_bytes, may_import=True)
    # Log lines would stand between the lines of the answer. The gateway writes the same when it loads the files.
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    _say(try_files(task))


if __name__ == "__main__":
    main()
