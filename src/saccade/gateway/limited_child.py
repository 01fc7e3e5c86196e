"""Do one task on hostile input in a child, `python -m MODULE`, confined and with limits on time and memory.

Native code can take a core without end, take gigabytes for a file of kilobytes, or end its process; a thread cannot be
stopped. So two programs run in a child first what the gateway would otherwise trust: the probe of a model's files and
the trial of a grammar. The child gets its limits and its task as one message on its standard input, and writes its
result on its standard output.
"""

import contextlib
import math
import os
import resource
import select
import subprocess
import sys
import time
from typing import NamedTuple, TypeVar

import msgspec

from saccade.gateway import confinement

T = TypeVar("T")


class ChildLimits(msgspec.Struct, frozen=True):
    """*seconds* of the processor, and *memory_bytes* beyond what the child has once it has imported its modules."""

    seconds: float
    memory_bytes: int


class Ending(NamedTuple):
    """How a child ended: its *output*, its exit *status*, negative for a signal, and whether it ended *in_time*."""

    output: bytes
    status: int
    in_time: bool


class LimitedChild:
    """One child that runs *module* on *task*, a value that msgpack can encode."""

    def __init__(self, module: str, task: object, limits: ChildLimits) -> None:
        self._module = module
        self._message = msgspec.msgpack.encode((limits, task))
        self._process: subprocess.Popen[bytes] | None = None
        self.is_stopped = False

    def stop(self) -> None:
        """End the child. Any thread may call it, at any time; a child that has not begun ends at once when it does."""
        self.is_stopped = True
        if self._process is not None:
            self._process.kill()

    def run(self, wait_seconds: float, max_bytes: int) -> Ending:
        """Block until the child has ended, has written *max_bytes*, or *wait_seconds* have passed; then kill it."""
        descriptor = os.memfd_create("saccade-child-task")
        with open(descriptor, "wb") as file:
            file.write(self._message)
            file.flush()
            os.lseek(descriptor, 0, os.SEEK_SET)
            process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=descriptor,
                stdout=subprocess.PIPE,
                env=confinement.environment(os.environ),
            )
        with process:
            self._process = process
            try:
                # stop() may have come before it could see the child.
                if self.is_stopped:
                    process.kill()
                output, in_time = _output_of(process, time.monotonic() + wait_seconds, max_bytes)
            finally:
                process.kill()
        return Ending(output, process.returncode, in_time)


def _output_of(process: subprocess.Popen[bytes], end: float, max_bytes: int) -> tuple[bytes, bool]:
    """Return the output of *process*, *max_bytes* at most, and whether it ended before the time *end*."""
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


def begin(kind: type[T]) -> tuple[ChildLimits, T]:
    """Return the limits and the task of this process, a child of which all modules are imported; confine it."""
    limits, task = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=tuple[ChildLimits, kind])  # type: ignore[valid-type]
    seconds = math.ceil(limits.seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    # Libraries load parts of themselves when they are first used.
    confinement.confine(limits.memory_bytes, may_import=True)
    return limits, task
