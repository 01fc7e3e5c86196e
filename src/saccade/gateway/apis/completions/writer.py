"""Writes the answers to POST /v1/completions."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from saccade.gateway.apis.completions.batch import CompletionBatch
from saccade.gateway.apis.completions.wire import Completion, CompletionChoice, CompletionLogprobs
from saccade.gateway.chat import PlainPrompt
from saccade.gateway.chat_request import StreamOptions
from saccade.gateway.json_parts import (
    ID_BYTES,
    TURN_BYTES,
    JsonItems,
    Part,
    filled,
    joined,
    made_in_turns,
    num_bytes,
    separated,
)
from saccade.gateway.output.answer import Answer, CompletionTokensDetails, PromptTokensDetails, Usage
from saccade.gateway.output.choice import AnswerChunk, GeneratedChoice
from saccade.gateway.output.logprobs import TokenLogprobs, choice_logprobs, prompt_logprobs
from saccade.gateway.output.token_record import TokenRecord
from saccade.gateway.server.events import DONE, event
from saccade.tokenization.tokenizer import Tokenizer

_COLUMNS: Final = tuple(b'"%b":[]' % name.encode() for name in CompletionLogprobs.__struct_fields__)


class JoinedAnswers:
    """Joins the answers to all prompts of one request into one object or one stream."""

    def __init__(self, batch: CompletionBatch) -> None:
        self.batch = batch
        self._num_open = len(batch.prompts)
        self._usage = Usage(0, 0, 0, PromptTokensDetails(), CompletionTokensDetails())
        self._choices: dict[int, list[list[Part]]] = {}
        self._template: Completion | None = None
        self._last_events = b""
        self._ends_with_usage, self._has_each_usage = StreamOptions.usages(batch.request.stream_options)

    def whole(self, answer: Answer, first_index: int, choices: list[list[Part]]) -> list[Part]:
        """Add the *choices* of one answer, the first of which has the index *first_index*.

        If this was the last answer, return the object with all of them; else return nothing.
        """
        self._choices[first_index] = choices
        if not self._end(answer):
            return []
        ordered = (choice for index in sorted(self._choices) for choice in self._choices[index])
        template = msgspec.structs.replace(self._common(answer), usage=self._usage)
        return filled(template, {b'"choices":[]': separated(ordered)})

    def event(self, answer: Answer, choice: CompletionChoice) -> bytes:
        """Return the event for a piece of *answer*."""
        return event(msgspec.json.encode(msgspec.structs.replace(self._piece(answer), choices=[choice])))

    def event_of(self, answer: Answer, choice: list[Part]) -> bytes:
        """Return the event for a piece of *answer* that is already JSON."""
        return event(b"".join(joined(filled(self._piece(answer), {b'"choices":[]': choice}), TURN_BYTES)))

    def end_answer(self, answer: Answer, events: bytes) -> list[Part]:
        """End one *answer* with its last *events*.

        If this was the last answer to end, return the last events of all answers; else return nothing.
        """
        self._last_events += events
        if not self._end(answer):
            return []
        usage = msgspec.structs.replace(self._common(answer), usage=self._usage)
        return [self._last_events, event(msgspec.json.encode(usage)) if self._ends_with_usage else b"", DONE]

    def _piece(self, answer: Answer) -> Completion:
        """Return an event without its choice."""
        template = self._common(answer)
        if not self._ends_with_usage:
            return template
        return msgspec.structs.replace(template, usage=answer.usage if self._has_each_usage else None)

    def _common(self, answer: Answer) -> Completion:
        """Return the fields that all pieces share, which the first answer determines."""
        if self._template is None:
            completion_id = answer.id.replace("chatcmpl-", "cmpl-")
            self._template = Completion(id=completion_id, created=answer.created, model=answer.served.name, choices=[])
        return self._template

    def _end(self, answer: Answer) -> bool:
        self._usage = _sum(self._usage, answer.usage)
        self._num_open -= 1
        return not self._num_open


class _CompletionWriter:
    """Writes the *answer* to prompt number *index*."""

    def __init__(self, joined: JoinedAnswers, index: int, prompt: PlainPrompt, answer: Answer) -> None:
        self._joined = joined
        self._batch = joined.batch
        self._first_index = index * (joined.batch.request.n or 1)
        self._prompt = prompt
        self._answer = answer

    def _echoed(self) -> "_Echoed":
        """Return the prompt as each choice repeats it. This is slow for a long prompt with log probabilities."""
        answer, text, columns, ranked, ids = self._answer, self._echoed_text, None, None, None
        tokenizer, token_ids = answer.served.tokenizer, answer.prompt_token_ids
        if self._batch.prompt_logprobs:
            ranked = JsonItems(prompt_logprobs(tokenizer, token_ids, answer.prompt_logprobs))
        if self._echoes_logprobs:
            # The tokenizer's own first token is no part of a text; ids are shown as they came.
            as_ids = isinstance(self._prompt.content, list)
            places = TextPlaces(tokenizer, as_ids, continues=False).places_of(token_ids)
            growing = _Columns(self._num_top)
            growing.add_first(places[0], tokenizer.bytes_of[token_ids[0]].decode(errors="replace"))
            growing.add(choice_logprobs(tokenizer, token_ids[1:], answer.prompt_logprobs).content, places[1:])
            columns = growing.parts()
        if self._batch.token_ids:
            ids = msgspec.json.encode(token_ids)[1:-1]
        return _Echoed(msgspec.json.encode(text)[1:-1], len(text), columns, ids, ranked)

    @property
    def _echoes_logprobs(self) -> bool:
        return self._batch.echo and bool(self._batch.request.logprobs)

    @property
    def _echoed_text(self) -> str:
        if not self._batch.echo:
            return ""
        content = self._prompt.content
        return content if isinstance(content, str) else self._answer.served.tokenizer.decode(content)

    @property
    def _num_top(self) -> int:
        return self._batch.request.top_logprobs or 0

    def _places(self, num_characters: int) -> "TextPlaces":
        shows_special = self._batch.request.skip_special_tokens is False
        return TextPlaces(self._answer.served.tokenizer, shows_special, num_characters)


class CompletionObject(_CompletionWriter):
    """Writes one text_completion object for all prompts."""

    def __init__(self, joined: JoinedAnswers, index: int, prompt: PlainPrompt, answer: Answer) -> None:
        super().__init__(joined, index, prompt, answer)
        self._choices = [
            _GrowingChoice(choice, self._places(0), self._num_top, self._batch.token_ids) for choice in answer.choices
        ]
        self.num_kept_bytes = 0

    def take_chunk(self, chunk: AnswerChunk) -> bytes:
        """Keep *chunk*, and return no events, because the answer is sent whole."""
        grown = self._choices[chunk.choice.index]
        num_before = grown.num_bytes
        grown.add(chunk)
        self.num_kept_bytes += grown.num_bytes - num_before
        return b""

    async def end_answer(self) -> list[Part]:
        """Return the object as JSON, or nothing if another prompt's answer has not ended yet."""
        # The entries of a long prompt would block the event loop for too long.
        prompt = await asyncio.to_thread(self._echoed)
        makers = (partial(choice.whole, self._first_index, prompt) for choice in self._choices)
        return self._joined.whole(self._answer, self._first_index, await made_in_turns(makers))


class CompletionEvents(_CompletionWriter):
    """Writes the events of a stream. After the last prompt's events come the usage, if requested, and [DONE].

    The first event of a choice shows the prompt, if requested. A thread writes the prompt's log probabilities, and
    events wait for them.
    """

    def __init__(self, joined: JoinedAnswers, index: int, prompt: PlainPrompt, answer: Answer) -> None:
        super().__init__(joined, index, prompt, answer)
        num_echoed = len(self._echoed_text) if self._echoes_logprobs else 0
        self._all_places = [self._places(num_echoed) for _ in answer.choices]
        self._unbegun = set(range(len(answer.choices)) if self._batch.echo or self._batch.token_ids else ())
        self._waiting: list[tuple[int, bytes]] = []
        self._prompt_part: asyncio.Future[_Echoed] | None = None
        self.num_kept_bytes = 0

    def take_chunk(self, chunk: AnswerChunk) -> bytes:
        """Return the events that waited, then the event for *chunk*.

        If the prompt was requested, an event with the prompt precedes each choice's first event. Return nothing until
        the prompt's log probabilities are ready.
        """
        choice = chunk.choice
        if not chunk.content and choice.record is None and choice.finish_reason is None:
            return b""
        logprobs, token_ids = self._record(choice, self._all_places[choice.index])
        piece = CompletionChoice(
            chunk.content, self._first_index + choice.index, logprobs, choice.finish_reason, token_ids
        )
        wire = self._joined.event(self._answer, piece)
        if not self._unbegun:
            return wire
        self._waiting.append((choice.index, wire))
        self.num_kept_bytes += len(wire)
        return self._begin()

    async def end_answer(self) -> list[Part]:
        """Return the last events, or nothing if another prompt's answer has not ended yet."""
        events = b""
        if self._waiting:
            events = self._with_prompt(await (self._prompt_part or asyncio.to_thread(self._echoed)))
        return self._joined.end_answer(self._answer, events)

    def _begin(self) -> bytes:
        """Return the waiting events, after those that show the prompt. Return nothing until the prompt is ready."""
        if self._prompt_part is None:
            loop = asyncio.get_running_loop()
            if not self._echoes_logprobs:
                self._prompt_part = loop.create_future()
                self._prompt_part.set_result(self._echoed())
            # Another choice's tokens may come before those of the first one, which have the prompt's.
            elif self._answer.prompt_logprobs or len(self._answer.prompt_token_ids) < 2:
                self._prompt_part = loop.run_in_executor(None, self._echoed)
        if self._prompt_part is None or not self._prompt_part.done():
            return b""
        return self._with_prompt(self._prompt_part.result())

    def _with_prompt(self, prompt: "_Echoed") -> bytes:
        """Return the waiting events.

        An event with the prompt's text, ids, or both precedes each choice's first event.
        """
        waiting, self._waiting, self.num_kept_bytes = self._waiting, [], 0
        events = list[bytes]()
        for index, wire in waiting:
            if index in self._unbegun:
                self._unbegun.remove(index)
                first = prompt.with_choice(CompletionChoice("", self._first_index + index), None)
                events.append(self._joined.event_of(self._answer, first))
            events.append(wire)
        return b"".join(events)

    def _record(
        self, choice: GeneratedChoice, places: "TextPlaces"
    ) -> tuple[CompletionLogprobs | None, list[int] | UnsetType]:
        """Return the requested log probabilities and ids of the tokens since the last call."""
        if choice.record is None:
            return None, UNSET
        logprobs, token_ids = choice.record.flush()
        ids = token_ids if isinstance(token_ids, list) else []
        entries = None if logprobs is None else _in_text(logprobs.content, places.places_of(ids), self._num_top)
        return entries, ids if self._batch.token_ids else UNSET


class _Columns:
    """The log probabilities of a growing text, column by column. Each entry is encoded as it arrives."""

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._places: list[int] = []
        self._columns = (JsonItems(), JsonItems(), JsonItems())

    @property
    def num_bytes(self) -> int:
        """An estimate of the size of all columns, in bytes."""
        return ID_BYTES * len(self._places) + num_bytes(self._columns)

    def add_first(self, place: int, token: str) -> None:
        """Add the first *token* of a prompt, which has no log probability."""
        self._add(place, None, token, None)

    def add(self, entries: Sequence[TokenLogprobs], places: Sequence[int]) -> None:
        """Add the tokens of *entries*, which begin at *places* in the text."""
        for entry, place in zip(entries, places, strict=False):
            self._add(place, entry.logprob, entry.token, _likeliest(entry, self._num_top))

    def drop(self, num_tokens: int) -> None:
        """Drop the last *num_tokens* tokens."""
        del self._places[max(0, len(self._places) - num_tokens) :]
        for column in self._columns:
            column.drop(num_tokens)

    def parts(self, num_characters: int = 0) -> tuple[Part, ...]:
        """Return the columns as JSON, for a text that begins after *num_characters* characters."""
        return msgspec.json.encode([num_characters + place for place in self._places])[1:-1], *self._columns

    def _add(self, place: int, logprob: float | None, token: str, likeliest: dict[str, float] | None) -> None:
        self._places.append(place)
        for column, item in zip(self._columns, (logprob, token, likeliest), strict=True):
            column.add_item(item)


class _GrowingChoice:
    """Collects one choice of an answer that is sent whole; *places* gives the offset of each token in its own text."""

    def __init__(self, choice: GeneratedChoice, places: "TextPlaces", num_top: int, with_ids: bool) -> None:
        self._choice = choice
        self._places = places
        self._with_ids = with_ids
        self._text = StringIO()
        self._num_text_bytes = 0
        self._columns = _Columns(num_top)
        self._token_ids: list[int] = []

    @property
    def num_bytes(self) -> int:
        """An estimate of the choice's size so far, in bytes."""
        return self._num_text_bytes + self._columns.num_bytes + ID_BYTES * len(self._token_ids)

    def add(self, chunk: AnswerChunk) -> None:
        """Add *chunk*, and its tokens if they are requested."""
        self._text.write(chunk.content)
        self._num_text_bytes += chunk.num_bytes
        if self._choice.record is not None:
            self._flush(self._choice.record)

    def whole(self, first_index: int, prompt: "_Echoed") -> list[Part]:
        """Return the prompt and the complete choice as JSON."""
        choice = self._choice
        has_logprobs = choice.record is not None and self._flush(choice.record)
        wire = CompletionChoice(
            "",
            first_index + choice.index,
            finish_reason=choice.finish_reason,
            token_ids=self._token_ids if self._with_ids and choice.record is not None else UNSET,
        )
        text = msgspec.json.encode(self._text.getvalue())[1:-1]
        return prompt.with_choice(wire, self._columns.parts(prompt.num_characters) if has_logprobs else None, text)

    def _flush(self, record: TokenRecord) -> bool:
        """Add the tokens of *record*. Return whether it has log probabilities."""
        num_recalled = record.recall()
        self._columns.drop(num_recalled)
        del self._token_ids[max(0, len(self._token_ids) - num_recalled) :]
        logprobs, token_ids = record.flush()
        ids = token_ids if isinstance(token_ids, list) else []
        if logprobs is not None:
            self._columns.add(logprobs.content, self._places.places_of(ids))
        if self._with_ids:
            self._token_ids += ids
        return logprobs is not None


@dataclass(frozen=True)
class _Echoed:
    """The parts of the prompt that each of its choices repeats, as JSON.

    *text* encodes *num_characters* characters. *columns* holds the prompt's log probabilities in OpenAI's format, and
    *ranked* holds them in vLLM's.
    """

    text: bytes
    num_characters: int
    columns: tuple[Part, ...] | None
    token_ids: bytes | None
    ranked: JsonItems | None

    def with_choice(self, choice: CompletionChoice, columns: tuple[Part, ...] | None, text: bytes = b"") -> list[Part]:
        """Return *choice* as JSON, with the prompt before its own *text* and *columns*."""
        fields: dict[bytes, Iterable[Part]] = {b'"text":""': [self.text, text]}
        several = [one for one in (self.columns, columns) if one is not None]
        if several:
            choice = msgspec.structs.replace(choice, logprobs=CompletionLogprobs([], [], [], []))
            for name, parts in zip(_COLUMNS, zip(*several, strict=True), strict=True):
                fields[name] = separated([part] for part in parts if num_bytes([part]))
        if self.token_ids is not None:
            choice = msgspec.structs.replace(choice, prompt_token_ids=[])
            fields[b'"prompt_token_ids":[]'] = [self.token_ids]
        if self.ranked is not None:
            choice = msgspec.structs.replace(choice, prompt_logprobs=[])
            fields[b'"prompt_logprobs":[]'] = [self.ranked]
        return filled(choice, fields)


class TextPlaces:
    """Computes the offset of each token in the text, in characters; the first token begins at *num_characters*.

    A token that is hidden, or that ends within a character, adds no characters.
    """

    def __init__(
        self, tokenizer: Tokenizer, shows_special: bool, num_characters: int = 0, *, continues: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._shows_special = shows_special
        self._num_characters = num_characters
        self._stream = tokenizer.stream(continues=continues)

    def places_of(self, token_ids: Sequence[int]) -> list[int]:
        """Return the offsets of the next tokens."""
        places = []
        for token_id in token_ids:
            places.append(self._num_characters)
            if self._shows_special or not self._tokenizer.is_special(token_id):
                self._num_characters += len(self._stream.push_token(token_id))
        return places


def _in_text(entries: Sequence[TokenLogprobs], places: list[int], num_top: int) -> CompletionLogprobs:
    return CompletionLogprobs(
        places,
        [entry.logprob for entry in entries],
        [entry.token for entry in entries],
        [_likeliest(entry, num_top) for entry in entries],
    )


def _likeliest(entry: TokenLogprobs, num_top: int) -> dict[str, float]:
    """Return the log probabilities of the likeliest tokens and of the chosen one, keyed by token text.

    If several tokens have the same text, the likeliest one counts.
    """
    likeliest: dict[str, float] = {}
    for token in (*entry.top_logprobs[:num_top], entry):
        likeliest.setdefault(token.token, token.logprob)
    return likeliest


def _sum(first: Usage, second: Usage) -> Usage:
    num_cached = first.prompt_tokens_details.cached_tokens + second.prompt_tokens_details.cached_tokens
    reasoning = first.completion_tokens_details.reasoning_tokens + second.completion_tokens_details.reasoning_tokens
    return Usage(
        first.prompt_tokens + second.prompt_tokens,
        first.completion_tokens + second.completion_tokens,
        first.total_tokens + second.total_tokens,
        PromptTokensDetails(num_cached),
        CompletionTokensDetails(reasoning),
    )
