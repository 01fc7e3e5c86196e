"""grpc.health.v1 as a worker answers it, to strangers too: a caller that stops reading holds up nobody else."""

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from saccade.transport.wire import SERVICE_NAME

MAX_WATCHERS = 64
NAMES = (health.OVERALL_HEALTH, SERVICE_NAME)


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """One state, of the worker and of its service; NOT_SERVING until told otherwise."""

    def __init__(self) -> None:
        self._ready = False
        self._changed = asyncio.Event()
        self._num_watchers = 0

    def set_ready(self, ready: bool) -> None:
        """Say SERVING or NOT_SERVING from now on."""
        if ready != self._ready:
            self._ready = ready
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service not in NAMES:
            await context.abort(grpc.StatusCode.NOT_FOUND, "There is no such service here.")
        return self._reply(request.service)

    async def Watch(self, request: Any, context: Any) -> None:
        if self._num_watchers >= MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Too many watch the health of this worker.")
        self._num_watchers += 1
        try:
            while True:
                changed = self._changed
                await context.write(self._reply(request.service))
                await changed.wait()
        finally:
            self._num_watchers -= 1

    def _reply(self, service: str) -> Any:
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if self._ready else statuses.NOT_SERVING
        return statuses(status=status if service in NAMES else statuses.SERVICE_UNKNOWN)
