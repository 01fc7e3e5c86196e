"""Runs one task in a child process that is limited in time and memory, and confined after its imports."""

import contextlib
import math
import os
import resource
import select
import signal
import subprocess
import sys
import time
from typing import NamedTuple, TypeVar

import msgspec

from saccade.gateway.child_lines import log_lines
from saccade.gateway.confinement import confine, environment
from saccade.processes.parent_death import tie_to_parent

T = TypeVar("T")


class ChildLimits(msgspec.Struct, frozen=True):
    """A child's limits: *seconds* of CPU time, and *memory_bytes* on top of what it uses after its imports."""

    seconds: float
    memory_bytes: int


class Ending(NamedTuple):
    """How a child ended.

    - output: what it wrote to standard output.
    - status: its exit status; negative for a signal.
    - in_time: whether it ended, or wrote all the output that it may, in time.
    - was_killed: whether something else killed it, such as the kernel when the machine ran out of memory. Its own
          limits end it with other signals, so its task is not the cause.
    """

    output: bytes
    status: int
    in_time: bool
    was_killed: bool = False


class LimitedChild:
    """One child, `python -m MODULE`, that runs *module* on *task*, a value that msgpack can encode.

    Native code can use a core forever, take gigabytes for a file of kilobytes, or crash its process, and a thread
    cannot be stopped. So a child is the first to try two kinds of input: a model's files and a request's grammar. The
    child reads its limits and its task as one message from standard input, and writes its result to standard output.
    Its standard error is logged.
    """

    def __init__(self, module: str, task: object, limits: ChildLimits) -> None:
        self._module = module
        self._message = msgspec.msgpack.encode((limits, task))
        self._process: subprocess.Popen[bytes] | None = None
        self.is_stopped = False

    def stop(self) -> None:
        """Kill the child. Any thread may call this at any time; a child that starts later is killed at once."""
        self.is_stopped = True
        if self._process is not None:
            self._process.kill()

    def run_child(self, wait_seconds: float, max_bytes: int) -> Ending:
        """Block until the child ends or has written *max_bytes*, but at most *wait_seconds*; then kill it."""
        descriptor = os.memfd_create("saccade-child-task")
        with open(descriptor, "wb") as file:
            file.write(self._message)
            file.flush()
            os.lseek(descriptor, 0, os.SEEK_SET)
            errors, thread = log_lines(self._module)
            with open(errors, "wb"):
                process = subprocess.Popen(
                    [sys.executable, "-m", self._module],
                    stdin=descriptor,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=environment(os.environ),
                    start_new_session=True,
                )
        with process:
            self._process = process
            try:
                # stop() may have run before the child was visible to it.
                if self.is_stopped:
                    process.kill()
                output, in_time = _output_of(process, time.monotonic() + wait_seconds, max_bytes)
                was_killed = process.poll() == -signal.SIGKILL and not self.is_stopped
            finally:
                process.kill()
        thread.join()
        return Ending(output, process.returncode, in_time, was_killed)


def _output_of(process: subprocess.Popen[bytes], end: float, max_bytes: int) -> tuple[bytes, bool]:
    """Return at most *max_bytes* of *process*'s output, and whether it ended or wrote that many before *end*."""
    output = bytearray()
    if process.stdout is None:
        return b"", True
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    while len(output) < max_bytes and poll.poll(max(0.0, end - time.monotonic()) * 1000):
        piece = os.read(process.stdout.fileno(), max_bytes - len(output))
        if not piece:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
                return bytes(output), True
            break
        output += piece
    return bytes(output), len(output) == max_bytes


def begin_task(kind: type[T]) -> tuple[ChildLimits, T]:
    """Read this child's limits and task, confine the child, and return limits and task. Call this after all imports."""
    limits, task = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=tuple[ChildLimits, kind])  # type: ignore[valid-type]
    # In a session of its own, no hangup of a terminal ends it.
    tie_to_parent(signal.SIGKILL)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    seconds = math.ceil(limits.seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    # Libraries load more of their parts at first use.
    confine(limits.memory_bytes, may_import=True)
    return limits, task
