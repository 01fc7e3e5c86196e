"""The classes of vLLM's protocol that its tests build and read: they hold what they are given."""

from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field


class Held(BaseModel):
    """Holds any field."""

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)


class FunctionDefinition(Held):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChatCompletionToolsParam(Held):
    """A tool."""

    type: str = "function"
    function: FunctionDefinition


class ChatCompletionNamedFunction(Held):
    """A function that must be called."""

    name: str


class ChatCompletionNamedToolChoiceParam(Held):
    """A tool that must be called."""

    function: ChatCompletionNamedFunction
    type: str = "function"


class ChatCompletionRequest(Held):
    """A request of a chat."""

    messages: list[Any] = Field(default_factory=list)
    model: str | None = None
    tools: list[ChatCompletionToolsParam] | None = None
    tool_choice: Any = None
    include_reasoning: bool = True
    skip_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True


class ResponsesRequest(Held):
    """A request of Responses."""

    input: Any = None
    model: str | None = None
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Any = "auto"
    include_reasoning: bool = True
    skip_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True


class FunctionCall(Held):
    """A call's name and arguments."""

    name: str
    arguments: str
    id: str | None = None


class ToolCall(Held):
    """A call."""

    id: str = Field(default_factory=lambda: f"call_{uuid4().hex}")
    type: str = "function"
    function: FunctionCall


class DeltaFunctionCall(Held):
    """A part of a call's name and arguments."""

    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(Held):
    """A part of a call."""

    index: int
    id: str | None = None
    type: str | None = None
    function: DeltaFunctionCall | None = None


class DeltaMessage(Held):
    """A part of an answer."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[DeltaToolCall] = Field(default_factory=list)


class ExtractedToolCallInformation(Held):
    """The calls of a whole answer."""

    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None = None
