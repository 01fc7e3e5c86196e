"""The wire format of OpenAI's Chat Completions: whole answers, and the chunks of streamed ones."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from saccade.gateway.chat_request import CalledFunction
from saccade.gateway.output.answer import Usage
from saccade.gateway.output.logprobs import ChoiceLogprobs, PromptLogprob


class ToolCall(Struct, frozen=True):
    """A tool call for the client to make; the message with its result refers to *id*."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class FunctionDelta(Struct, frozen=True, kw_only=True):
    """The next piece of a function's *arguments*; the first delta of a call also has the function's *name*."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Struct, frozen=True, kw_only=True):
    """A tool call in a chunk, or a piece of its arguments; *index* numbers the calls of a choice.

    The first piece has *id*, *type* and the function's name.
    """

    index: int
    id: str | UnsetType = UNSET
    function: FunctionDelta
    type: Literal["function"] | UnsetType = UNSET


class AnswerMessage(Struct, frozen=True):
    """The model's turn. *content* is null if the answer ended during the reasoning, or contains only calls.

    The reasoning has two names: clients of SGLang and DeepSeek read *reasoning_content*, clients of vLLM read
    *reasoning*.
    """

    content: str | None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class Choice(Struct, frozen=True):
    """One answer. *token_ids*, if requested, holds every token that counts as generated."""

    message: AnswerMessage
    finish_reason: str
    index: int = 0
    logprobs: ChoiceLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """A complete answer. prompt_logprobs[i], if requested, maps token ids to their log probability at position i."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    object: Literal["chat.completion"] = "chat.completion"


class Delta(Struct, frozen=True):
    """What a chunk adds to the content, to the reasoning before it (under both names), or to the calls."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True):
    """One choice in a chunk. The choice's last chunk has the *finish_reason* and an empty delta.

    *logprobs* and *token_ids* cover the tokens since the choice's previous chunk.
    """

    delta: Delta
    finish_reason: str | None = None
    index: int = 0
    logprobs: ChoiceLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Struct, frozen=True, kw_only=True):
    """One event of a streamed answer. *usage*, if requested only for the end, is null in every chunk but the last.

    *prompt_token_ids*, if requested, come with the first chunk.
    """

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
