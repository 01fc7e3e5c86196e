"""POST /v1/completions: the writers of its answers."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import add

import msgspec
from msgspec import UNSET, UnsetType

from saccade.gateway.apis.chat_endpoint import FieldNames, Format, ReadBody
from saccade.gateway.apis.completions.reader import (
    Completion,
    CompletionBatch,
    CompletionChoice,
    CompletionLogprobs,
    parse_completion,
)
from saccade.gateway.chat import PlainPrompt, StreamOptions
from saccade.gateway.json_body import Body
from saccade.gateway.output.answer import Answer, CompletionTokensDetails, PromptTokensDetails, Usage
from saccade.gateway.output.choice import (
    Chunk,
    GeneratedChoice,
    PromptLogprob,
    TokenLogprobs,
    choice_logprobs,
    prompt_logprobs,
)
from saccade.gateway.server.event_stream import DONE, error_event, event
from saccade.tokenization.tokenizer import Tokenizer


def read_completion(strict: bool, body: Body, tenant: bytes) -> ReadBody:
    """Read the body of POST /v1/completions; with *strict*, a ReadApi."""
    batch, warning = parse_completion(body, strict)
    joined = _JoinedAnswers(batch)
    kind = CompletionEvents if batch.request.stream else CompletionObject
    formats = [
        Format(_names(batch, prompt), partial(kind, joined, index, prompt), error_event, prompt)
        for index, prompt in enumerate(batch.prompts)
    ]
    return ReadBody(batch.request, warning, formats)


def _names(batch: CompletionBatch, prompt: PlainPrompt) -> FieldNames:
    names = {"messages": prompt.field, "top_logprobs": "logprobs", "max_completion_tokens": "max_tokens"}
    # Without this parameter, `echo` and `logprobs` together request them.
    return FieldNames(names if batch.prompt_logprobs else {**names, "prompt_logprobs": "logprobs"})


class _JoinedAnswers:
    """The answers to all prompts of one request, as one object or one stream."""

    def __init__(self, batch: CompletionBatch) -> None:
        self.batch = batch
        self._num_open = len(batch.prompts)
        self._usage = Usage(0, 0, 0, PromptTokensDetails(), CompletionTokensDetails())
        self._choices: list[CompletionChoice] = []
        self._template: Completion | None = None
        self._last_events = b""
        self._ends_with_usage, self._has_each_usage = StreamOptions.usages(batch.request.stream_options)

    def whole(self, answer: Answer, choices: Sequence[CompletionChoice]) -> bytes:
        """Add one *answer*; return the object of all answers after the last one, else nothing."""
        self._choices += choices
        if not self._end(answer):
            return b""
        ordered = sorted(self._choices, key=lambda choice: choice.index)
        template = self._common(answer)
        return msgspec.json.encode(msgspec.structs.replace(template, choices=ordered, usage=self._usage))

    def event(self, answer: Answer, choice: CompletionChoice) -> bytes:
        """Return the event for a piece of *answer*."""
        template = self._common(answer)
        if self._ends_with_usage:
            template = msgspec.structs.replace(template, usage=answer.usage if self._has_each_usage else None)
        return event(msgspec.json.encode(msgspec.structs.replace(template, choices=[choice])))

    def end(self, answer: Answer, events: bytes) -> bytes:
        """End one *answer* with its last *events*; after the last answer, return those of all, else nothing."""
        self._last_events += events
        if not self._end(answer):
            return b""
        usage = msgspec.structs.replace(self._common(answer), usage=self._usage)
        return self._last_events + (event(msgspec.json.encode(usage)) if self._ends_with_usage else b"") + DONE

    def _common(self, answer: Answer) -> Completion:
        """Return the fields that all pieces share; the first answer decides them."""
        if self._template is None:
            completion_id = answer.id.replace("chatcmpl-", "cmpl-")
            self._template = Completion(id=completion_id, created=answer.created, model=answer.served.name, choices=[])
        return self._template

    def _end(self, answer: Answer) -> bool:
        self._usage = _sum(self._usage, answer.usage)
        self._num_open -= 1
        return not self._num_open


class _CompletionWriter:
    """Writes the *answer* to the prompt of that *index*."""

    def __init__(self, joined: _JoinedAnswers, index: int, prompt: PlainPrompt, answer: Answer) -> None:
        self._joined = joined
        self._batch = joined.batch
        self._first_index = index * (joined.batch.request.n or 1)
        self._prompt = prompt
        self._answer = answer

    def _record(
        self, choice: GeneratedChoice, places: "TextPlaces"
    ) -> tuple[CompletionLogprobs | None, list[int] | UnsetType]:
        """Return the requested log probabilities and ids of the tokens since the last call."""
        if choice.record is None:
            return None, UNSET
        logprobs, token_ids = choice.record.flush()
        ids = token_ids if isinstance(token_ids, list) else []
        entries = None if logprobs is None else _in_text(logprobs.content, places.of(ids), self._num_top)
        return entries, ids if self._batch.token_ids else UNSET

    def _echoed(self) -> "_Echoed":
        answer = self._answer
        tokenizer, token_ids = answer.served.tokenizer, answer.prompt_token_ids
        ranked = prompt_logprobs(tokenizer, token_ids, answer.prompt_logprobs) if self._batch.prompt_logprobs else None
        text = self._echoed_text
        if not self._echoes_logprobs:
            return _Echoed(text, None, ranked)
        # The tokenizer's own first token is no part of a text; ids are shown as they came.
        as_ids = isinstance(self._prompt.content, list)
        places = TextPlaces(tokenizer, as_ids, continues=False).of(token_ids)
        entries = choice_logprobs(tokenizer, token_ids[1:], answer.prompt_logprobs).content
        first = CompletionLogprobs(
            places[:1], [None], [tokenizer.bytes_of[token_ids[0]].decode(errors="replace")], [None]
        )
        return _Echoed(text, _joined(first, _in_text(entries, places[1:], self._num_top)), ranked)

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

    @property
    def _shows_special(self) -> bool:
        return self._batch.request.skip_special_tokens is False


class CompletionObject(_CompletionWriter):
    """Writes one text_completion object for all prompts."""

    def __init__(self, joined: _JoinedAnswers, index: int, prompt: PlainPrompt, answer: Answer) -> None:
        super().__init__(joined, index, prompt, answer)
        self._texts = [""] * len(answer.choices)

    def take(self, chunk: Chunk) -> bytes:
        """Keep *chunk*; there are no events."""
        self._texts[chunk.choice.index] += chunk.content
        return b""

    async def end(self) -> bytes:
        """Return the object in JSON, or nothing if another prompt's answer ends later."""
        answer = self._answer
        # The entries of a long prompt would block the event loop for too long.
        prompt = await asyncio.to_thread(self._echoed)
        choices = [self._whole_choice(choice, self._texts[choice.index], prompt) for choice in answer.choices]
        return self._joined.whole(answer, choices)

    def _whole_choice(self, choice: GeneratedChoice, text: str, prompt: "_Echoed") -> CompletionChoice:
        answer = self._answer
        places = TextPlaces(answer.served.tokenizer, self._shows_special, len(prompt.text))
        logprobs, token_ids = self._record(choice, places)
        return CompletionChoice(
            prompt.text + text,
            self._first_index + choice.index,
            logprobs if prompt.logprobs is None or logprobs is None else _joined(prompt.logprobs, logprobs),
            choice.finish_reason,
            token_ids,
            answer.prompt_token_ids if self._batch.token_ids else UNSET,
            UNSET if prompt.ranked is None else prompt.ranked,
        )


class CompletionEvents(_CompletionWriter):
    """Writes events; those of the last prompt end with the usage, if requested, and [DONE].

    The log probabilities of a prompt are written in a thread. Events wait for them, since the prompt comes first.
    """

    def __init__(self, joined: _JoinedAnswers, index: int, prompt: PlainPrompt, answer: Answer) -> None:
        super().__init__(joined, index, prompt, answer)
        num_echoed = len(self._echoed_text) if self._echoes_logprobs else 0
        self._places = [TextPlaces(answer.served.tokenizer, self._shows_special, num_echoed) for _ in answer.choices]
        self._has_begun = not (self._batch.echo or self._batch.token_ids)
        self._waiting = b""
        self._prompt_part: asyncio.Future[_Echoed] | None = None

    def take(self, chunk: Chunk) -> bytes:
        """Return the event for *chunk*; the first event is preceded by those that show the prompt."""
        choice = chunk.choice
        if not chunk.content and choice.record is None and choice.finish_reason is None:
            return b""
        logprobs, token_ids = self._record(choice, self._places[choice.index])
        piece = CompletionChoice(
            chunk.content, self._first_index + choice.index, logprobs, choice.finish_reason, token_ids
        )
        events = self._joined.event(self._answer, piece)
        if self._has_begun:
            return events
        self._waiting += events
        return self._begin()

    async def end(self) -> bytes:
        """Return the last events, or nothing if another prompt's answer ends later."""
        events = self._waiting
        if not self._has_begun and self._echoes_logprobs:
            events = self._with_prompt(await (self._prompt_part or asyncio.to_thread(self._echoed)))
        return self._joined.end(self._answer, events)

    def _begin(self) -> bytes:
        """Return the events that wait, after those that show the prompt; nothing if these are not ready."""
        if not self._echoes_logprobs:
            return self._with_prompt(_Echoed(self._echoed_text, None, None))
        # Another choice's tokens may come before those of the first one, which have the prompt's.
        if self._prompt_part is None and (self._answer.prompt_logprobs or len(self._answer.prompt_token_ids) < 2):
            self._prompt_part = asyncio.get_running_loop().run_in_executor(None, self._echoed)
        if self._prompt_part is None or not self._prompt_part.done():
            return b""
        return self._with_prompt(self._prompt_part.result())

    def _with_prompt(self, prompt: "_Echoed") -> bytes:
        """Return the events that begin each choice, with its prompt as text, ids, or both, and those that wait."""
        answer, waiting = self._answer, self._waiting
        self._has_begun, self._waiting = True, b""
        token_ids = answer.prompt_token_ids if self._batch.token_ids else UNSET
        pieces = (
            CompletionChoice(prompt.text, self._first_index + choice.index, prompt.logprobs, prompt_token_ids=token_ids)
            for choice in answer.choices
        )
        return b"".join(self._joined.event(answer, piece) for piece in pieces) + waiting


@dataclass(frozen=True)
class _Echoed:
    """The prompt's part of a whole answer; *ranked* has its log probabilities in vLLM's format."""

    text: str
    logprobs: CompletionLogprobs | None
    ranked: list[dict[str, PromptLogprob] | None] | None


class TextPlaces:
    """The offsets of tokens in their text, in characters, beginning with *num_characters*.

    A hidden token, or one that ends within a character, adds nothing.
    """

    def __init__(
        self, tokenizer: Tokenizer, shows_special: bool, num_characters: int = 0, *, continues: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._shows_special = shows_special
        self._num_characters = num_characters
        self._stream = tokenizer.stream(continues=continues)

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Return the offsets of the next tokens."""
        places = []
        for token_id in token_ids:
            places.append(self._num_characters)
            if self._shows_special or not self._tokenizer.is_special(token_id):
                self._num_characters += len(self._stream.push(token_id))
        return places


def _in_text(entries: Sequence[TokenLogprobs], places: list[int], num_top: int) -> CompletionLogprobs:
    return CompletionLogprobs(
        places,
        [entry.logprob for entry in entries],
        [entry.token for entry in entries],
        [_likeliest(entry, num_top) for entry in entries],
    )


def _likeliest(entry: TokenLogprobs, num_top: int) -> dict[str, float]:
    """Return the log probabilities of the likeliest tokens and of the chosen one, by their text.

    If several tokens have the same text, the likeliest counts.
    """
    likeliest: dict[str, float] = {}
    for token in (*entry.top_logprobs[:num_top], entry):
        likeliest.setdefault(token.token, token.logprob)
    return likeliest


def _joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(*map(add, msgspec.structs.astuple(first), msgspec.structs.astuple(second)))


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
