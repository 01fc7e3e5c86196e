"""Tries a model's files in a limited child before the gateway loads them.

A tokenizer.json can expand to gigabytes, and its patterns or a chat template can run forever. The gateway loads the
files only if the child succeeds. The child writes a line before it uses each file, and one with the result.
"""

import os
import signal
import sys

import msgspec
import structlog

from saccade.errors import StartupError
from saccade.gateway.limited_child import ChildLimits, LimitedChild, begin_task
from saccade.gateway.served_models.served_model import ServedModel
from saccade.protocol.description import ModelFiles

PROGRAM = "saccade.gateway.served_models.model_probe"
MAX_ANSWER_BYTES = 64 << 10
SAMPLE_CHARACTERS = 8192
SAMPLES = ("a", " ", "0", "\n", "-", "é", "图", "Ab 1, ")
"""Repeated to SAMPLE_CHARACTERS: a pattern of exponential time mostly takes it on repetitions."""

LIMITS = ChildLimits(seconds=30.0, memory_bytes=2 << 30)


class _Task(msgspec.Struct, frozen=True):
    """The child's input: the model to load."""

    name: str
    files: ModelFiles


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the child's output: the child begins a file, refuses the model, or has passed all files."""

    begins: str | None = None
    refused: str | None = None
    passed: bool = False


class ModelProbe:
    """One trial of a model's files. run_child() blocks; stop() ends it early, from any thread."""

    def __init__(self, name: str, files: ModelFiles, limits: ChildLimits = LIMITS) -> None:
        self._child = LimitedChild(PROGRAM, _Task(name, files), limits)
        self._limits = limits
        self.stop = self._child.stop

    def run_child(self) -> None:
        """Load the files in a child. If they fail, raise a StartupError that names the file and the cause.

        If something else kills the child, the files may not be the cause, so a second child loads them.
        """
        output, status, in_time, was_killed = self._child.run_child(self._limits.seconds, MAX_ANSWER_BYTES)
        if was_killed:
            output, status, in_time, _ = self._child.run_child(self._limits.seconds, MAX_ANSWER_BYTES)
        try:
            lines = [msgspec.json.decode(line, type=_Line) for line in output.splitlines()]
        except msgspec.DecodeError:
            lines = []
        if any(line.passed for line in lines):
            return
        refusal = next((line.refused for line in lines if line.refused), None)
        if refusal is not None:
            raise StartupError(refusal)
        files = [line.begins for line in lines if line.begins]
        file, limits = files[-1] if files else "The model's files", self._limits
        if not in_time or status == -signal.SIGXCPU:
            raise StartupError(f"{file}: loading takes longer than {limits.seconds:g} seconds; the file is refused.")
        if status >= 0:
            raise StartupError(f"{file}: loading fails (exit code {status}); the file is damaged or not supported.")
        raise StartupError(
            f"{file}: loading ends its process by signal {-status}; the file is damaged, or takes more than "
            f"{limits.memory_bytes >> 20} MiB of memory."
        )


def try_files(task: _Task, limits: ChildLimits) -> _Line:
    """Load a model's files in this process, and use them once. Return the last line of the output."""
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
        mib = limits.memory_bytes >> 20
        return _Line(refused=f"{file}: loading takes more than {mib} MiB of memory; the file is refused.")
    except RecursionError:
        return _Line(refused=f"{file} is nested too deeply.")
    return _Line(passed=True)


def _say(line: _Line) -> None:
    # Not through sys.stdout, whose buffer is lost if the process is killed.
    os.write(sys.stdout.fileno(), msgspec.json.encode(line) + b"\n")


def main() -> None:
    limits, task = begin_task(_Task)
    # Log lines would mix with the lines of the answer. The gateway writes the same when it loads the files.
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    _say(try_files(task, limits))


if __name__ == "__main__":
    main()
