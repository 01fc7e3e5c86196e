"""POST /v1/chat/completions: how its bodies are read and its answers written."""

import asyncio
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from saccade.gateway.api.chat_endpoint import Format, ReadBody
from saccade.gateway.openai import answers
from saccade.gateway.openai.field_names import FieldNames
from saccade.gateway.openai.parameters import parse_chat
from saccade.gateway.openai.requests import CalledFunction
from saccade.gateway.output.answer import Answer
from saccade.gateway.output.choice import Chunk, GeneratedChoice
from saccade.gateway.output.choice_logprobs import prompt_logprobs
from saccade.gateway.output.tool_calls.reader import GeneratedCall
from saccade.gateway.server.event_stream import DONE, error_event, event


@dataclass(frozen=True)
class ChatCompletions:
    """OpenAI's chats."""

    strict_parameters: bool

    def read(self, body: bytes | bytearray, tenant: bytes) -> ReadBody:
        """Return the chat in *body*. Raises RequestError that names the field."""
        request, warning = parse_chat(body, self.strict_parameters)
        writer = ChatCompletionEvents if request.stream else ChatCompletionObject
        return ReadBody(request, warning, [Format(FieldNames(), writer, error_event)])


class ChatCompletionObject:
    """Writes a `chat.completion` object."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._chunks: list[list[Chunk]] = [[] for _ in answer.choices]

    def take(self, chunk: Chunk) -> bytes:
        """Keep *chunk*; there are no events."""
        self._chunks[chunk.choice.index].append(chunk)
        return b""

    async def end(self) -> bytes:
        """Return the object, in JSON."""
        answer, ranked = self._answer, None
        if answer.request.prompt_logprobs is not None:
            # The entries of a long prompt take too long for the event loop.
            tokenizer = answer.served.tokenizer
            ranked = await asyncio.to_thread(
                prompt_logprobs, tokenizer, answer.prompt_token_ids, answer.prompt_logprobs
            )
        completion = answers.ChatCompletion(
            id=answer.id,
            created=answer.created,
            model=answer.served.name,
            choices=[_whole_choice(choice, self._chunks[choice.index]) for choice in answer.choices],
            usage=answer.usage,
            prompt_logprobs=UNSET if ranked is None else ranked,
            prompt_token_ids=answer.prompt_token_ids if answer.request.return_token_ids else UNSET,
        )
        return msgspec.json.encode(completion)


class ChatCompletionEvents:
    """Writes `chat.completion.chunk` events: the role of every choice, texts, finish reasons, usage if asked for."""

    def __init__(self, answer: Answer) -> None:
        options = answer.request.stream_options
        self._with_usage = options is not None and bool(options.include_usage)
        self._answer = answer
        self._template = answers.ChatCompletionChunk(
            id=answer.id,
            created=answer.created,
            model=answer.served.name,
            choices=[],
            usage=None if self._with_usage else UNSET,
        )
        self._texts = [_TextEvents(self._template, choice) for choice in answer.choices]
        self._has_begun = False

    def take(self, chunk: Chunk) -> bytes:
        """Return the events for *chunk*, after those for the roles if it is the first that has any."""
        if _is_text(chunk):
            events = self._texts[chunk.choice.index].of(chunk.content)
        else:
            events = _events(self._template, chunk)
        if events and not self._has_begun:
            self._has_begun = True
            return _roles(self._template, self._answer) + events
        return events

    async def end(self) -> bytes:
        """Return the event for the usage, if asked for, and [DONE]."""
        if not self._with_usage:
            return DONE
        return _event(msgspec.structs.replace(self._template, usage=self._answer.usage)) + DONE


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


class _TextEvents:
    """Events of one choice that have text of its content and nothing else, which nearly all tokens are.

    What is around the text is encoded once: to encode a whole chunk takes several times as long.
    """

    def __init__(self, template: answers.ChatCompletionChunk, choice: GeneratedChoice) -> None:
        wire = answers.ChunkChoice(answers.Delta(content=""), index=choice.index)
        # Within JSON's strings quotes are escaped, so only the field itself looks like this.
        whole = _event(msgspec.structs.replace(template, choices=[wire]))
        self._head, _, self._tail = whole.partition(b'"content":""')

    def of(self, content: str) -> bytes:
        """Return the event for *content*, none where it is empty."""
        return self._head + b'"content":' + msgspec.json.encode(content) + self._tail if content else b""


def _is_text(chunk: Chunk) -> bool:
    return not (
        chunk.reasoning or chunk.calls or chunk.choice.record is not None or chunk.choice.finish_reason is not None
    )


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


def _event(chunk: answers.ChatCompletionChunk) -> bytes:
    return event(msgspec.json.encode(chunk))
