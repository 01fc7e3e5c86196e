"""Configures a process's log lines: their format and their destination.

No line contains data that a client sent.
"""

import atexit
import logging
import re
import sys
from datetime import UTC, datetime
from types import TracebackType
from typing import TextIO

import msgspec
import structlog

from saccade.log_writer import LineWriter, LogOutput
from saccade.tracebacks import traceback_of

_ARGUMENT = re.compile(r"%[-.0-9]*[a-z]")


def configure_logging(level: int = logging.INFO, *, serves_clients: bool = False) -> LogOutput:
    """Send all log lines to stderr: as text on a terminal, otherwise as JSON. Call it once, when a process starts.

    A thread writes the lines. When the process ends, it waits up to FLUSH_SECONDS for the thread to write the rest. In
    a process that *serves_clients*, tracebacks leave out the errors' messages, which may contain a client's text.
    """
    is_terminal = sys.stderr.isatty()
    writer = LineWriter(sys.stderr.fileno(), _text_of_dropped if is_terminal else _json_of_dropped)
    atexit.register(writer.flush)
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        # First, so that a line below the level costs nothing.
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    plain, format_exc_info = structlog.dev.plain_traceback, structlog.processors.format_exc_info
    last: list[structlog.types.Processor] = (
        [_printable, structlog.dev.ConsoleRenderer(exception_formatter=_write_traceback if serves_clients else plain)]
        if is_terminal
        else [
            structlog.processors.ExceptionRenderer(_traceback) if serves_clients else format_exc_info,
            _event_first,
            structlog.processors.JSONRenderer(separators=(",", ":")),
        ]
    )
    handler = logging.StreamHandler(_Lines(writer))
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared if is_terminal else [*shared, _with_worker],
            pass_foreign_args=not is_terminal,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    # Its warnings are about wrong requests: any client could fill the log.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    output = LogOutput(writer, level, is_terminal)
    handler.addFilter(_Counting(output))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    return output


def log_warnings() -> None:
    """Send only warnings and errors to stderr, unless the program has configured structlog.

    By default, structlog prints everything to stdout.
    """
    if not structlog.is_configured():
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        )


def _traceback(exc_info: structlog.typing.ExcInfo) -> str:
    return traceback_of(exc_info[1])


def _write_traceback(stream: TextIO, info: structlog.typing.ExcInfo) -> None:
    stream.write(f"\n{traceback_of(info[1])}")


def log_uncaught() -> None:
    """Log any exception that ends this process. Python would write it to stderr, and block if nobody reads stderr."""
    logger = structlog.get_logger(__name__)

    def log(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        logger.error("the process has failed", exc_info=(kind, error, trace))

    sys.excepthook = log


class _Counting(logging.Filter):
    """Counts log lines."""

    def __init__(self, output: LogOutput) -> None:
        super().__init__()
        self._output = output

    def filter(self, record: logging.LogRecord) -> bool:
        self._output.num_lines[record.levelname.lower()] += 1
        return True


def _with_worker(_: object, __: str, line: structlog.types.EventDict) -> structlog.types.EventDict:
    """If the text of a line from `logging` has "worker %s", add its argument as the field `worker`."""
    arguments = line.pop("positional_args", ())
    before, is_about_worker, _rest = str(line["_record"].msg).partition("worker %s")
    position = len(_ARGUMENT.findall(before))
    if is_about_worker and isinstance(arguments, tuple) and position < len(arguments):
        line["worker"] = str(arguments[position])
    return line


def _event_first(_: object, __: str, line: structlog.types.EventDict) -> structlog.types.EventDict:
    """Return *line* with its fields in the same order as in request lines."""
    return {name: line.pop(name) for name in ("event", "timestamp", "level") if name in line} | dict(line)


def _printable(_: object, __: str, line: structlog.types.EventDict) -> structlog.types.EventDict:
    """Replace characters that a terminal would interpret with blanks, since the line may quote a worker."""
    for name, value in line.items():
        if isinstance(value, str):
            line[name] = "".join(one if one.isprintable() or one in "\n\t" else " " for one in value)
    return line


class _Lines:
    """A logging handler's stream. Every write to it is one or more whole lines."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def write(self, lines: str) -> None:
        self._writer.write_line(lines.encode(errors="backslashreplace"))


class _Dropped(msgspec.Struct, frozen=True, tag_field="event", tag="log lines dropped"):
    """The log line that says how many lines were dropped."""

    timestamp: datetime
    dropped: int
    level: str = "warning"


def _json_of_dropped(number: int) -> bytes:
    return msgspec.json.encode(_Dropped(datetime.now(UTC), number)) + b"\n"


def _text_of_dropped(number: int) -> bytes:
    return f"saccade: {number} log lines were dropped here because stderr was not read fast enough\n".encode()
