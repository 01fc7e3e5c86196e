"""Encodes errors in OpenAI's or Anthropic's format, and records each error in its request's log line."""

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Struct
from starlette.types import Message, Send

from saccade.errors import InternalError, SaccadeError, StartupError
from saccade.gateway.server.access_log import note_failure

ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
UNFORESEEN = "Something went wrong inside the server; its log has the details under this request's id."


class ErrorDetail(Struct, frozen=True):
    """What went wrong: *message* for people, *code* for programs."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(Struct, frozen=True):
    """The body of an answer whose status is not 2xx, in OpenAI's format."""

    error: ErrorDetail


class MessagesErrorDetail(Struct, frozen=True):
    """What went wrong: *type* follows from the HTTP status; *param* and *code* are the same as in OpenAI's format."""

    type: str
    message: str
    param: str | None
    code: str


class MessagesError(Struct, frozen=True, tag="error"):
    """The body of an answer whose status is not 2xx, and the last event of a failed stream, in Anthropic's format."""

    error: MessagesErrorDetail


def drop_tracebacks(error: BaseException) -> None:
    """Drop the tracebacks of *error* and of the errors that led to it.

    An error in a local variable forms a cycle with its frame. So the frames of its traceback would keep the request's
    body until the garbage collector runs. Clearing the frames instead would end suspended ones, and a shared task's
    error may still pass through another request's frames.
    """
    errors: list[BaseException | None] = [error]
    while errors:
        if (one := errors.pop()) is not None:
            errors += [one.__cause__, one.__context__]
            one.__traceback__ = one.__cause__ = one.__context__ = None


def encode_error(error: SaccadeError) -> bytes:
    """Return OpenAI's error object for *error* as JSON, and record *error* in the request's log line.

    Clients do not see errors that are meant for the operator.
    """
    error = _noted(error)
    detail = ErrorDetail(message=error.message, type=error.type, param=error.param, code=error.code)
    return msgspec.json.encode(ErrorAnswer(error=detail))


def encode_messages_error(error: SaccadeError) -> bytes:
    """Like encode_error(), but return Anthropic's error object."""
    error = _noted(error)
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return msgspec.json.encode(MessagesError(MessagesErrorDetail(kind, error.message, error.param, error.code)))


def _noted(error: SaccadeError) -> SaccadeError:
    note_failure(error)
    return InternalError(UNFORESEEN) if isinstance(error, StartupError) else error


async def send_json(send: Send, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
    """Send a whole JSON response."""
    await send(json_head(status, len(body), headers))
    await send({"type": "http.response.body", "body": body})


def json_head(status: int, num_bytes: int, headers: Mapping[str, str] | None = None) -> Message:
    """Return the ASGI message that begins a JSON response of *num_bytes*."""
    all_headers = {"content-type": "application/json", "content-length": str(num_bytes), **(headers or {})}
    encoded = [(name.encode(), value.encode()) for name, value in all_headers.items()]
    return {"type": "http.response.start", "status": status, "headers": encoded}
