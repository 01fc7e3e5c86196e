"""Reads the file of a batch's requests."""

from typing import Final, NamedTuple

import msgspec

from saccade.gateway.apis.batches.wire import ENDPOINTS, MAX_LINES, BatchFault, Line, LineBody, LineError

BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
INVALID: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class BatchLine(NamedTuple):
    """A line with its number, from 1. If *error* is not None, the line is not asked."""

    number: int
    custom_id: str | None
    body: bytes
    model: str | None
    error: LineError | None


def read_lines(content: bytes, endpoint: str) -> list[BatchLine] | BatchFault:
    """Return the lines of *content* that are not empty, or why the batch fails."""
    names: set[str] = set()
    lines: list[BatchLine] = []
    for number, line in enumerate(content.removeprefix(BYTE_ORDER_MARK).split(b"\n"), 1):
        if not line.strip():
            continue
        if len(lines) == MAX_LINES:
            return BatchFault(code="too_many_requests", message=f"A batch may have {MAX_LINES} requests.", line=number)
        lines.append(_read_line(number, line, endpoint, names))
    if not lines:
        return BatchFault(code="empty_file", message="The input file has no request.", param="input_file_id")
    return lines


def _read_line(number: int, line: bytes, endpoint: str, names: set[str]) -> BatchLine:
    custom_id: str | None = None

    def refuse(code: str, message: str) -> BatchLine:
        return BatchLine(number, custom_id, b"", None, LineError(code, f"Line {number}{message}"))

    try:
        request = msgspec.json.decode(line, type=Line)
    except INVALID:
        return refuse(
            "invalid_line", " must be JSON with `custom_id` of at most 512 characters, `method`, `url` and `body`."
        )
    custom_id = request.custom_id
    if custom_id in names:
        return refuse("duplicate_custom_id", ": an earlier line has the same `custom_id`.")
    names.add(custom_id)
    if request.method != "POST":
        return refuse("invalid_line", ": `method` must be POST.")
    if request.url != endpoint:
        known = ", ".join(ENDPOINTS)
        return refuse("invalid_url", f": `url` must be the batch's endpoint {endpoint}, which is one of {known}.")
    try:
        body = msgspec.json.decode(request.body, type=LineBody)
    except INVALID:
        return refuse("invalid_line", ": `body` must be an object.")
    if body.stream:
        return refuse("unsupported_parameter", ": `stream` is not supported in a batch.")
    model = body.model if isinstance(body.model, str) else None
    return BatchLine(number, custom_id, bytes(request.body), model, None)
