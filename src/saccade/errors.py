"""The exception tree; each leaf knows its HTTP status, its code and whose fault it is.

    SaccadeError
    ├── RequestError                the client's fault, 4xx
    │   ├── InvalidValue            a field has a wrong type or value
    │   ├── UnsupportedParameter    a field that Saccade does not serve yet, refused by name
    │   ├── ContextLengthExceeded   prompt and answer do not fit the model's context
    │   ├── InvalidImage            bytes that are no picture, or a damaged one
    │   ├── UnsupportedImageFormat  a picture of a kind that is not decoded here
    │   ├── ImageTooLarge           too many pixels, too long a side, too extreme an aspect
    │   ├── TooManyImages           more pictures than a request may carry
    │   ├── InvalidBase64           a data URL whose payload is not base64
    │   ├── InvalidImageUrl         a URL that is not fetched
    │   ├── InvalidApiKey           401
    │   ├── HostNotAllowed          403, a keyless server was asked for by a name that is not its own
    │   ├── OriginNotAllowed        403, a web page that may not call this server
    │   ├── ModelNotFound           404
    │   ├── RouteNotFound           404
    │   ├── MethodNotAllowed        405
    │   ├── RequestTimeout          408, the request arrives too slowly
    │   ├── BodyTooLarge            413
    │   ├── UnsupportedMediaType    415, a body that does not say that it is JSON
    │   └── QueueFull               429
    ├── ServiceError                ours, 5xx
    │   ├── InternalError           500
    │   ├── WorkerFailed            500, the engine died under the request
    │   ├── WorkerUnavailable       503, no worker is ready
    │   ├── Draining                503
    │   └── DeadlineExceeded        504
    └── StartupError                the operator's: shown on the terminal, never over HTTP

Messages are written for people and are safe to show: they never hold the text of a library's exception.
"""

from typing import ClassVar


class SaccadeError(Exception):
    """Anything Saccade raises on purpose.

    *message* says what was wrong and what to do; *param* names the request's field, as `messages[0].content[1]`.
    *reason* is the message as the log has it: give one where *message* repeats what the client sent.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "server_error"
    type: ClassVar[str] = "server_error"

    def __init__(self, message: str, param: str | None = None, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.reason = message if reason is None else reason


class RequestError(SaccadeError):
    """The request cannot be served as it is; sending it again will not help."""

    status = 400
    code = "invalid_request"
    type = "invalid_request_error"


class InvalidValue(RequestError):
    """A field has a wrong type or value."""

    code = "invalid_value"


class UnsupportedParameter(RequestError):
    """A field that Saccade does not serve yet: refused by name, never ignored."""

    code = "unsupported_parameter"


class ContextLengthExceeded(RequestError):
    """Prompt and answer do not fit the model's context."""

    code = "context_length_exceeded"

    @classmethod
    def of(
        cls, max_model_len: int, num_prompt: int, num_completion: int, param: str, at_least: bool = False
    ) -> "ContextLengthExceeded":
        """Return the error in the words that clients look for, to send less; *at_least* if tokens were not counted."""
        least = "at least " if at_least else ""
        return cls(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{least}{num_prompt + num_completion} tokens ({least}{num_prompt} in the messages, {num_completion} in "
            "the completion). Please reduce the length of the messages or completion.",
            param,
        )


class InvalidImage(RequestError):
    """Bytes that are no picture, or a damaged one."""

    code = "invalid_image"


class UnsupportedImageFormat(RequestError):
    """A picture of a kind that is not decoded here."""

    code = "unsupported_image_format"


class ImageTooLarge(RequestError):
    """Too many pixels or bytes, too long a side, too extreme an aspect."""

    code = "image_too_large"


class TooManyImages(RequestError):
    """More pictures than a request may carry."""

    code = "too_many_images"


class InvalidBase64(RequestError):
    """A data URL whose payload is not base64."""

    code = "invalid_base64"


class InvalidImageUrl(RequestError):
    """A URL that is not fetched. Blocked and unreachable read the same."""

    code = "invalid_image_url"


class InvalidApiKey(RequestError):
    """No key, or one that the operator did not set."""

    status = 401
    code = "invalid_api_key"


class HostNotAllowed(RequestError):
    """A keyless server was asked for by a name that is not known to be its own."""

    status = 403
    code = "host_not_allowed"


class OriginNotAllowed(RequestError):
    """A web page whose origin may not call this server."""

    status = 403
    code = "origin_not_allowed"


class ModelNotFound(RequestError):
    """No model of that name is served here."""

    status = 404
    code = "model_not_found"


class RouteNotFound(RequestError):
    """No such path."""

    status = 404
    code = "not_found"


class MethodNotAllowed(RequestError):
    """The path exists; the method does not."""

    status = 405
    code = "method_not_allowed"


class RequestTimeout(RequestError):
    """The request arrives too slowly."""

    status = 408
    code = "request_timeout"


class BodyTooLarge(RequestError):
    """The request's body is over the limit."""

    status = 413
    code = "body_too_large"


class UnsupportedMediaType(RequestError):
    """A body that does not say that it is JSON."""

    status = 415
    code = "unsupported_media_type"


class QueueFull(RequestError):
    """Too much work is waiting; try again."""

    status = 429
    code = "queue_full"
    type = "rate_limit_exceeded"


class ServiceError(SaccadeError):
    """The request was fine; Saccade could not serve it."""


class InternalError(ServiceError):
    """A fault that nobody foresaw; the log has it under the request's id."""

    code = "internal_error"


class WorkerFailed(ServiceError):
    """The engine died or gave up while it worked on the request."""

    code = "worker_failed"


class WorkerUnavailable(ServiceError):
    """No worker is ready for this model."""

    status = 503
    code = "worker_unavailable"


class Draining(ServiceError):
    """The server is shutting down and takes no new work."""

    status = 503
    code = "draining"


class DeadlineExceeded(ServiceError):
    """A stage took longer than its limit."""

    status = 504
    code = "deadline_exceeded"


class StartupError(SaccadeError):
    """The operator's: a setting, a model folder or a file is wrong. Shown on the terminal."""

    code = "startup_error"


def _leaves(kind: type[SaccadeError]) -> list[type[SaccadeError]]:
    return [kind, *(leaf for child in kind.__subclasses__() for leaf in _leaves(child))]


def from_code(code: str, message: str, param: str | None = None) -> SaccadeError:
    """Return the exception whose code crossed a process border as *code*; an unknown code becomes InternalError."""
    kinds = {kind.code: kind for kind in _leaves(SaccadeError)}
    return kinds.get(code, InternalError)(message, param)
