"""The way of a request of any API: read the body, generate, and send the answer, whole or as server-sent events.

Each API reads its own bodies into a ChatRequest and writes its own answers; all else is here once. A request with
several prompts is as many requests to workers, whose answers are written side by side.
"""

from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.types import Receive, Scope, Send

from saccade.errors import SaccadeError
from saccade.gateway.generation.generate import Asked, Generation
from saccade.gateway.images.concurrency import all_or_none
from saccade.gateway.limits.admission import Admission
from saccade.gateway.limits.byte_budget import ByteBudget, Reservation
from saccade.gateway.openai.field_names import FieldNames
from saccade.gateway.openai.messages import PlainPrompt
from saccade.gateway.openai.requests import ChatRequest
from saccade.gateway.output.answer import Answer
from saccade.gateway.prompt.draft import PromptDrafter, is_long
from saccade.gateway.served_models.model_registry import ModelRegistry
from saccade.gateway.server.body import COPIES, BodyReader
from saccade.gateway.server.client_address import TrustedProxies
from saccade.gateway.server.connection import CONNECTION
from saccade.gateway.server.disconnection import beside, while_connected
from saccade.gateway.server.event_stream import EventStream, report_errors
from saccade.gateway.server.middleware import WARNINGS, send_json
from saccade.gateway.structured_output.constraint import Constraint, read_constraint, without_constraint
from saccade.gateway.structured_output.grammars import HeldAnswer, RequestGrammars
from saccade.gateway.structured_output.held_calls import with_held_calls
from saccade.gateway.tenants.account import ACCOUNT, Account
from saccade.gateway.tenants.tenant import request_salt
from saccade.gateway.workers.dispatch import Preview
from saccade.protocol.output import TokenDelta


class AnswerWriter(Protocol):
    """Writes the answer to one request as its API has it."""

    @property
    def names(self) -> FieldNames:
        """What the API calls the fields of the request."""

    async def whole(self, answer: Answer, deltas: AsyncIterator[TokenDelta]) -> bytes:
        """Return the whole answer in JSON."""

    async def stream(self, stream: EventStream, answer: Answer, deltas: AsyncIterator[TokenDelta]) -> None:
        """Send the answer in events."""

    def failure(self, error: SaccadeError) -> bytes:
        """Return the last event of a stream that began and failed."""


@dataclass(frozen=True)
class ReadBody:
    """A body as a chat, the *warning* for its client, and the *writer* of its answer.

    A body without a chat has *prompts* instead, each with the writer of its answer. What these write whole is joined.
    *num_kept_bytes* are those of messages that *writer* keeps until the answer is whole.
    """

    request: ChatRequest
    warning: str
    writer: AnswerWriter
    prompts: Sequence[tuple[PlainPrompt, AnswerWriter]] = ()
    num_kept_bytes: int = 0


@dataclass(frozen=True)
class _Part:
    """One prompt of a request, and the *writer* of its answer."""

    asked: Asked
    writer: AnswerWriter


class Api(Protocol):
    """Reads the bodies of one API."""

    def read(self, body: bytes | bytearray, tenant: bytes) -> ReadBody:
        """Return what *body* of the tenant with the id *tenant* asks. Raises RequestError that names the field."""


@dataclass(frozen=True)
class Answering:
    """Answers requests. When a client disconnects, streaming or not, the engine stops its request at once."""

    admission: Admission
    bodies: BodyReader
    memory: ByteBudget
    proxies: TrustedProxies
    model_registry: ModelRegistry
    prompts: PromptDrafter
    generation: Generation
    grammars: RequestGrammars
    ping_interval_seconds: float

    async def serve(self, api: Api, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. It gives its place back when its answer is generated, not when the client has read it."""
        account: Account = scope[ACCOUNT]
        tenant = account.tenant.id
        self.admission.check(tenant)
        with account.request(), ExitStack() as at_end:
            memory = at_end.enter_context(self.memory.reservation(tenant or self.proxies.client_of(scope)))
            # Only _read() has the body, and drops it.
            reading = self._read(api, scope, await self.bodies.read(scope, receive, memory), memory, account, at_end)
            await while_connected(receive, self._answer(reading, scope, send))

    async def preview(self, api: Api, scope: Scope, receive: Receive, account: Account) -> Preview:
        """Return where the request in *scope* would go if the tenant of *account* sent it now; it is not sent.

        Raises SaccadeError.
        """
        tenant = account.tenant.id
        self.admission.check(tenant)
        with ExitStack() as at_end:
            memory = at_end.enter_context(self.memory.reservation(tenant or self.proxies.client_of(scope)))
            body = await self.bodies.read(scope, receive, memory)
            part, *_ = await self._read(api, scope, body, memory, account, at_end)
            return await self.generation.preview(part.asked)

    async def _read(
        self,
        api: Api,
        scope: Scope,
        body: bytes | bytearray,
        memory: Reservation,
        account: Account,
        at_end: ExitStack,
    ) -> list[_Part]:
        async with self.admission.turn(len(body)):
            read = api.read(body, account.tenant.id)
            at_end.enter_context(self.memory.reservation(memory.client)).take(read.num_kept_bytes)
            scope[WARNINGS] = read.warning
            names = read.writer.names
            with names.in_errors():
                constraint = read_constraint(read.request)
                request = without_constraint(read.request)
                served = self.model_registry.get(request.model)
                chat = None if read.prompts or is_long(request) else self.prompts.read(served, request)
        with names.in_errors():
            if chat is not None:
                chats = [(chat, read.writer)]
            elif read.prompts:
                chats = [(await self.prompts.read_plain(served, request, one), writer) for one, writer in read.prompts]
            else:
                chats = [(await self.prompts.read_long(served, request), read.writer)]
            constraint = with_held_calls(constraint, request, chats[0][0].tools, served.tool_calls)
            # From here on only the chat is kept, which is as long as the body at most.
            memory.keep(memory.num_bytes // COPIES)
            request = msgspec.structs.replace(request, messages=[])
            del body, read
            held = None if constraint is None else await self._hold(constraint, request, account, memory)
        if held is not None and held.warning:
            scope[WARNINGS] = "; ".join(filter(None, (scope[WARNINGS], held.warning)))
        return [_Part(Asked(request, chat, served, account, memory, held), writer) for chat, writer in chats]

    async def _hold(
        self, constraint: Constraint, request: ChatRequest, account: Account, memory: Reservation
    ) -> HeldAnswer:
        salt = request_salt(account.tenant.salt, request.cache_salt)
        return await self.grammars.of(constraint, salt, memory.client, account.tenant.priority)

    async def _answer(self, reading: Coroutine[Any, Any, list[_Part]], scope: Scope, send: Send) -> None:
        parts = await reading
        if parts[0].asked.request.stream:
            await self._stream(parts, scope, send)
        else:
            await self._answer_whole(parts, send)

    async def _stream(self, parts: Sequence[_Part], scope: Scope, send: Send) -> None:
        connection = scope.get(CONNECTION)
        is_writable = (lambda: True) if connection is None else (lambda: bool(connection.is_writable))
        with self.memory.reservation(parts[0].asked.memory.client) as unread:
            async with EventStream(send, self.ping_interval_seconds, is_writable, unread) as stream:
                await beside(self._answer_in_events(parts, stream), stream.keep_alive())

    async def _answer_in_events(self, parts: Sequence[_Part], stream: EventStream) -> None:
        async def generate(part: _Part) -> None:
            with part.writer.names.in_errors():
                async with self.generation.answer(part.asked) as (answer, deltas):
                    await part.writer.stream(stream, answer, deltas)

        await report_errors(stream, all_or_none(map(generate, parts)), parts[0].writer.failure)
        await stream.flush()

    async def _answer_whole(self, parts: Sequence[_Part], send: Send) -> None:
        async def generate(part: _Part) -> bytes:
            with part.writer.names.in_errors():
                async with self.generation.answer(part.asked) as (answer, deltas):
                    return await part.writer.whole(answer, deltas)

        await send_json(send, 200, b"".join(await all_or_none(map(generate, parts))))
