"""Errors as responses: their bodies in JSON, which the log line of the request notes, and what else is sent whole."""

from collections.abc import Mapping

import msgspec
from starlette.types import Send

from saccade.errors import InternalError, SaccadeError, StartupError
from saccade.gateway.anthropic.answers import error_of
from saccade.gateway.openai.answers import ErrorAnswer, ErrorDetail
from saccade.gateway.server.access_log import note_failure

UNFORESEEN = "Something went wrong inside the server; its log has the details under this request's id."


def drop_tracebacks(error: BaseException) -> None:
    """Let go of the frames that *error*, and the errors that led to it, passed through.

    An error that a variable holds forms a cycle with the frame of that variable, and the frames below hold the
    request's body until the collector runs. Frames are not cleared: a suspended one would end, and an error of shared
    work may be passing through those of another request.
    """
    errors: list[BaseException | None] = [error]
    while errors:
        if (one := errors.pop()) is not None:
            errors += [one.__cause__, one.__context__]
            one.__traceback__ = one.__cause__ = one.__context__ = None


def encode_error(error: SaccadeError) -> bytes:
    """Return OpenAI's error object for *error* as JSON, and note it for the request's log line.

    An operator's error is not shown to clients.
    """
    error = _noted(error)
    detail = ErrorDetail(message=error.message, type=error.type, param=error.param, code=error.code)
    return msgspec.json.encode(ErrorAnswer(error=detail))


def encode_messages_error(error: SaccadeError) -> bytes:
    """Return Anthropic's error object for *error*, else as encode_error does."""
    return msgspec.json.encode(error_of(_noted(error)))


def _noted(error: SaccadeError) -> SaccadeError:
    note_failure(error)
    return InternalError(UNFORESEEN) if isinstance(error, StartupError) else error


async def send_json(send: Send, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
    all_headers = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    encoded = [(name.encode(), value.encode()) for name, value in all_headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
