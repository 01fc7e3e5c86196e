"""grpc.health.v1 as a worker answers it, to strangers too: they can neither fill its memory nor hold it up.

There is one state, of the worker and of its one service, so the name in a request is not read: a message may take
MAX_MESSAGE_BYTES on this port, and whatever is not read stays within gRPC's flow control.
"""

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

MAX_WATCHERS = 64


class Health:
    """NOT_SERVING until told otherwise."""

    def __init__(self) -> None:
        self._ready = False
        self._changed = asyncio.Event()
        self._num_watchers = 0

    def handler(self) -> grpc.GenericRpcHandler:
        """Return what to add to a server."""
        encode = health_pb2.HealthCheckResponse.SerializeToString
        methods = {
            "Check": grpc.stream_unary_rpc_method_handler(self._check, response_serializer=encode),
            "Watch": grpc.stream_stream_rpc_method_handler(self._watch, response_serializer=encode),
        }
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, methods)

    def set_ready(self, ready: bool) -> None:
        """Say SERVING or NOT_SERVING from now on."""
        if ready != self._ready:
            self._ready = ready
            self._changed.set()
            self._changed = asyncio.Event()

    async def _check(self, _: Any, context: Any) -> Any:
        return self._reply()

    async def _watch(self, _: Any, context: Any) -> None:
        if self._num_watchers >= MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Too many watch the health of this worker.")
        self._num_watchers += 1
        try:
            while True:
                changed = self._changed
                await context.write(self._reply())
                await changed.wait()
        finally:
            self._num_watchers -= 1

    def _reply(self) -> Any:
        statuses = health_pb2.HealthCheckResponse
        return statuses(status=statuses.SERVING if self._ready else statuses.NOT_SERVING)
