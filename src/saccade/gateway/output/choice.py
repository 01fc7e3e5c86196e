"""One choice of an answer as it grows: text, reasoning, tokens, finish reason."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from saccade.errors import WorkerFailed
from saccade.gateway.chat import Chat
from saccade.gateway.chat_request import ChatRequest
from saccade.gateway.output.call_reader import CallReader, GeneratedCall, Piece, declared
from saccade.gateway.output.held_calls import HeldCallReader
from saccade.gateway.output.reasoning import Reasoning
from saccade.gateway.output.token_record import TokenRecord
from saccade.gateway.output.tool_calls import ToolCallReader
from saccade.gateway.prompt.tools import read_choice
from saccade.gateway.served_models.served_model import ServedModel
from saccade.protocol.output import FinishReason, TokenDelta
from saccade.tokenization.detokenizer import Detokenizer, TextRules
from saccade.tokenization.markup import MarkupReader

TOOL_CALLS = "tool_calls"
"""The finish reason of a choice that ended by itself and called tools."""


class AnswerChunk(NamedTuple):
    """What a delta adds to *choice*: text of the reasoning, then of the content, and calls or pieces of calls.

    For each call, *places* has the number of characters of *content* before it.
    """

    choice: "GeneratedChoice"
    reasoning: str
    content: str
    calls: Sequence[GeneratedCall] = ()
    places: Sequence[int] = ()

    @property
    def num_bytes(self) -> int:
        """Size of the chunk's texts in UTF-8 bytes."""
        texts = (self.reasoning, self.content, *(call.arguments for call in self.calls))
        return sum(len(text) if text.isascii() else len(text.encode()) for text in texts)

    def parts(self) -> Iterator[str | GeneratedCall]:
        """Yield the content's texts and the calls in order."""
        start = 0
        for call, place in zip(self.calls, self.places, strict=True):
            if start < place:
                yield self.content[start:place]
            yield call
            start = place
        if start < len(self.content):
            yield self.content[start:]


class GeneratedChoice:
    """One choice while it is generated.

    *detokenizer* reads the content. *reasoning* reads the reasoning if the model has any, and *tool_calls* reads tool
    calls if the request has tools; stop strings apply to neither. *markup* gets the tokens first, and reads tags that
    span several tokens. If one of *hidden_ids* ends the choice, it counts as generated but is not shown. A call ends
    the reasoning. If a grammar *holds_calls*, no call can begin before the reasoning ends, since the grammar applies
    only after it.
    """

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        hidden_ids: Collection[int] = (),
        reasoning: Reasoning | None = None,
        record: TokenRecord | None = None,
        tool_calls: CallReader | None = None,
        markup: MarkupReader | None = None,
        holds_calls: bool = False,
    ) -> None:
        self.index = index
        self.record = record
        self.finish_reason: str | None = None
        self.first_token_at = self.last_token_at = 0.0
        """Times of the first and last token, in seconds of the process's clock; Answer sets both."""

        self.detokenizer = detokenizer
        self._hidden_ids = hidden_ids
        self._reasoning = reasoning
        self._tool_calls = tool_calls
        self._markup = markup
        self._holds_calls = holds_calls
        self._num_hidden_tokens = 0
        self._reaches_limit = False

    def take_delta(self, delta: TokenDelta) -> AnswerChunk:
        """Take a delta of this choice and return its chunk, whose text may be "".

        Raises WorkerFailed if the worker gave the request up.
        """
        if delta.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            raise WorkerFailed("The worker gave this request up.")
        num_tokens = self.num_tokens if self.record is not None else 0
        token_ids = delta.token_ids
        # The id that ended the choice counts as generated and is hidden, special token or not.
        if delta.finish_reason is FinishReason.STOP and token_ids and token_ids[-1] in self._hidden_ids:
            token_ids = token_ids[:-1]
        is_last = delta.finish_reason is not None
        if is_last:
            self._reaches_limit = delta.finish_reason is FinishReason.LENGTH
        chunk = self._read(token_ids, is_last)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason.value
        if self.detokenizer.stop is not None or (self._tool_calls is not None and self._tool_calls.is_full):
            self.finish_reason = FinishReason.STOP.value
        else:
            self._num_hidden_tokens += len(delta.token_ids) - len(token_ids)
        if self.finish_reason == FinishReason.STOP.value and self.num_calls and not self._ends_in_call:
            self.finish_reason = TOOL_CALLS
        if self.record is not None:
            self.record.add_tokens(delta, self.num_tokens - num_tokens)
        return chunk

    @property
    def stop(self) -> str | None:
        """The stop string that ended the choice, or None if something else did."""
        return self.detokenizer.stop

    @property
    def ends_in_reasoning(self) -> bool:
        """Whether the choice ended during its reasoning, so that there is no content."""
        return self._reasoning is not None and self._reasoning.is_open

    @property
    def _ends_in_call(self) -> bool:
        return self._tool_calls is not None and self._tool_calls.is_cut

    @property
    def num_calls(self) -> int:
        """The number of tool calls so far."""
        return self._tool_calls.num_calls if self._tool_calls is not None else 0

    @property
    def num_tokens(self) -> int:
        """The number of tokens so far, shown or not."""
        return self.detokenizer.num_tokens + self.detokenizer.num_others + self._num_hidden_tokens

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of reasoning tokens so far, without markers."""
        return self._reasoning.num_tokens if self._reasoning is not None else 0

    def _read(self, token_ids: Sequence[int], is_last: bool) -> AnswerChunk:
        has_tags = self._markup is not None or self._tool_calls is not None
        if not has_tags or len(token_ids) < 2:
            return self._read_together(token_ids, is_last)
        # One by one: tags after the token that ends the answer, by a stop string or a call, do not count.
        reasoning, content, calls, places = "", "", list[GeneratedCall](), list[int]()
        for index in range(len(token_ids)):
            chunk = self._read_together(token_ids[index : index + 1], is_last and index == len(token_ids) - 1)
            calls += chunk.calls
            places += [len(content) + place for place in chunk.places]
            reasoning, content = reasoning + chunk.reasoning, content + chunk.content
            if self.detokenizer.stop is not None or (self._tool_calls is not None and self._tool_calls.is_full):
                break
        return AnswerChunk(self, reasoning, content, calls, places)

    def _read_together(self, token_ids: Sequence[int], is_last: bool) -> AnswerChunk:
        if self._markup is not None:
            token_ids = self._markup.take_tokens(token_ids, is_last)
        if self._tool_calls is not None:
            return self._read_calls(self._tool_calls, token_ids, is_last)
        reasoning = ""
        if self._reasoning is not None:
            reasoning, token_ids = self._reasoning.take_tokens(token_ids)
            reasoning += self._reasoning.finish_answer() if is_last else ""
        self.detokenizer.num_others = self._num_others
        content = self.detokenizer.push_tokens(token_ids)
        return AnswerChunk(self, reasoning, content + self.detokenizer.finish_text() if is_last else content)

    def _read_calls(self, reader: CallReader, token_ids: Sequence[int], is_last: bool) -> AnswerChunk:
        reasoning, content, calls, places = "", "", list[GeneratedCall](), list[int]()
        if self._reasoning is not None and self._holds_calls and self._reasoning.may_follow:
            reasoning, token_ids = self._reasoning.take_tokens(token_ids)
        for piece in self._pieces(reader, token_ids, is_last):
            if isinstance(piece, GeneratedCall):
                reasoning += "" if self._reasoning is None else self._reasoning.end_reasoning()
                calls.append(piece)
                places.append(len(content))
                reader.separator.call()
                continue
            thought, text = self._read_text(piece)
            reasoning += thought
            content += reader.separator.push_text(text)
            if self.detokenizer.stop is not None:
                # The answer ends before the rest of the pieces.
                return AnswerChunk(self, reasoning, content + reader.separator.finish_content(), calls, places)
        reasoning += self._reasoning.finish_answer() if self._reasoning is not None and is_last else ""
        self.detokenizer.num_others = self._num_others
        if is_last or reader.is_full:
            content += reader.separator.push_text(self.detokenizer.finish_text()) + reader.separator.finish_content()
        return AnswerChunk(self, reasoning, content, calls, places)

    def _read_text(self, piece: Sequence[int] | str) -> tuple[str, str]:
        """Return the text that *piece* adds to the reasoning and to the content."""
        reasoning = ""
        if isinstance(piece, str):
            if self._reasoning is not None:
                reasoning, piece = self._reasoning.take_text(piece)
            self.detokenizer.num_others = self._num_others
            return reasoning, self.detokenizer.push_text(piece) if piece else ""
        if self._reasoning is not None:
            reasoning, piece = self._reasoning.take_tokens(piece)
        self.detokenizer.num_others = self._num_others
        return reasoning, self.detokenizer.push_tokens(piece)

    def _pieces(self, reader: CallReader, token_ids: Sequence[int], is_last: bool) -> Iterator[Piece]:
        yield from reader.take_tokens(token_ids)
        if is_last:
            # A call that is cut within the reasoning is a thought.
            yield from reader.finish_answer(self._reaches_limit and not self.ends_in_reasoning)

    @property
    def _num_others(self) -> int:
        """The number of tokens so far that are not content: reasoning, its markers, tool calls, and parts of tags."""
        num_others = self._tool_calls.num_tokens if self._tool_calls is not None else 0
        num_others += self._markup.num_tokens if self._markup is not None else 0
        if self._reasoning is not None:
            num_others += self._reasoning.num_tokens + self._reasoning.num_markers
        return num_others


def choices_of(
    request: ChatRequest, chat: Chat, served: ServedModel, prompt: Sequence[int] = ()
) -> list[GeneratedChoice]:
    """Return the choices of *request*, still empty. Their first tokens will follow the token ids *prompt*.

    The choices may call the tools of *chat*. The answer to a plain prompt is only text, even if it contains reasoning.
    """
    hidden_ids: frozenset[int] = frozenset()
    if not request.include_stop_str_in_output:
        hidden_ids = frozenset((*served.defaults.eos_token_ids, *(request.stop_token_ids or ())))
    rules = _text_rules(request)
    # What depends on the request alone is made once, since a loop over many choices takes the event loop's time.
    own_rules = TextRules(shows_special=rules.shows_special)
    holds_calls = _holds_calls(request, chat)
    new_reader = _call_readers(request, served, chat, holds_calls=holds_calls)
    choices = []
    for index in range(request.n or 1):
        markup, reasoning = None, None
        if chat.plain is None:
            markup = None if served.markup is None else MarkupReader(served.markup, served.tokenizer)
            opening = prompt if markup is None else markup.last_tag(prompt)
            reasoning = _reasoning(request, served, own_rules, opening)
        choices.append(
            GeneratedChoice(
                index,
                Detokenizer(served.tokenizer, rules, continues=chat.continues),
                hidden_ids,
                reasoning=reasoning,
                record=_record(request, served),
                tool_calls=None if new_reader is None else new_reader(),
                markup=markup,
                holds_calls=holds_calls,
            )
        )
    return choices


def _text_rules(request: ChatRequest) -> TextRules:
    """Return which tokens the answer's text shows, and which strings end it."""
    stop = request.stop or ()
    return TextRules(
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        min_tokens=request.min_tokens or 0,
        shows_stop=bool(request.include_stop_str_in_output),
        shows_special=request.skip_special_tokens is False,
    )


def _reasoning(request: ChatRequest, served: ServedModel, rules: TextRules, prompt: Sequence[int]) -> Reasoning | None:
    if served.reasoning is None:
        return None
    return Reasoning(served.reasoning, served.tokenizer, request.include_reasoning is not False, rules, prompt)


def _holds_calls(request: ChatRequest, chat: Chat) -> bool:
    """Return whether a grammar constrains calls of *chat*'s tools."""
    return read_choice(request).must_call or any(tool["function"].get("strict") for tool in chat.tools or ())


def _record(request: ChatRequest, served: ServedModel) -> TokenRecord | None:
    with_ids, with_logprobs = bool(request.return_token_ids), bool(request.logprobs)
    return TokenRecord(served.tokenizer, with_ids, with_logprobs) if with_ids or with_logprobs else None


def _call_readers(
    request: ChatRequest, served: ServedModel, chat: Chat, *, holds_calls: bool
) -> Callable[[], CallReader] | None:
    """Return a function that makes a call reader for a choice, or None if the answer cannot call tools.

    All readers share the declared functions.
    """
    if not chat.tools or served.tool_calls is None:
        return None
    many = request.parallel_tool_calls is not False
    num_earlier = sum(len(message.get("tool_calls", ())) for message in chat.messages)
    reader = HeldCallReader if holds_calls else ToolCallReader
    return partial(reader, served.tool_calls, served.tokenizer, declared(chat.tools), many, num_earlier)
