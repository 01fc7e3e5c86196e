"""Formats tracebacks without error messages, since the message of an unforeseen error may quote a request."""

import sys
import traceback
from types import TracebackType

from saccade.errors import SaccadeError

ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None]


def traceback_of(error: BaseException) -> str:
    """Return the traceback of *error* and of the errors that led to it, the earliest first.

    Each error is shown by its class. An OSError also shows the operating system's message, and a SaccadeError its
    `reason`.
    """
    texts, ids, one = list[str](), set[int](), error
    while id(one) not in ids:
        ids.add(id(one))
        frames = "".join(traceback.format_tb(one.__traceback__))
        texts.append(f"Traceback (most recent call last):\n{frames}{_named(one)}")
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__) or one
    return "\n\nThis led to:\n\n".join(reversed(texts))


def _named(error: BaseException) -> str:
    words = error.strerror if isinstance(error, OSError) else error.reason if isinstance(error, SaccadeError) else ""
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def hide_messages() -> None:
    """From now on, leave error messages out of the traceback when an error ends this process."""

    def write(_kind: type[BaseException], error: BaseException, _frames: TracebackType | None) -> None:
        sys.stderr.write(f"{traceback_of(error)}\n")

    sys.excepthook = write
