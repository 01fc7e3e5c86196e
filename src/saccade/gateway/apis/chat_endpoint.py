"""The endpoint of every API that answers chats. It reads bodies and sends answers, whole or as server-sent events.

Each API reads its own bodies into a ChatRequest and writes its own answers; this module does everything else. Every
prompt becomes one request to a worker, and the answers to several prompts are written concurrently.
"""

import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from saccade.concurrency import all_or_none
from saccade.errors import RequestError, SaccadeError
from saccade.fair_queue import Background
from saccade.fleet.dispatch import Preview
from saccade.gateway.chat import PlainPrompt
from saccade.gateway.chat_request import ChatMessage, ChatRequest
from saccade.gateway.json_parts import Part as JsonPart
from saccade.gateway.output.answer import Answer
from saccade.gateway.output.delivery import ChunkWriter, Delivery
from saccade.gateway.parameters import Body, listed
from saccade.gateway.pipeline import Pipeline, RequestPart
from saccade.gateway.request import Request
from saccade.gateway.server.answer_memory import IS_COUNTED
from saccade.gateway.server.body import BodyReader, while_connected
from saccade.gateway.server.connection import CONNECTION
from saccade.gateway.server.event_stream import EventStream, WholeResponse
from saccade.gateway.server.middleware import WARNINGS
from saccade.gateway.tenants.account import Account

NO_PRIORITIES = "`priority` has no effect: the server runs without --scheduling-policy priority"
_NAMED = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class FieldNames:
    """*names* maps a field of a ChatRequest, such as `messages[1].content[0]`, to the client's name for that field.

    The longest entry that is a prefix of a field's path renames the field; without an entry, the field keeps its name.
    """

    names: Mapping[str, str] = field(default_factory=dict)

    def name_of(self, name: str) -> str:
        """Return the client's name for the field *name*."""
        end = len(name)
        while end > 0:
            if (client_name := self.names.get(name[:end])) is not None:
                return client_name + name[end:]
            end = max(name.rfind(".", 0, end), name.rfind("[", 0, end))
        return name

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Use the client's field names in the RequestErrors that the block raises."""
        try:
            yield
        except RequestError as error:
            if self.names:
                error.message, error.reason = self.text(error.message), self.text(error.reason)
                error.param = None if error.param is None else self.name_of(error.param)
            raise

    def text(self, text: str) -> str:
        """Return *text* with the fields in backquotes renamed to the client's names."""
        return _NAMED.sub(lambda match: f"`{self.name_of(match[1])}`", text)


def warning_of(part: RequestPart, names: FieldNames) -> str:
    """Return a warning about fields of *part*'s chat that have no effect; "" if there are none.

    The warning calls the fields by the client's *names*.
    """
    places = [] if part.answer_grammar is None else part.answer_grammar.dropped
    dropped = [names.name_of(place) for place in places]
    of_grammar = f"keywords that the grammar does not enforce: {listed(dropped, len(dropped))}" if dropped else ""
    of_priority = NO_PRIORITIES if part.params.priority and not part.priority else ""
    return "; ".join(filter(None, (names.text(part.chat.warning), of_grammar, of_priority)))


class AnswerWriter(ChunkWriter, Protocol):
    """Writes one answer in the format of its API: as events while the answer grows, or as a whole at its end."""

    async def end_answer(self) -> Sequence[JsonPart]:
        """Return the last events, or the whole answer.

        With several prompts, only the writer whose answer ends last returns anything.
        """


@dataclass(frozen=True)
class Format:
    """The format of a prompt's answer: the API's *names* for the request's fields, and a *writer* for the answer.

    *failure* returns the last event of a stream that fails after it has begun. *prompt* is None for a chat.
    """

    names: FieldNames
    writer: Callable[[Answer], AnswerWriter]
    failure: Callable[[SaccadeError], bytes]
    prompt: PlainPrompt | None = None


@dataclass(frozen=True)
class ReadBody:
    """A request body, read as a chat or as plain prompts with the same parameters.

    *formats* has one entry for the chat, or one per prompt. *warning* is for the client. *num_kept_bytes* is the size
    of the messages that a writer keeps until the answer is complete. *num_recalled_bytes* is the size of the messages
    that come from the server's store instead of the body.
    """

    request: ChatRequest
    warning: str
    formats: Sequence[Format]
    num_kept_bytes: int = 0
    num_recalled_bytes: int = 0


@dataclass(frozen=True)
class Continuation:
    """A body that continues a stored conversation.

    *recall* returns the conversation's messages, and may wait for the store. *read_chat* reads the body with them.
    """

    recall: Callable[[], Awaitable[Sequence[ChatMessage]]]
    read_chat: Callable[[Sequence[ChatMessage], Body], ReadBody]


ReadApi = Callable[[Body, bytes], ReadBody | Continuation]
"""Parses a body of one API for the tenant with that id. Raises RequestError that names the field."""

Begun = tuple[Sequence[Format], Awaitable[list[RequestPart]]]
"""The formats of a request's answers, and the rest of the work that reads its parts."""


@dataclass(frozen=True)
class ChatEndpoint:
    """Serves chats for all APIs. If a client disconnects, the engine stops its request, even without streaming."""

    bodies: BodyReader
    pipeline: Pipeline
    ping_interval_seconds: float

    async def serve(self, read_api: ReadApi, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request.

        The request gives up its place as soon as the answer is generated, even if the client is still reading it.
        """
        with self.bodies.begin_request(scope) as request:
            # Only _read() has the body, and drops it.
            reading = self._read(read_api, scope, await self.bodies.read_body(scope, receive, request), request)
            with while_connected(scope):
                await self._answer(reading, request, scope, send)

    async def answer(self, read_api: ReadApi, body: bytes, account: Account, send: Send) -> str:
        """Answer *body* for *account* as a whole, for no client that waits. *send* gets the response.

        Return a warning about fields that have no effect, or "". The request begins when no other one waits for a
        worker. Raises SaccadeError.
        """
        await account.prepare()
        client = Background(account.tenant.id)
        scope: Scope = {WARNINGS: ""}
        with Request.begin_request(self.bodies.limits, account, client) as request:
            parts = await self._read(read_api, scope, body, request)
            with request.reservation() as unread:
                await self._generate(parts, request, WholeResponse(send, unread))
        warning: str = scope[WARNINGS]
        return warning

    async def preview(self, read_api: ReadApi, scope: Scope, receive: Receive, account: Account) -> Preview:
        """Return where the request in *scope* would go if the tenant of *account* sent it now. Nothing is sent.

        Raises SaccadeError.
        """
        with self.bodies.begin_request(scope, account, is_charged=False) as request:
            body = await self.bodies.read_body(scope, receive, request)
            [(_, part), *_] = await self._read(read_api, scope, body, request)
            return await self.pipeline.preview(request, part)

    async def count(self, read_api: ReadApi, scope: Scope, receive: Receive) -> int:
        """Check the chat as for an answer, and return how many tokens its prompt has, with images expanded."""
        with self.bodies.begin_request(scope) as request:
            reading = self._read(read_api, scope, await self.bodies.read_body(scope, receive, request), request)
            with while_connected(scope):
                [(form, part)] = await reading
                with form.names.in_errors():
                    return await self.pipeline.count(request, part)

    async def _read(
        self, read_api: ReadApi, scope: Scope, body: bytes | bytearray, request: Request
    ) -> list[tuple[Format, RequestPart]]:
        """Return the parts of a request, each with the format of its answer."""
        await request.hold_values(body, self.bodies.threads)
        begun = await self._begin(lambda body: read_api(body, request.tenant.id), scope, body, request)
        while isinstance(begun, Continuation):
            # The store may have to wait, so the request holds no turn.
            known = await begun.recall()
            begun = await self._begin(partial(begun.read_chat, known), scope, body, request)
            del known
        formats, reading = begun
        names = formats[0].names
        # Only the coroutine has the messages, and drops them.
        del body, begun
        with names.in_errors():
            parts = await reading
        scope[WARNINGS] = "; ".join(filter(None, (scope[WARNINGS], warning_of(parts[0], names))))
        return list(zip(formats, parts, strict=True))

    async def _begin(
        self,
        parse: Callable[[Body], ReadBody | Continuation],
        scope: Scope,
        body: bytes | bytearray,
        request: Request,
    ) -> Begun | Continuation:
        """Parse *body* in a turn. Unless it continues a conversation, do the quick part of reading its chat as well."""
        threads = self.bodies.threads
        async with request.turn(len(body)):
            start = time.perf_counter()
            read = await threads.parse(body, parse)
            if isinstance(read, Continuation):
                return read
            if threads.takes(body):
                # A thread has parsed it.
                start = time.perf_counter()
            if read.num_kept_bytes:
                request.lifetime_memory.take_bytes(read.num_kept_bytes)
            if read.num_recalled_bytes:
                request.hold_recalled(read.num_recalled_bytes)
            scope[WARNINGS] = read.warning
            with read.formats[0].names.in_errors():
                prompts = [form.prompt for form in read.formats if form.prompt is not None]
                reading = self.pipeline.read_chat(request, read.request, prompts)
            self.pipeline.metrics.note_pause("read", start)
        return read.formats, reading

    async def _answer(
        self, reading: Coroutine[Any, Any, list[tuple[Format, RequestPart]]], request: Request, scope: Scope, send: Send
    ) -> None:
        parts = await reading
        scope[IS_COUNTED] = True
        with request.reservation() as unread:
            if not parts[0][1].params.stream:
                await self._generate(parts, request, WholeResponse(send, unread))
                return
            connection, failure = scope[CONNECTION], parts[0][0].failure
            async with EventStream(send, connection, self.ping_interval_seconds, unread, failure) as stream:
                await self._generate(parts, request, stream)

    async def _generate(
        self, parts: Sequence[tuple[Format, RequestPart]], request: Request, response: EventStream | WholeResponse
    ) -> None:
        metrics = self.pipeline.metrics

        async def generate(form: Format, part: RequestPart) -> None:
            writers = list[AnswerWriter]()

            def deliver(answer: Answer) -> Delivery:
                writers.append(form.writer(answer))
                return Delivery(answer, writers[0], response, metrics)

            with form.names.in_errors():
                await self.pipeline.answer(request, part, deliver)
                if last := await writers[0].end_answer():
                    await response.end_response(last)

        await all_or_none(generate(*one) for one in parts)
