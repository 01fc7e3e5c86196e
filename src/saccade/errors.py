"""The exception tree. Each leaf has an HTTP status and a code, which it sets or inherits.

    SaccadeError
    ├── RequestError                the request is wrong, 4xx
    │   ├── InvalidValue            a field has a wrong type or value
    │   ├── UnsupportedParameter    a field that Saccade does not support yet
    │   ├── ContextLengthExceeded   prompt and answer do not fit the model's context
    │   ├── InvalidImage            bytes that are not an image, or a damaged image
    │   ├── UnsupportedImageFormat  an image format that Saccade does not decode
    │   ├── ImageTooLarge           too many pixels, too long a side, too extreme an aspect
    │   ├── InvalidVideo            bytes that are not a video, or a damaged video
    │   ├── UnsupportedVideoFormat  a container or codec that Saccade does not decode
    │   ├── VideoTooLarge           too many frames, pixels or bytes
    │   ├── TooManyImages           more images than a request may have
    │   ├── InvalidBase64           a data URL whose payload is not base64
    │   ├── InvalidImageUrl         a URL that is not fetched
    │   ├── InvalidApiKey           401
    │   ├── HostNotAllowed          403, the Host header of a request to a server without keys has an unknown name
    │   ├── OriginNotAllowed        403, a web page that may not call this server
    │   ├── ModelNotFound           404
    │   ├── FileNotFound            404, a file that is not kept
    │   ├── PreviousResponseNotFound
    │   ├── ResponseNotFound        404, a response that is not kept
    │   ├── BatchNotFound           404, a batch that is not kept
    │   ├── RouteNotFound           404
    │   ├── MethodNotAllowed        405
    │   ├── RequestTimeout          408, the request arrived too slowly
    │   ├── BodyTooLarge            413
    │   ├── UnsupportedMediaType    415, a body without `Content-Type: application/json`
    │   ├── UnsupportedContentEncoding  415, a body in a content coding that is not served
    │   ├── QueueFull               429
    │   └── RateLimitExceeded       429, a tenant has used up its allowance for a minute
    ├── ServiceError                the server failed, 5xx
    │   ├── InternalError           500
    │   ├── WorkerFailed            500, the engine failed during the request
    │   │   └── PeerFailed          500, the other worker of a pair failed; clients get it as WorkerFailed
    │   ├── NonFiniteOutput         500, the model computed NaN or infinity for the request
    │   ├── WorkerUnavailable       503, no worker is ready
    │   ├── Draining                503
    │   ├── StoreUnavailable        503, the database does not answer
    │   └── DeadlineExceeded        504
    └── StartupError                a setting or a file is wrong: shown on the terminal, never over HTTP
        └── NotInstalled            an extra of the package is missing

Messages are shown to clients and operators, so they never contain the text of a library's exception.
"""

import copy
from typing import ClassVar, Self

MAX_FOREIGN_CHARACTERS = 2000
MAX_CAUSE_CHARACTERS = 200


class SaccadeError(Exception):
    """The base class of errors that Saccade reports to clients or operators.

    A subclass sets its own *code* and HTTP *status*, or inherits its base's.

    - message: what was wrong, and what to do.
    - param: the field of the request that is wrong, such as `messages[0].content[1]`.
    - reason: what the log says instead of *message*.
    - is_logged: whether *message* is logged if there is no *reason*. Such a message has only numbers and
      names that the operator chose. If it is not logged, only the code and the field are.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "server_error"
    type: ClassVar[str] = "server_error"
    is_logged: ClassVar[bool] = True

    def __init_subclass__(cls, code: str = "", status: int = 0, is_logged: bool | None = None) -> None:
        cls.code, cls.status = code or cls.code, status or cls.status
        cls.is_logged = cls.is_logged if is_logged is None else is_logged

    def __init__(self, message: str, param: str | None = None, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if reason is None:
            reason = message if self.is_logged else ""
        self.reason = reason


class RequestError(SaccadeError, code="invalid_request", status=400, is_logged=False):
    """The client must change the request, or send it again later. The message may quote the request."""

    type = "invalid_request_error"

    def at(self, field: str) -> Self:
        """Return the same error with the request's *field*, if the error does not name one already."""
        placed = copy.copy(self)
        placed.param = self.param or field
        return placed


class InvalidValue(RequestError, code="invalid_value"):
    """A field has the wrong type or value."""


class UnsupportedParameter(RequestError, code="unsupported_parameter"):
    """The request has a field that Saccade does not support yet. Such a field is refused, not ignored."""


class ContextLengthExceeded(RequestError, code="context_length_exceeded", is_logged=True):
    """The prompt and its answer do not fit the model's context."""

    @classmethod
    def of(
        cls, max_model_len: int, num_prompt: int, num_completion: int, param: str, at_least: bool = False
    ) -> "ContextLengthExceeded":
        """Return the error in OpenAI's wording, which clients match in order to send less.

        With *at_least*, the numbers are lower bounds, because the tokens were not counted.
        """
        least = "at least " if at_least else ""
        return cls(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{least}{num_prompt + num_completion} tokens ({least}{num_prompt} in the messages, {num_completion} in "
            "the completion). Please reduce the length of the messages or completion.",
            param,
        )


class InvalidImage(RequestError, code="invalid_image"):
    """The bytes are not an image, or the image is damaged."""


class UnsupportedImageFormat(RequestError, code="unsupported_image_format"):
    """The image has a format that Saccade does not decode."""


class ImageTooLarge(RequestError, code="image_too_large"):
    """The image has too many pixels or bytes, too long a side or too extreme an aspect ratio."""


class InvalidVideo(RequestError, code="invalid_video"):
    """The bytes are not a video, or the video is damaged."""


class UnsupportedVideoFormat(RequestError, code="unsupported_video_format"):
    """The video has a container or codec that Saccade does not decode."""


class VideoTooLarge(RequestError, code="video_too_large"):
    """The video has too many frames, pixels or bytes."""


class TooManyImages(RequestError, code="too_many_images", is_logged=True):
    """The request has more images than it may have."""


class InvalidBase64(RequestError, code="invalid_base64"):
    """The payload of a data URL is not base64."""


class InvalidImageUrl(RequestError, code="invalid_image_url"):
    """The URL was not fetched. The message does not reveal whether it is blocked or unreachable."""


class InvalidApiKey(RequestError, code="invalid_api_key", status=401, is_logged=True):
    """The request has no API key or an unknown one."""


class HostNotAllowed(RequestError, code="host_not_allowed", status=403, is_logged=True):
    """The Host header of a request to a server without keys has a name that is not allowed."""


class OriginNotAllowed(RequestError, code="origin_not_allowed", status=403, is_logged=True):
    """The request comes from a web page whose origin may not call this server."""


class ModelNotFound(RequestError, code="model_not_found", status=404):
    """No served model has the requested name."""


class PreviousResponseNotFound(RequestError, code="previous_response_not_found"):
    """The response that the request continues was never stored, or is no longer stored."""


class ResponseNotFound(RequestError, code="response_not_found", status=404):
    """The requested response was never stored, or is no longer stored."""


class FileNotFound(RequestError, code="file_not_found", status=404):
    """The tenant never uploaded this file, or the file is no longer stored."""


class BatchNotFound(RequestError, code="batch_not_found", status=404):
    """The tenant never created this batch, or it is no longer stored."""


class RouteNotFound(RequestError, code="not_found", status=404):
    """The server has no such path."""


class MethodNotAllowed(RequestError, code="method_not_allowed", status=405):
    """The path exists, but does not allow this method."""


class RequestTimeout(RequestError, code="request_timeout", status=408, is_logged=True):
    """The request arrived too slowly."""


class BodyTooLarge(RequestError, code="body_too_large", status=413, is_logged=True):
    """The request's body is over the limit."""


class UnsupportedMediaType(RequestError, code="unsupported_media_type", status=415, is_logged=True):
    """The request has a body without `Content-Type: application/json`."""


class UnsupportedContentEncoding(RequestError, code="unsupported_content_encoding", status=415):
    """The body has a content coding that Saccade does not read, or more than one."""


class QueueFull(RequestError, code="queue_full", status=429, is_logged=True):
    """Too much work is waiting, or the request has waited too long; try again later."""

    type = "rate_limit_exceeded"


class RateLimitExceeded(RequestError, code="rate_limit_exceeded", status=429, is_logged=True):
    """A tenant has used up its allowance for a minute; some is free again after *retry_after_seconds*."""

    type = "rate_limit_exceeded"

    def __init__(self, message: str, param: str | None = None, *, retry_after_seconds: int = 1) -> None:
        super().__init__(message, param)
        self.retry_after_seconds = retry_after_seconds


class ServiceError(SaccadeError):
    """The request was fine, but Saccade could not serve it."""


class InternalError(ServiceError, code="internal_error"):
    """An unexpected exception occurred; the log has its traceback with the request's id."""


class WorkerFailed(ServiceError, code="worker_failed"):
    """The engine failed during the request."""


class PeerFailed(WorkerFailed, code="peer_failed"):
    """The other worker of a pair failed; the worker that reports it is not to blame."""


class NonFiniteOutput(ServiceError, code="non_finite_output"):
    """The model computed NaN or infinity for the request. The same may happen at every worker of the model."""


class WorkerUnavailable(ServiceError, code="worker_unavailable", status=503):
    """No worker is ready for this model."""


class Draining(ServiceError, code="draining", status=503):
    """The server is shutting down and accepts no new requests."""


class StoreUnavailable(ServiceError, code="store_unavailable", status=503):
    """The database that keeps files and responses does not answer."""


class DeadlineExceeded(ServiceError, code="deadline_exceeded", status=504):
    """A stage took longer than its limit."""


class StartupError(SaccadeError, code="startup_error"):
    """A setting, a model folder or a file is wrong. Shown to the operator on the terminal."""


class NotInstalled(StartupError):
    """An optional extra of the package is needed but not installed."""


def _leaves(kind: type[SaccadeError]) -> list[type[SaccadeError]]:
    return [kind, *(leaf for child in kind.__subclasses__() for leaf in _leaves(child))]


def from_code(code: str, message: str, param: str | None = None) -> SaccadeError:
    """Return the exception for *code*, which another process sent, or an InternalError if the code is unknown.

    The message is cut after MAX_FOREIGN_CHARACTERS, and characters that a terminal would interpret become blanks.
    """
    kinds = {kind.code: kind for kind in _leaves(SaccadeError)}
    return kinds.get(code, InternalError)(printable(message), None if param is None else printable(param))


def printable(words: str) -> str:
    """Return another process's *words* as one line for a terminal or a log, at most MAX_FOREIGN_CHARACTERS long."""
    return "".join(one if one.isprintable() else " " for one in words[:MAX_FOREIGN_CHARACTERS])


def cause(error: BaseException) -> str:
    """Describe a library's error to an operator: its class and first line, in at most MAX_CAUSE_CHARACTERS."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= MAX_CAUSE_CHARACTERS else f"{text[: MAX_CAUSE_CHARACTERS - 3]}..."
