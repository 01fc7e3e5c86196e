"""Turns an error in a TokenSpeed call into a gRPC status and a message.

Without this, gRPC would send the class and the text of any exception to the caller.
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
    """Return the gRPC status that tells a gateway of *error*; INTERNAL if STATUSES does not list the error."""
    return next((status for kind, status in STATUSES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


class ErrorBorder(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Ends a call that raises: a SaccadeError gets status_of(), any other error gets INTERNAL and is logged."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """Return a wrapper for the method that *details* names; None if there is no such method."""
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
    """If the block raises, end the call of *context* with the status and sentence for the error."""
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except SaccadeError as error:
        await context.abort(status_of(error), error.message)
    except Exception:
        logger.exception("unforeseen error")
        await context.abort(grpc.StatusCode.INTERNAL, UNFORESEEN)
