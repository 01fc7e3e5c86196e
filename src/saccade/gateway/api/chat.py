"""POST /v1/chat/completions: read the body, generate, and send the answer, whole or as server-sent events."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from saccade.gateway.fleet.dispatch import Preview
from saccade.gateway.generation.answer import Answer
from saccade.gateway.generation.choice import Chunk, GeneratedChoice
from saccade.gateway.generation.choice_logprobs import prompt_logprobs
from saccade.gateway.generation.generate import Asked, Generation
from saccade.gateway.generation.tool_calls.reader import GeneratedCall
from saccade.gateway.http.body_reader import COPIES, BodyReader
from saccade.gateway.http.clients import TrustedProxies
from saccade.gateway.http.connection import CONNECTION
from saccade.gateway.http.event_stream import EventStream, report_errors
from saccade.gateway.http.middleware import SALT, WARNINGS, send_json
from saccade.gateway.limits.admission import Admission
from saccade.gateway.limits.byte_budget import ByteBudget, Reservation
from saccade.gateway.openai import answers
from saccade.gateway.openai.parameters import parse_chat
from saccade.gateway.openai.requests import CalledFunction
from saccade.gateway.prompt.draft import PromptDrafter, is_long
from saccade.gateway.served_models.model_registry import ModelRegistry
from saccade.gateway.structured_output.constraint import read_constraint, without_constraint
from saccade.gateway.structured_output.grammars import RequestGrammars
from saccade.gateway.structured_output.held_calls import with_held_calls
from saccade.protocol.output import TokenDelta

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class ChatCompletions:
    """The endpoint. When a client disconnects, streaming or not, the engine stops its request at once."""

    admission: Admission
    bodies: BodyReader
    memory: ByteBudget
    proxies: TrustedProxies
    model_registry: ModelRegistry
    prompts: PromptDrafter
    generation: Generation
    grammars: RequestGrammars
    ping_interval_seconds: float
    strict_parameters: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. It gives its place back when its answer is generated, not when the client has read it."""
        tenant: bytes = scope[SALT]
        self.admission.check(tenant)
        with self.memory.reservation(tenant or self.proxies.client_of(scope)) as memory:
            asked = await self._read(scope, receive, memory, tenant)
            if asked.request.stream:
                await self._stream(asked, scope, receive, send)
            else:
                await unless_disconnected(receive, self._answer_whole(asked, send))

    async def preview(self, scope: Scope, receive: Receive, tenant: bytes) -> Preview:
        """Return where the request in *scope* would go if *tenant* sent it now; it is not sent. Raises SaccadeError."""
        self.admission.check(tenant)
        with self.memory.reservation(tenant or self.proxies.client_of(scope)) as memory:
            return await self.generation.preview(await self._read(scope, receive, memory, tenant))

    async def _read(self, scope: Scope, receive: Receive, memory: Reservation, tenant: bytes) -> Asked:
        body = await self.bodies.read(scope, receive, memory)
        async with self.admission.turn(len(body)):
            request, warning = parse_chat(body, self.strict_parameters)
            scope[WARNINGS] = warning
            constraint = read_constraint(request)
            request = without_constraint(request)
            served = self.model_registry.get(request.model)
            chat = None if is_long(request) else self.prompts.read(served, request)
        if chat is None:
            chat = await self.prompts.read_long(served, request)
        constraint = with_held_calls(constraint, request, chat.tools, served.tool_calls)
        # From here on only the chat is kept, which is as long as the body at most.
        memory.keep(memory.num_bytes // COPIES)
        request = msgspec.structs.replace(request, messages=[])
        held = None if constraint is None else await self.grammars.of(constraint)
        if held is not None and held.warning:
            scope[WARNINGS] = "; ".join(filter(None, (warning, held.warning)))
        return Asked(request, chat, served, tenant, memory, held)

    async def _stream(self, asked: Asked, scope: Scope, receive: Receive, send: Send) -> None:
        connection = scope.get(CONNECTION)
        is_writable = (lambda: True) if connection is None else (lambda: bool(connection.is_writable))
        with self.memory.reservation(asked.memory.client) as unread:
            async with EventStream(send, self.ping_interval_seconds, is_writable, unread) as stream:
                await unless_disconnected(receive, self._answer_in_events(asked, stream), stream.keep_alive())

    async def _answer_in_events(self, asked: Asked, stream: EventStream) -> None:
        async def generate() -> None:
            async with self.generation.answer(asked) as (answer, deltas):
                await send_stream(stream, answer, deltas)

        await report_errors(stream, generate())
        await stream.flush()

    async def _answer_whole(self, asked: Asked, send: Send) -> None:
        async with self.generation.answer(asked) as (answer, deltas):
            completion = await whole(answer, deltas)
        await send_json(send, 200, completion)


async def unless_disconnected(
    receive: Receive, work: Coroutine[Any, Any, None], *beside: Coroutine[Any, Any, None]
) -> bool:
    """Run *work*, and *beside* as long; cancel all when the client disconnects. Return whether *work* was done."""
    tasks = [asyncio.ensure_future(part) for part in (work, _disconnect(receive), *beside)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled():
            task.result()
    return not tasks[0].cancelled()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def whole(answer: Answer, deltas: AsyncIterator[TokenDelta]) -> bytes:
    """Return *answer* as one chat.completion object, in JSON."""
    chunks: list[list[Chunk]] = [[] for _ in answer.choices]
    async for chunk in answer.chunks(deltas):
        chunks[chunk.choice.index].append(chunk)
    ranked = None
    if answer.request.prompt_logprobs is not None:
        # The entries of a long prompt take too long for the event loop.
        tokenizer = answer.served.tokenizer
        ranked = await asyncio.to_thread(prompt_logprobs, tokenizer, answer.prompt_token_ids, answer.prompt_logprobs)
    completion = answers.ChatCompletion(
        id=answer.id,
        created=answer.created,
        model=answer.served.name,
        choices=[_whole_choice(choice, chunks[choice.index]) for choice in answer.choices],
        usage=answer.usage,
        prompt_logprobs=UNSET if ranked is None else ranked,
        prompt_token_ids=answer.prompt_token_ids if answer.request.return_token_ids else UNSET,
    )
    return msgspec.json.encode(completion)


async def send_stream(stream: EventStream, answer: Answer, deltas: AsyncIterator[TokenDelta]) -> None:
    """Send *answer* as chunks: the role of every choice, texts, finish reasons, usage where it is asked for, [DONE]."""
    options = answer.request.stream_options
    with_usage = options is not None and bool(options.include_usage)
    template = answers.ChatCompletionChunk(
        id=answer.id, created=answer.created, model=answer.served.name, choices=[], usage=None if with_usage else UNSET
    )
    pending = _roles(template, answer)
    async for chunk in answer.chunks(deltas):
        if events := _events(template, chunk):
            await stream.write(pending + events)
            pending = b""
    last = _event(msgspec.structs.replace(template, usage=answer.usage)) if with_usage else b""
    await stream.write(last + DONE, more=False)


def _whole_choice(choice: GeneratedChoice, chunks: list[Chunk]) -> answers.Choice:
    content = None if choice.ends_in_reasoning else "".join(chunk.content for chunk in chunks)
    calls = [_tool_call(call) for chunk in chunks for call in chunk.calls]
    reasoning = "".join(chunk.reasoning for chunk in chunks)
    logprobs, token_ids = (None, UNSET) if choice.record is None else choice.record.flush()
    return answers.Choice(
        message=answers.AnswerMessage((content or None) if calls else content, reasoning or UNSET, calls or UNSET),
        finish_reason=choice.finish_reason or "",
        index=choice.index,
        logprobs=logprobs,
        token_ids=token_ids,
    )


def _roles(template: answers.ChatCompletionChunk, answer: Answer) -> bytes:
    """Return the event that begins each choice; the first has the prompt's token ids where they are asked for."""
    delta = answers.Delta(role="assistant", content="")
    first, *others = (
        msgspec.structs.replace(template, choices=[answers.ChunkChoice(delta, index=choice.index)])
        for choice in answer.choices
    )
    if answer.request.return_token_ids:
        first = msgspec.structs.replace(first, prompt_token_ids=answer.prompt_token_ids)
    return b"".join(map(_event, (first, *others)))


def _events(template: answers.ChatCompletionChunk, chunk: Chunk) -> bytes:
    """Return one event for reasoning, one for content and one for each call; the last one has the finish reason.

    Tokens that a client asked about come with the first event after them.
    """
    choice = chunk.choice
    deltas = [answers.Delta(reasoning_content=chunk.reasoning)] if chunk.reasoning else []
    deltas += [answers.Delta(content=chunk.content)] if chunk.content else []
    deltas += [answers.Delta(tool_calls=[_tool_call_delta(call)]) for call in chunk.calls]
    if choice.finish_reason is not None and not (chunk.content or chunk.calls):
        deltas.append(answers.Delta())
    reasons = [None] * (len(deltas) - 1) + [choice.finish_reason]
    wires = (_with_delta(template, choice, delta, reason) for delta, reason in zip(deltas, reasons, strict=False))
    return b"".join(map(_event, wires))


def _tool_call(call: GeneratedCall) -> answers.ToolCall:
    return answers.ToolCall(call.id, CalledFunction(call.name, call.arguments))


def _tool_call_delta(call: GeneratedCall) -> answers.ToolCallDelta:
    return answers.ToolCallDelta(call.index, call.id, CalledFunction(call.name, call.arguments))


def _with_delta(
    template: answers.ChatCompletionChunk,
    choice: GeneratedChoice,
    delta: answers.Delta,
    finish_reason: str | None = None,
) -> answers.ChatCompletionChunk:
    if choice.record is None:
        wire = answers.ChunkChoice(delta, finish_reason, choice.index)
    else:
        wire = answers.ChunkChoice(delta, finish_reason, choice.index, *choice.record.flush())
    return msgspec.structs.replace(template, choices=[wire])


def _event(template: answers.ChatCompletionChunk) -> bytes:
    return b"data: " + msgspec.json.encode(template) + b"\n\n"
