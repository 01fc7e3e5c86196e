"""Copies a confined process's output into the gateway's log, up to a limit.

The process gets a pipe instead of the gateway's own output, because a process with an open terminal could do more than
print to it. A hostile process may print endlessly, and may print anything.
"""

import os
import threading
import time
from collections.abc import Callable

import structlog

MAX_LINE_BYTES = 1000
"""A longer line is logged as several."""

MAX_LINES = 100
"""The most lines of one process that are logged within PERIOD_SECONDS."""

PERIOD_SECONDS = 60.0
READ_BYTES = 4096

_logger = structlog.get_logger(__name__)


def log_lines(child: str) -> tuple[int, threading.Thread]:
    """Return a descriptor for a process's output, and the thread that logs its lines. The log calls it *child*.

    The caller closes the descriptor once the process has it. The thread ends after the process has ended.
    """
    reader, writer = os.pipe()
    thread = threading.Thread(target=ChildLines(child).follow, args=(reader,), name="child lines", daemon=True)
    thread.start()
    return writer, thread


class ChildLines:
    """Logs the lines of one process, or of several that share a pipe. The log calls them *child*."""

    def __init__(self, child: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._child = child
        self._clock = clock
        self._since = clock()
        self._num_logged = self._num_left_out = 0
        self._line = b""

    def add_bytes(self, piece: bytes) -> None:
        """Log the lines that end in *piece*, the next bytes that the process has printed."""
        *lines, rest = (self._line + piece).split(b"\n")
        # No line waits for its end beyond this many bytes, so that it takes no more memory.
        waits = len(rest) <= MAX_LINE_BYTES
        self._line = rest if waits else b""
        for line in lines if waits else [*lines, rest]:
            for start in range(0, len(line), MAX_LINE_BYTES):
                self._log(line[start : start + MAX_LINE_BYTES])

    def end_lines(self) -> None:
        """Log an unfinished last line, and how many lines were left out."""
        self.add_bytes(b"\n")
        self._tell()

    def follow(self, descriptor: int) -> None:
        """Log what comes through the pipe *descriptor*, blocking until its other end is closed; then close it."""
        with open(descriptor, "rb", buffering=0) as pipe:
            while piece := pipe.read(READ_BYTES):
                self.add_bytes(piece)
        self.end_lines()

    def _log(self, line: bytes) -> None:
        if self._clock() >= self._since + PERIOD_SECONDS:
            self._tell()
            self._since, self._num_logged = self._clock(), 0
        if self._num_logged == MAX_LINES:
            self._num_left_out += 1
        elif text := line.decode(errors="backslashreplace").strip():
            self._num_logged += 1
            _logger.warning("a confined process printed a line", process=self._child, line=text)

    def _tell(self) -> None:
        if self._num_left_out:
            _logger.warning("a confined process printed more lines", process=self._child, left_out=self._num_left_out)
        self._num_left_out = 0
