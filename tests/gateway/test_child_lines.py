"""What a confined process prints is logged, whatever it is, and never without end."""

import os
from collections.abc import Sequence

import structlog
from tables import table

from saccade.gateway.child_lines import MAX_LINE_BYTES, MAX_LINES, PERIOD_SECONDS, ChildLines, log_lines

LONG = b"x" * MAX_LINE_BYTES


def logged(pieces: Sequence[bytes], times: Sequence[float] = (0.0,)) -> list[str | int]:
    """Return the lines, and the numbers of lines left out, for *pieces* that come at *times*."""
    now = 0.0
    lines = ChildLines("child", lambda: now)
    with structlog.testing.capture_logs() as entries:
        for index, piece in enumerate(pieces):
            now = times[min(index, len(times) - 1)]
            lines.add_bytes(piece)
        lines.end_lines()
    return [entry.get("line", entry.get("left_out")) for entry in entries]


@table(
    "pieces, expected",
    [
        ([b"a\nb\n"], ["a", "b"]),
        ([b"a", b"b\n", b"c"], ["ab", "c"]),
        ([b"\n \n\n"], []),
        ([b"\xff\x1b[2J\n"], ["\\xff\x1b[2J"]),
        ([LONG, b"x", b"y\n"], [LONG.decode(), "x", "y"]),
        ([LONG * 3 + b"\n"], [LONG.decode()] * 3),
        ([b"a\n" * MAX_LINES], ["a"] * MAX_LINES),
        ([b"a\n" * (MAX_LINES + 7)], [*["a"] * MAX_LINES, 7]),
    ],
    ids=["lines", "pieces", "blanks", "no text", "no end", "too long", "just enough", "too many"],
)
def test_lines_are_logged_within_limits(pieces: list[bytes], expected: list[str | int]) -> None:
    assert logged(pieces) == expected


def test_a_flood_leaves_later_lines_in_the_log() -> None:
    flood = b"a\n" * (MAX_LINES + 7)
    assert logged([flood, b"b\n"], [0.0, PERIOD_SECONDS]) == [*["a"] * MAX_LINES, 7, "b"]


def test_memory_is_bounded_while_no_line_ends() -> None:
    with structlog.testing.capture_logs() as entries:
        lines = ChildLines("child")
        for _ in range(1000):
            lines.add_bytes(LONG)
    assert len(entries) == MAX_LINES
    assert all(len(entry["line"]) <= MAX_LINE_BYTES for entry in entries)


def test_thread_ends_with_the_last_holder_of_the_pipe() -> None:
    with structlog.testing.capture_logs() as entries:
        writer, thread = log_lines("child")
        os.write(writer, b"last words")
        os.close(writer)
        thread.join(60)
    assert not thread.is_alive()
    assert [(entry["process"], entry["line"]) for entry in entries] == [("child", "last words")]
