"""The port of TokenSpeed's wire: plain gRPC without credentials, because an SMG gateway has none."""

import asyncio
import logging
from collections.abc import Callable

import grpc
from smg_grpc_proto.generated.tokenspeed_scheduler_pb2_grpc import add_TokenSpeedSchedulerServicer_to_server

from saccade.errors import StartupError
from saccade.protocol.description import Description
from saccade.tracing.tracer import Tracer
from saccade.transport.gateway_streams import Front
from saccade.transport.wire import SERVER_OPTIONS
from saccade.worker.local_client import LocalClient
from saccade.worker.tokenspeed.border import ErrorBorder
from saccade.worker.tokenspeed.port import TokenSpeedPort
from saccade.worker.tokenspeed.service import TokenSpeedService

MAX_CALLS = 4096
"""Calls at a time; each may hold the pixels of its images."""

logger = logging.getLogger(__name__)


class TokenSpeedServer:
    """Serves TokenSpeed's wire for *front*. *described* returns the engine's description, or raises Refused."""

    def __init__(self, front: Front, described: Callable[[], Description], port: TokenSpeedPort) -> None:
        self._config = port
        self._client = LocalClient(front, described)
        self._server = grpc.aio.server(
            interceptors=[ErrorBorder()], options=SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS
        )
        self._tracer = Tracer.of_settings(port.tracing)
        service = TokenSpeedService(self._client, kv_events=port.kv_events, tracer=self._tracer)
        add_TokenSpeedSchedulerServicer_to_server(service, self._server)
        self.port = 0

    @property
    def address(self) -> str:
        """The worker's URL for an SMG gateway."""
        return f"grpc://{self._config.bind.rpartition(':')[0]}:{self.port}"

    async def start(self) -> None:
        """Listen. Raises StartupError if the address is not available, or if strangers could call."""
        self._config.check()
        try:
            self.port = int(self._server.add_insecure_port(self._config.bind))
        except RuntimeError as error:
            raise StartupError(f"The worker cannot listen on {self._config.bind}: is the address in use?") from error
        await self._server.start()
        logger.warning(self._config.remark(self.address))

    async def stop(self) -> None:
        """Stop listening, and cancel the calls that are still open after half a second."""
        await self._server.stop(grace=0.5)
        await self._client.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
