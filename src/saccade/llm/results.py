"""The results of chats from Python: a ChatResult for a whole answer, a Delta for each piece of a streamed one."""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from saccade.errors import SaccadeError
from saccade.gateway.apis.chat.wire import AnswerMessage, ChatCompletion, Choice, ToolCall
from saccade.gateway.apis.chat.writer import ChatCompletionObject
from saccade.gateway.chat_request import CalledFunction
from saccade.gateway.json_parts import TURN_BYTES, joined
from saccade.gateway.output.answer import Answer, Usage
from saccade.gateway.output.call_reader import GeneratedCall, joined_calls
from saccade.gateway.output.choice import AnswerChunk
from saccade.gateway.output.logprobs import PromptLogprob
from saccade.llm.conversation import Source
from saccade.llm.notebook import images_html, text_html


@dataclass(frozen=True)
class ChatResult:
    """The answer to one conversation, or the error that it failed with."""

    text: str = ""
    """Of the first of *choices*, like *reasoning*, *tool_calls*, *finish_reason* and *message*."""
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()
    """Each has an `id`, and a `function` with `name` and `arguments`, JSON as text."""
    finish_reason: str = "error"
    message: AnswerMessage | None = None
    """May be appended to the conversation."""
    choices: Sequence[Choice] = ()
    """In the form of the API, like *usage*."""
    usage: Usage | None = None
    prompt_token_ids: Sequence[int] = ()
    prompt_logprobs: Sequence[Mapping[str, PromptLogprob] | None] = ()
    ttft_seconds: float | None = None
    """From the call to the first token."""
    seconds: float = 0.0
    """From the call to the end."""
    error: SaccadeError | None = None
    warning: str = ""
    """Which settings have no effect, as in the API's header `x-saccade-warning`."""
    kind: type | None = None
    """The class that was passed as `response_format`."""
    images: Sequence[Source] = field(default=(), repr=False)
    """Those of the conversation, except URLs; a notebook shows them."""

    @classmethod
    def of_completion(
        cls,
        completion: ChatCompletion,
        ttft_seconds: float | None,
        seconds: float,
        warning: str = "",
        kind: type | None = None,
        images: Sequence[Source] = (),
    ) -> "ChatResult":
        first = completion.choices[0]
        return cls(
            text=first.message.content or "",
            reasoning=first.message.reasoning_content or "",
            tool_calls=first.message.tool_calls or (),
            finish_reason=first.finish_reason,
            message=first.message,
            choices=completion.choices,
            usage=completion.usage,
            prompt_token_ids=completion.prompt_token_ids or (),
            prompt_logprobs=completion.prompt_logprobs or (),
            ttft_seconds=ttft_seconds,
            seconds=seconds,
            warning=warning,
            kind=kind,
            images=images,
        )

    @property
    def parsed(self) -> Any:
        """The JSON in *text*: an object of *kind* if that is set, otherwise a plain value.

        Raises ValueError if *text* is not JSON or does not fit *kind*; `max_tokens` may have cut it short.
        """
        if self.kind is None:
            return json.loads(self.text)
        validate = getattr(self.kind, "model_validate_json", None)
        return msgspec.json.decode(self.text, type=self.kind) if validate is None else validate(self.text)

    def to_html(self) -> str:
        """Return HTML for a notebook: images, the folded reasoning, then the text with some figures, or the error."""
        thought = ""
        if self.reasoning:
            thought = f"<details><summary>reasoning</summary>{text_html(self.reasoning)}</details>"
        if self.error is not None:
            return f"{thought}<p><b>{type(self.error).__name__}</b>: {html.escape(self.error.message)}</p>"
        figures = [f"{self.seconds:.2f} s"]
        if self.usage is not None:
            figures = [f"{self.usage.prompt_tokens} tokens in, {self.usage.completion_tokens} out", *figures]
        return f"{images_html(self.images)}{thought}{text_html(self.text)}<small>{', '.join(figures)}</small>"

    _repr_html_ = to_html


@dataclass(frozen=True)
class Delta:
    """A stream's addition to a choice. The last delta has only the usage and the warning."""

    text: str = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()
    index: int = 0
    """The choice's."""
    finish_reason: str | None = None
    usage: Usage | None = None
    warning: str = ""


class Deltas:
    """Makes deltas from one answer's chunks. A delta has a tool call once the call is complete."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[GeneratedCall]] = {}
        """Of the open call of each choice."""

    def delta_of(self, chunk: AnswerChunk) -> Delta:
        """Return the delta for *chunk*."""
        pieces = [*self._pieces.get(chunk.choice.index, ()), *chunk.calls]
        num_whole = max((place for place, piece in enumerate(pieces, 1) if piece.ends), default=0)
        self._pieces[chunk.choice.index] = pieces[num_whole:]
        calls = [ToolCall(call.id, CalledFunction(call.name, call.arguments)) for call in joined_calls(pieces)]
        return Delta(chunk.content, chunk.reasoning, calls, chunk.choice.index, chunk.choice.finish_reason)


async def complete(answer: Answer, chunks: Iterable[AnswerChunk]) -> ChatCompletion:
    """Return the whole *answer* in the API's form, built from its *chunks*."""
    writer = ChatCompletionObject(answer)
    for chunk in chunks:
        writer.take_chunk(chunk)
    return msgspec.json.decode(b"".join(joined(await writer.end_answer(), TURN_BYTES)), type=ChatCompletion)
