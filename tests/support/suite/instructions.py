"""Counts Python's instructions: work that is measured without a clock."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def counting_instructions() -> Iterator[Callable[[], int]]:
    """Count the instructions of Python that this thread executes in the block."""
    number = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal number
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        number += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: number
    finally:
        sys.settrace(before)
