"""POST /v1/chat/completions, from the body to the last byte: parse, prepare, dispatch, respond."""

from dataclasses import dataclass

import msgspec
from starlette.types import Receive, Scope, Send

from saccade.gateway.admission import Admission
from saccade.gateway.body_reader import COPIES, BodyReader
from saccade.gateway.border import SALT, WARNINGS, send_json
from saccade.gateway.byte_budget import ByteBudget, Reservation
from saccade.gateway.catalogue import Catalogue
from saccade.gateway.clients import TrustedProxies
from saccade.gateway.connection import CONNECTION
from saccade.gateway.disconnect import unless_disconnected
from saccade.gateway.dispatch import Dispatcher
from saccade.gateway.event_stream import EventStream, report_errors
from saccade.gateway.generation import Asked, Generation
from saccade.gateway.parameters import parse_chat
from saccade.gateway.prepare import Preparer, is_long
from saccade.gateway.respond import send_stream, whole
from saccade.telemetry import Metrics


@dataclass(frozen=True)
class ChatCompletions:
    """The endpoint. A client that leaves, streaming or not, takes its request with it: the engine stops at once."""

    admission: Admission
    bodies: BodyReader
    memory: ByteBudget
    proxies: TrustedProxies
    catalogue: Catalogue
    preparer: Preparer
    dispatcher: Dispatcher
    metrics: Metrics
    ping_interval_seconds: float
    strict_parameters: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Its place goes back when its answer is generated, not when the client has read it."""
        tenant: bytes = scope[SALT]
        self.admission.check(tenant)
        with self.memory.reservation(tenant or self.proxies.client_of(scope)) as memory:
            asked = await self._read(scope, receive, memory)
            if asked.request.stream:
                await self._stream(asked, scope, receive, send)
            else:
                await unless_disconnected(receive, self._answer_whole(asked, send))

    async def _read(self, scope: Scope, receive: Receive, memory: Reservation) -> Asked:
        body = await self.bodies.read(scope, receive, memory)
        async with self.admission.turn(len(body)):
            request, scope[WARNINGS] = parse_chat(body, self.strict_parameters)
            served = self.catalogue.get(request.model)
            chat = None if is_long(request) else self.preparer.read(served, request)
        if chat is None:
            chat = await self.preparer.read_long(served, request)
        # From here on only what the chat holds is kept, which is as long as the body at most.
        memory.keep(memory.num_bytes // COPIES)
        return Asked(msgspec.structs.replace(request, messages=[]), chat, served, scope[SALT], memory)

    async def _stream(self, asked: Asked, scope: Scope, receive: Receive, send: Send) -> None:
        connection = scope.get(CONNECTION)
        is_writable = (lambda: True) if connection is None else (lambda: bool(connection.is_writable))
        with self.memory.reservation(asked.memory.client) as unread:
            async with EventStream(send, self.ping_interval_seconds, is_writable, unread) as stream:
                await unless_disconnected(receive, self._answer_in_events(asked, stream), stream.keep_alive())

    async def _answer_in_events(self, asked: Asked, stream: EventStream) -> None:
        async def generate() -> None:
            async with self._generation.answer(asked) as (answer, deltas):
                await send_stream(stream, answer, deltas)

        await report_errors(stream, generate())
        await stream.flush()

    async def _answer_whole(self, asked: Asked, send: Send) -> None:
        async with self._generation.answer(asked) as (answer, deltas):
            completion = await whole(answer, deltas)
        await send_json(send, 200, completion)

    @property
    def _generation(self) -> Generation:
        return Generation(self.admission, self.preparer, self.dispatcher, self.metrics)
