"""Writes log lines on a separate thread, so that a full pipe on stderr blocks no other thread."""

import contextlib
import os
import queue
import select
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_BYTES = 4 << 20
"""The most that may wait to be written: about 10,000 lines."""

GATHER_SECONDS = 0.05
"""How long the thread collects lines before it writes them: waking it for each line would cost more than the line."""

FLUSH_SECONDS = 2.0


class LineWriter:
    """Writes whole lines to *descriptor*. write_line() never blocks; if the queue is full, it drops the line.

    *tell_dropped* returns a line that says how many lines were dropped; the line is written once writing works
    again. A full disk may cut a line short. The next write then begins with a newline, so a reader of JSON loses only
    one line.
    """

    def __init__(self, descriptor: int, tell_dropped: Callable[[int], bytes], max_bytes: int = MAX_BYTES) -> None:
        self.num_dropped = 0
        self._descriptor = descriptor
        self._tell_dropped = tell_dropped
        self._max_bytes = max_bytes
        self._num_told = 0
        self._ends_in_half_a_line = False
        self._lines: list[bytes] = []
        self._num_bytes = 0
        # A finalizer may log while its thread is inside write_line(): both of these allow that.
        self._lock = threading.RLock()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="log writer", daemon=True).start()

    def write_line(self, line: bytes) -> None:
        """Queue *line*, which ends in a newline."""
        with self._lock:
            if self._num_bytes + len(line) > self._max_bytes:
                self.num_dropped += 1
                return
            self._lines.append(line)
            self._num_bytes += len(line)
            is_first = len(self._lines) == 1
        if is_first:
            self._wakes.put(None)

    def flush(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Wait up to *seconds* until all lines are written; return whether they are."""
        self._wakes.put(None)
        deadline = time.monotonic() + seconds
        while self._num_bytes and time.monotonic() < deadline:
            time.sleep(0.005)
        return not self._num_bytes

    def _run(self) -> None:
        while True:
            self._wakes.get()
            with contextlib.suppress(queue.Empty):
                # A second item comes from flush().
                self._wakes.get(timeout=GATHER_SECONDS)
            self._write_all()

    def _write_all(self) -> None:
        with self._lock:
            lines, self._lines = self._lines, []
        content = b"".join(lines)
        num_left = self._put(content)
        with self._lock:
            self._num_bytes -= len(content)
            self.num_dropped += content.count(b"\n", len(content) - num_left)
        if (
            not num_left
            and (num_new := self.num_dropped - self._num_told)
            and not self._put(self._tell_dropped(num_new))
        ):
            self._num_told += num_new

    def _put(self, content: bytes) -> int:
        """Write all of *content*, however slow the reader is.

        Return how many bytes could not be written, because the descriptor has lost its reader or its disk is full.
        """
        whole = b"\n" + content if content and self._ends_in_half_a_line else content
        left = memoryview(whole)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:
                # Another process has set the terminal or pipe that it shares with this one to non-blocking.
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()
            except OSError:
                break
            self._ends_in_half_a_line = whole[-len(left) - 1] != ord("\n")
        return min(len(left), len(content))


@dataclass(frozen=True)
class LogOutput:
    """The destination of a process's log lines, their lowest *level*, and whether the destination is a terminal.

    With *has_short_lines*, each request gets a short line for people to read, whatever the level. *num_lines*
    counts lines by the name of their level.
    """

    writer: LineWriter
    level: int
    is_terminal: bool
    has_short_lines: bool = False
    num_lines: Counter[str] = field(default_factory=Counter)
