"""Reads the file of a batch's requests."""

from typing import NamedTuple

import msgspec

from saccade.gateway.apis.batches.wire import ENDPOINTS, MAX_LINES, BatchFault, Line, LineError, is_streamed


class BatchLine(NamedTuple):
    """A line with its number, from 1. If *error* is not None, the line is not asked."""

    number: int
    custom_id: str | None
    body: bytes
    error: LineError | None


def read_lines(content: bytes, endpoint: str) -> list[BatchLine] | BatchFault:
    """Return the lines of *content* that are not empty, or why the batch fails."""
    names: set[str] = set()
    lines: list[BatchLine] = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        if len(lines) == MAX_LINES:
            return BatchFault(code="too_many_requests", message=f"A batch may have {MAX_LINES} requests.", line=number)
        lines.append(_read_line(number, line, endpoint, names))
    if not lines:
        return BatchFault(code="empty_file", message="The input file has no request.", param="input_file_id")
    return lines


def _read_line(number: int, line: bytes, endpoint: str, names: set[str]) -> BatchLine:
    try:
        request = msgspec.json.decode(line, type=Line)
        custom_id, body = request.custom_id, bytes(request.body)
        is_stream = is_streamed(msgspec.json.decode(body))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        form = "`custom_id`, `method` POST, `url` and `body`"
        return BatchLine(number, None, b"", LineError("invalid_line", f"Line {number} must be JSON with {form}."))

    def refuse(code: str, message: str) -> BatchLine:
        return BatchLine(number, custom_id, b"", LineError(code, f"Line {number}: {message}"))

    if custom_id in names:
        return refuse("duplicate_custom_id", "an earlier line has the same `custom_id`.")
    names.add(custom_id)
    if request.url != endpoint:
        known = ", ".join(ENDPOINTS)
        return refuse("invalid_url", f"`url` must be the batch's endpoint {endpoint}, which is one of {known}.")
    if is_stream:
        return refuse("unsupported_parameter", "`stream` is not supported in a batch.")
    return BatchLine(number, custom_id, body, None)
