"""Turns errors in TokenSpeed's calls into a status and a sentence.

Otherwise gRPC would answer with the class and the text of any exception that a method raises.
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from saccade.errors import DeadlineExceeded, QueueFull, RequestError, SaccadeError, WorkerUnavailable

UNFORESEEN = "The worker failed on this call because of an internal error; its log has the details."

STATUSES: tuple[tuple[type[SaccadeError], grpc.StatusCode], ...] = (
    (QueueFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (RequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (WorkerUnavailable, grpc.StatusCode.UNAVAILABLE),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
)

logger = logging.getLogger(__name__)


def status_of(error: SaccadeError) -> grpc.StatusCode:
    """Return the status of *error* for a gateway of this wire; INTERNAL if none of STATUSES fits."""
    return next((status for kind, status in STATUSES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


class ErrorBorder(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Ends a call that raises: a SaccadeError with status_of(), any other with INTERNAL and a line in the log."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """Return the method that *details* names, wrapped; None if there is none."""
        handler = await continuation(details)
        if handler is None:
            return None
        codecs = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_streaming(handler.unary_stream), **codecs)
        return grpc.unary_unary_rpc_method_handler(_single(handler.unary_unary), **codecs)


def _single(method: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def call(message: Any, context: Any) -> Any:
        async with _errors_end(context):
            return await method(message, context)

    return call


def _streaming(method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def call(message: Any, context: Any) -> AsyncIterator[Any]:
        async with _errors_end(context), contextlib.aclosing(method(message, context)) as responses:
            async for response in responses:
                yield response

    return call


@contextlib.asynccontextmanager
async def _errors_end(context: Any) -> AsyncIterator[None]:
    """End the call of *context* with the block's error."""
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except SaccadeError as error:
        await context.abort(status_of(error), error.message)
    except Exception:
        logger.exception("unforeseen error")
        await context.abort(grpc.StatusCode.INTERNAL, UNFORESEEN)
