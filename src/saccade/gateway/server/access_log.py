"""The access log: a line for each request, encoded here and written on the log's own thread."""

import logging
import re
from collections import deque
from collections.abc import Iterable
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final

import msgspec
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from saccade.errors import SaccadeError
from saccade.log_writer import LogOutput
from saccade.protocol.gateway_calls import RequestError

MAX_REASON_CHARACTERS = 300
MAX_ERRORS = 50
PROBES = frozenset({"/live", "/ready", "/health", "/ping"})
"""Paths for orchestrators."""

NO_ROUTE = "none"
"""The route of a request to an unknown path, or of one that is refused before its path matters."""

POLLED = PROBES | {"/metrics", "/board"}
"""Paths that programs ask all the time."""


SPAN_ATTRIBUTES = {
    "method": "http.request.method",
    "route": "http.route",
    "status": "http.response.status_code",
    "request_id": "saccade.request_id",
    "tenant": "saccade.tenant",
    "worker": "saccade.worker",
    "images": "saccade.images",
    "code": "error.type",
    "id": "gen_ai.response.id",
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "finish_reasons": "gen_ai.response.finish_reasons",
}
"""Fields of a line, and their names in the span of the request: OpenTelemetry's, if it has one."""

_STEP: Final = re.compile(r"\.?([^.\[\]]+)|\[[0-9]{1,6}\]")


class RequestLine(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="event", tag="request"):
    """One request's line. The code that serves the request fills it in.

    The line contains nothing that a user sent except *request_id*, which people send in order to find the line. The
    fields from *id* to *ttft_seconds* are for chats.
    """

    timestamp: datetime
    level: str
    request_id: str
    method: str
    route: str
    status: int
    """499 if the client left before the answer began."""
    seconds: float
    tenant: str = ""
    """A name in the keys file."""
    id: str | None = None
    model: str | None = None
    worker: str | None = None
    images: int | None = None
    """Images and videos."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reasons: list[str] | None = None
    ttft_seconds: float | None = None
    code: str | None = None
    """Why the request was refused or, with status 200, why its stream broke off; *field* and *reason* say more."""
    field: str = ""
    reason: str = ""
    is_warned: bool = False
    """Whether the client's answer has an x-saccade-warning."""


def span_attributes(line: RequestLine) -> dict[str, Any]:
    """Return the contents of *line* as attributes for its request's span."""
    values = {name: getattr(line, field) for field, name in SPAN_ATTRIBUTES.items()}
    return {name: value for name, value in values.items() if value not in (None, "")}


_line: ContextVar[RequestLine | None] = ContextVar("saccade.request_line", default=None)


def line_of_request() -> RequestLine | None:
    """Return the line of the request that this task serves; None outside a request."""
    return _line.get()


def note_failure(error: SaccadeError) -> None:
    """Record *error* in the line of the request that this task serves."""
    line = _line.get()
    if line is not None:
        line.code = error.code
        line.field = known_field(error.param or "")[:MAX_REASON_CHARACTERS]
        line.reason = error.reason[:MAX_REASON_CHARACTERS]


def known_field(path: str) -> str:
    """Return a field's *path* up to the first unknown name, which the client has chosen."""
    end = 0
    while (step := _STEP.match(path, end)) is not None and (step[1] is None or step[1] in _known_names()):
        end = step.end()
    return path[:end]


@cache
def _known_names() -> frozenset[str]:
    """Return the field names of all structs, none of which a client can have invented."""
    kinds, names = [msgspec.Struct], set[str]()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        names.update(getattr(kind, "__struct_encode_fields__", ()))
    return frozenset(names)


class AccessLog:
    """Writes lines to *output*: text on a terminal, else JSON. *errors* keeps the last MAX_ERRORS, newest first.

    If a polled path answers 200 or 503, its line has the level DEBUG and no short form.
    """

    def __init__(self, output: LogOutput | None = None) -> None:
        self.errors = deque[RequestError](maxlen=MAX_ERRORS)
        self._write = output.writer.write_line if output is not None else None
        is_short = output is not None and output.has_short_lines
        self._hides_probes = is_short or output is None or output.level > logging.DEBUG
        self._render = _text if output is not None and output.is_terminal else msgspec.json.encode
        if is_short:
            self._render = _short_text

    def begin_line(self, request_id: str, method: str, status: int) -> RequestLine:
        """Return the line for a new request, with a preliminary *status*."""
        line = RequestLine(
            timestamp=datetime.now(UTC),
            level="info",
            request_id=request_id,
            method=method,
            route=NO_ROUTE,
            status=status,
            seconds=0.0,
        )
        _line.set(line)
        return line

    def end_line(self, line: RequestLine) -> None:
        """Write *line*, and keep its error if it has one, unless the request is a probe."""
        if line.code is not None and line.route not in PROBES:
            fields = msgspec.structs.asdict(line) | {"time": line.timestamp.timestamp(), "message": line.reason}
            self.errors.appendleft(msgspec.convert(fields, RequestError))
        if line.route in POLLED and line.status in (200, 503):
            if self._hides_probes:
                return
            line.level = "debug"
        if self._write is not None:
            self._write(self._render(line) + b"\n")


class LogMetrics(Collector):
    """Reports how many log lines were dropped, and how many each level from INFO on has, but for request lines."""

    def __init__(self, output: LogOutput) -> None:
        self._output = output

    def collect(self) -> Iterable[Metric]:
        number = self._output.writer.num_dropped
        yield CounterMetricFamily("saccade_log_lines_dropped", "Log lines that could not be written.", value=number)
        lines = CounterMetricFamily("saccade_log_lines", "Log lines but those of requests, by level.", labels=["level"])
        for level in ("info", "warning", "error", "critical"):
            lines.add_metric([level], self._output.num_lines[level])
        yield lines


def access_log(output: LogOutput | None) -> AccessLog:
    """Return the access log that writes to *output*.

    Unless *output* has short lines, nothing is written if its level is above INFO.
    """
    writes = output is not None and (output.level <= logging.INFO or output.has_short_lines)
    return AccessLog(output if writes else None)


def _text(line: RequestLine) -> bytes:
    fields = msgspec.to_builtins(line)
    for name in ("event", "level", "timestamp", "method", "route", "status", "seconds", "request_id"):
        del fields[name]
    head = f"{line.timestamp:%H:%M:%S} {line.status} {line.method} {line.route} {line.seconds:.3f}s"
    values = (",".join(value) if isinstance(value, list | tuple) else value for value in fields.values())
    pairs = (f"{name}={value}" for name, value in zip(fields, values, strict=True))
    return _printable(" ".join((head, *pairs, f"request_id={line.request_id}")))


def _short_text(line: RequestLine) -> bytes:
    place = line.model or line.route
    parts = [] if place == NO_ROUTE else [place]
    if line.images:
        parts.append(f"{line.images} image{'s' if line.images > 1 else ''}")
    if line.prompt_tokens is not None:
        parts.append(f"prompt {line.prompt_tokens} tokens, {line.cached_tokens} cached")
        parts.append(f"answer {line.completion_tokens}")
    if line.ttft_seconds is not None:
        parts.append(f"TTFT {1000 * line.ttft_seconds:.0f} ms")
    parts.append(f"{line.seconds:.2f} s")
    if line.code is not None:
        parts.append(": ".join(filter(None, (line.code, line.field, line.reason))))
    return _printable(f"{line.timestamp.astimezone():%H:%M:%S} {line.status} {', '.join(parts)}")


def _printable(text: str) -> bytes:
    """Return *text* with control characters escaped, since a model's name may contain some, and terminals obey them."""
    return (text if text.isprintable() else text.encode("unicode_escape").decode()).encode(errors="backslashreplace")
