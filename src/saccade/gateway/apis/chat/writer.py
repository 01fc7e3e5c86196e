"""Writes the answers to POST /v1/chat/completions."""

import asyncio
from io import StringIO

import msgspec
from msgspec import UNSET

from saccade.gateway.apis.chat.wire import (
    AnswerMessage,
    ChatCompletion,
    ChatCompletionChunk,
    Choice,
    ChunkChoice,
    Delta,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from saccade.gateway.chat_request import CalledFunction, StreamOptions
from saccade.gateway.json_parts import ID_BYTES, JsonItems, Part, filled, made_in_turns, separated
from saccade.gateway.output.answer import Answer
from saccade.gateway.output.call_reader import GeneratedCall, joined_calls
from saccade.gateway.output.choice import AnswerChunk, GeneratedChoice
from saccade.gateway.output.logprobs import ChoiceLogprobs, prompt_logprobs
from saccade.gateway.output.token_record import TokenRecord
from saccade.gateway.server.events import DONE, event


class ChatCompletionObject:
    """Writes a `chat.completion` object."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._choices = [_GrowingChoice(choice) for choice in answer.choices]
        self.num_kept_bytes = 0

    def take_chunk(self, chunk: AnswerChunk) -> bytes:
        """Keep *chunk*, and return no events, because the answer is sent whole."""
        grown = self._choices[chunk.choice.index]
        num_before = grown.num_bytes
        grown.add(chunk)
        self.num_kept_bytes += grown.num_bytes - num_before
        return b""

    async def end_answer(self) -> list[Part]:
        """Return the object as JSON."""
        answer = self._answer
        has_ranked = answer.request.prompt_logprobs is not None
        # The entries of a long prompt would block the event loop for too long.
        ranked = {b'"prompt_logprobs":[]': [await asyncio.to_thread(self._ranked)]} if has_ranked else {}
        choices = await made_in_turns(choice.whole for choice in self._choices)
        template = ChatCompletion(
            id=answer.id,
            created=answer.created,
            model=answer.served.name,
            choices=[],
            usage=answer.usage,
            prompt_logprobs=[] if has_ranked else UNSET,
            prompt_token_ids=answer.prompt_token_ids if answer.request.return_token_ids else UNSET,
        )
        return filled(template, {b'"choices":[]': separated(choices), **ranked})

    def _ranked(self) -> JsonItems:
        answer = self._answer
        return JsonItems(prompt_logprobs(answer.served.tokenizer, answer.prompt_token_ids, answer.prompt_logprobs))


class ChatCompletionEvents:
    """Writes `chat.completion.chunk` events: roles, text, tool calls and finish reasons, then any requested usage."""

    num_kept_bytes = 0

    def __init__(self, answer: Answer) -> None:
        self._with_usage, self._with_each_usage = StreamOptions.usages(answer.request.stream_options)
        self._answer = answer
        self._template = ChatCompletionChunk(
            id=answer.id,
            created=answer.created,
            model=answer.served.name,
            choices=[],
            usage=None if self._with_usage else UNSET,
        )
        self._texts = [_TextEvents(self._template, choice) for choice in answer.choices]
        self._has_begun = False

    def take_chunk(self, chunk: AnswerChunk) -> bytes:
        """Return the events for *chunk*. Before the first ones come the events that set the roles."""
        template = self._template
        if self._with_each_usage:
            template = msgspec.structs.replace(template, usage=self._answer.usage)
        if _is_text(chunk) and not self._with_each_usage:
            events = self._texts[chunk.choice.index].event_of(chunk.content)
        else:
            events = _events(template, chunk)
        if events and not self._has_begun:
            self._has_begun = True
            return _roles(template, self._answer) + events
        return events

    async def end_answer(self) -> list[Part]:
        """Return the usage event, if requested, and [DONE]."""
        if not self._with_usage:
            return [DONE]
        return [_event(msgspec.structs.replace(self._template, usage=self._answer.usage)), DONE]


class _GrowingChoice:
    """Collects one choice of an answer that is sent whole.

    Log probabilities are encoded as they arrive, since encoding all of them at the end would take too long.
    """

    def __init__(self, choice: GeneratedChoice) -> None:
        self._choice = choice
        self._reasoning, self._content = StringIO(), StringIO()
        self._calls: list[GeneratedCall] = []
        self._logprobs = JsonItems()
        self._token_ids: list[int] = []
        self._num_text_bytes = 0

    @property
    def num_bytes(self) -> int:
        """An estimate of the choice's size so far, in bytes."""
        return self._num_text_bytes + self._logprobs.num_bytes + ID_BYTES * len(self._token_ids)

    def add(self, chunk: AnswerChunk) -> None:
        """Add *chunk*, and its tokens if they are requested."""
        self._num_text_bytes += chunk.num_bytes
        self._reasoning.write(chunk.reasoning)
        self._content.write(chunk.content)
        self._calls += chunk.calls
        if self._choice.record is not None:
            self._flush(self._choice.record)

    def whole(self) -> list[Part]:
        """Return the complete choice as JSON."""
        choice = self._choice
        content = None if choice.ends_in_reasoning else self._content.getvalue()
        calls = [ToolCall(call.id, CalledFunction(call.name, call.arguments)) for call in joined_calls(self._calls)]
        reasoning = self._reasoning.getvalue()
        has_logprobs, has_ids = (False, False) if choice.record is None else self._flush(choice.record)
        template = Choice(
            message=AnswerMessage(
                (content or None) if calls else content, reasoning or UNSET, reasoning or UNSET, calls or UNSET
            ),
            finish_reason=choice.finish_reason or "",
            index=choice.index,
            logprobs=ChoiceLogprobs([]) if has_logprobs else None,
            token_ids=self._token_ids if has_ids else UNSET,
        )
        # The message's own `content` is a text or null.
        return filled(template, {b'"content":[]': [self._logprobs]} if has_logprobs else {})

    def _flush(self, record: TokenRecord) -> tuple[bool, bool]:
        """Add the tokens of *record*. Return whether it has log probabilities, and whether it has ids."""
        num_recalled = record.recall()
        self._logprobs.drop(num_recalled)
        del self._token_ids[max(0, len(self._token_ids) - num_recalled) :]
        logprobs, token_ids = record.flush()
        for entry in () if logprobs is None else logprobs.content:
            self._logprobs.add_item(entry)
        self._token_ids += token_ids if isinstance(token_ids, list) else ()
        return logprobs is not None, isinstance(token_ids, list)


def _roles(template: ChatCompletionChunk, answer: Answer) -> bytes:
    """Return an opening event for each choice; the first has the prompt's token ids if they are requested."""
    delta = Delta(role="assistant", content="")
    first, *others = (
        msgspec.structs.replace(template, choices=[ChunkChoice(delta, index=choice.index)]) for choice in answer.choices
    )
    if answer.request.return_token_ids:
        first = msgspec.structs.replace(first, prompt_token_ids=answer.prompt_token_ids)
    return b"".join(map(_event, (first, *others)))


def _events(template: ChatCompletionChunk, chunk: AnswerChunk) -> bytes:
    """Return an event for the reasoning, one for the content, and one for each call or piece of a call.

    At the end of the choice, an event with the finish reason follows. Requested token ids and logprobs come with the
    first event after their tokens.
    """
    choice = chunk.choice
    deltas = [Delta(reasoning_content=chunk.reasoning, reasoning=chunk.reasoning)] if chunk.reasoning else []
    deltas += [Delta(content=chunk.content)] if chunk.content else []
    deltas += [Delta(tool_calls=[_call_delta(call)]) for call in chunk.calls if call.begins or call.arguments]
    wires = [_with_record(choice, delta) for delta in deltas]
    if choice.finish_reason is not None:
        wires += _ending(choice)
    return b"".join(_event(msgspec.structs.replace(template, choices=[wire])) for wire in wires)


def _call_delta(call: GeneratedCall) -> ToolCallDelta:
    if not call.begins:
        return ToolCallDelta(index=call.index, function=FunctionDelta(arguments=call.arguments))
    function = FunctionDelta(name=call.name, arguments=call.arguments)
    return ToolCallDelta(index=call.index, id=call.id, function=function, type="function")


def _ending(choice: GeneratedChoice) -> list[ChunkChoice]:
    """Return the choice's last chunk, which has the finish reason and an empty delta.

    Any log probabilities that are left come in a chunk before it, because clients stop reading at the finish reason.
    """
    ending = _with_record(choice, Delta(), choice.finish_reason)
    if ending.logprobs is None or not ending.logprobs.content:
        return [ending]
    rest = msgspec.structs.replace(ending, delta=Delta(content=""), finish_reason=None)
    return [rest, _with_record(choice, Delta(), choice.finish_reason)]


class _TextEvents:
    """Writes one choice's events that contain only text, as nearly all events do.

    The JSON around the text is encoded once, because encoding a whole chunk takes several times as long.
    """

    def __init__(self, template: ChatCompletionChunk, choice: GeneratedChoice) -> None:
        wire = ChunkChoice(Delta(content=""), index=choice.index)
        # JSON strings escape their quotes, so only the field itself looks like this.
        whole = _event(msgspec.structs.replace(template, choices=[wire]))
        self._head, _, self._tail = whole.partition(b'"content":""')

    def event_of(self, content: str) -> bytes:
        """Return the event for *content*, or nothing if it is empty."""
        return self._head + b'"content":' + msgspec.json.encode(content) + self._tail if content else b""


def _is_text(chunk: AnswerChunk) -> bool:
    return not (
        chunk.reasoning or chunk.calls or chunk.choice.record is not None or chunk.choice.finish_reason is not None
    )


def _with_record(choice: GeneratedChoice, delta: Delta, finish_reason: str | None = None) -> ChunkChoice:
    """Return a choice for a chunk, with *delta* and the requested token ids and logprobs."""
    if choice.record is None:
        return ChunkChoice(delta, finish_reason, choice.index)
    return ChunkChoice(delta, finish_reason, choice.index, *choice.record.flush())


def _event(chunk: ChatCompletionChunk) -> bytes:
    return event(msgspec.json.encode(chunk))
