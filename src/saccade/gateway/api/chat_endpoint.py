"""The endpoint of every API that answers chats: read the body, and send the answer, whole or as server-sent events.

Each API reads its own bodies into a ChatRequest and writes its own answers; all else is here once. A request with
several prompts is as many requests to workers, whose answers are written side by side.
"""

from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.types import Receive, Scope, Send

from saccade.errors import SaccadeError
from saccade.gateway.chat import PlainPrompt
from saccade.gateway.concurrency import all_or_none, beside
from saccade.gateway.openai.field_names import FieldNames
from saccade.gateway.openai.requests import ChatRequest
from saccade.gateway.output.answer import Answer
from saccade.gateway.pipeline import Part, Pipeline
from saccade.gateway.prompt.draft import PromptDrafter, is_long
from saccade.gateway.request import Request
from saccade.gateway.served_models.model_registry import ModelRegistry
from saccade.gateway.server.body import BodyReader, while_connected
from saccade.gateway.server.connection import CONNECTION
from saccade.gateway.server.event_stream import EventStream, report_errors
from saccade.gateway.server.middleware import WARNINGS, send_json
from saccade.gateway.structured_output.constraint import read_constraint, without_constraint
from saccade.gateway.structured_output.grammars import RequestGrammars
from saccade.gateway.structured_output.held_calls import with_held_calls
from saccade.gateway.tenants.account import Account
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


class Api(Protocol):
    """Reads the bodies of one API."""

    def read(self, body: bytes | bytearray, tenant: bytes) -> ReadBody:
        """Return what *body* of the tenant with the id *tenant* asks. Raises RequestError that names the field."""


WriterOfPart = tuple[AnswerWriter, Part]


@dataclass(frozen=True)
class ChatEndpoint:
    """Serves the requests of all APIs. When a client disconnects, streaming or not, the engine stops its request."""

    bodies: BodyReader
    model_registry: ModelRegistry
    prompts: PromptDrafter
    grammars: RequestGrammars
    pipeline: Pipeline
    ping_interval_seconds: float

    async def serve(self, api: Api, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. It gives its place back when its answer is generated, not when the client has read it."""
        with self.bodies.begin(scope) as request:
            # Only _read() has the body, and drops it.
            reading = self._read(api, scope, await self.bodies.read(scope, receive, request), request)
            await while_connected(receive, self._answer(reading, request, scope, send))

    async def preview(self, api: Api, scope: Scope, receive: Receive, account: Account) -> Preview:
        """Return where the request in *scope* would go if the tenant of *account* sent it now; it is not sent.

        Raises SaccadeError.
        """
        with self.bodies.begin(scope, account, is_charged=False) as request:
            body = await self.bodies.read(scope, receive, request)
            [(_, part), *_] = await self._read(api, scope, body, request)
            return await self.pipeline.preview(request, part)

    async def _read(self, api: Api, scope: Scope, body: bytes | bytearray, request: Request) -> list[WriterOfPart]:
        """Return the parts of a request, each with the writer of its answer."""
        async with request.turn(len(body)):
            read = api.read(body, request.tenant.id)
            request.kept.take(read.num_kept_bytes)
            scope[WARNINGS] = read.warning
            names = read.writer.names
            with names.in_errors():
                constraint = read_constraint(read.request)
                params = without_constraint(read.request)
                served = self.model_registry.get(params.model)
                chat = None if read.prompts or is_long(params) else self.prompts.read(served, params)
        with names.in_errors():
            if chat is not None:
                chats = [(read.writer, chat)]
            elif read.prompts:
                chats = [(writer, await self.prompts.read_plain(served, params, one)) for one, writer in read.prompts]
            else:
                chats = [(read.writer, await self.prompts.read_long(served, params))]
            constraint = with_held_calls(constraint, params, chats[0][1].tools, served.tool_calls)
            params = msgspec.structs.replace(params, messages=[])
            request.keep_chat()
            del body, read
            salt, held = request_salt(request.tenant.salt, params.cache_salt), None
            if constraint is not None:
                held = await self.grammars.of(constraint, salt, request.client, request.tenant.priority)
        if held is not None and held.warning:
            scope[WARNINGS] = "; ".join(filter(None, (scope[WARNINGS], held.warning)))
        return [(writer, Part(params, chat, served, salt, held)) for writer, chat in chats]

    async def _answer(
        self, reading: Coroutine[Any, Any, list[WriterOfPart]], request: Request, scope: Scope, send: Send
    ) -> None:
        parts = await reading
        if parts[0][1].params.stream:
            await self._stream(parts, request, scope, send)
        else:
            await self._answer_whole(parts, request, send)

    async def _stream(self, parts: Sequence[WriterOfPart], request: Request, scope: Scope, send: Send) -> None:
        async def generate(writer: AnswerWriter, part: Part) -> None:
            with writer.names.in_errors():
                async with self.pipeline.answer(request, part) as (answer, deltas):
                    await writer.stream(stream, answer, deltas)

        async def answer_all() -> None:
            await report_errors(stream, all_or_none(generate(*one) for one in parts), parts[0][0].failure)
            await stream.flush()

        with request.reservation() as unread:
            async with EventStream(send, scope.get(CONNECTION), self.ping_interval_seconds, unread) as stream:
                await beside(answer_all(), stream.keep_alive())

    async def _answer_whole(self, parts: Sequence[WriterOfPart], request: Request, send: Send) -> None:
        async def generate(writer: AnswerWriter, part: Part) -> bytes:
            with writer.names.in_errors():
                async with self.pipeline.answer(request, part) as (answer, deltas):
                    return await writer.whole(answer, deltas)

        await send_json(send, 200, b"".join(await all_or_none(generate(*one) for one in parts)))
