"""The OpenAI wire format: answers."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from saccade.gateway.openai.requests import CalledFunction


class TokenizeAnswer(Struct, frozen=True):
    """Token ids; images appear as the placeholders that the model sees."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeAnswer(Struct, frozen=True):
    """The text of token ids."""

    prompt: str


class PromptTokensDetails(Struct, frozen=True):
    """How many tokens of the prompt were found in the prefix cache."""

    cached_tokens: int = 0


class CompletionTokensDetails(Struct, frozen=True):
    """How many tokens of the answer are reasoning, shown or not."""

    reasoning_tokens: int = 0


class Usage(Struct, frozen=True):
    """Tokens of a request; *prompt_tokens* includes those of images."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class ToolCall(Struct, frozen=True):
    """A call of a tool that the client is to make; the message with its result names *id*."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ToolCallDelta(Struct, frozen=True):
    """A call of a tool in a chunk, always a whole one; *index* numbers the calls of a choice."""

    index: int
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AnswerMessage(Struct, frozen=True):
    """The model's turn. *content* is null where the answer ended within reasoning, or holds only calls."""

    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class TopLogprob(Struct, frozen=True):
    """A token that could have stood in a place, and its log probability there.

    *bytes* are the token's own; *token* is their text, with U+FFFD for each part of a character.
    """

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(TopLogprob, frozen=True):
    """A token of the answer, and the likeliest ones in its place."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(Struct, frozen=True):
    """An entry for each token, those of the reasoning and the one that ended the answer among them."""

    content: list[TokenLogprobs]
    refusal: None = None


class PromptLogprob(Struct, frozen=True):
    """The log probability of a token in a place of the prompt; *rank* is 1 for the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


class Choice(Struct, frozen=True):
    """One answer. *token_ids*, where asked for, are all that count as generated."""

    message: AnswerMessage
    finish_reason: str
    index: int = 0
    logprobs: ChoiceLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """A whole answer. prompt_logprobs[i], where requested, maps token ids to their log probability in place i."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    object: Literal["chat.completion"] = "chat.completion"


class Delta(Struct, frozen=True):
    """What a chunk adds: to the content, to the reasoning before it, or to the calls of tools."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True):
    """The piece of an answer in a chunk; *finish_reason* is set on its last one.

    *logprobs* and *token_ids* are those of all tokens since the answer's chunk before.
    """

    delta: Delta
    finish_reason: str | None = None
    index: int = 0
    logprobs: ChoiceLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Struct, frozen=True, kw_only=True):
    """One event of a streamed answer. *usage* is there where it was asked for, null in all but the last chunk.

    *prompt_token_ids*, where asked for, come with the first.
    """

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class ModelCard(Struct, frozen=True):
    """A model that is served."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "saccade"


class ModelList(Struct, frozen=True):
    """All models that are served."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class ErrorDetail(Struct, frozen=True):
    """What went wrong: *message* for people, *code* for programs."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(Struct, frozen=True):
    """The body of every answer that is not a 2xx."""

    error: ErrorDetail
