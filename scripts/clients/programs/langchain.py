"""LangChain: images, streams, `bind_tools`, `with_structured_output`."""

# /// script
# dependencies = ["langchain-openai==1.7.3"]
# ///

from typing import Any, Literal

from cards import Card
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from questions import (
    CALLER,
    IMAGE_DATA,
    IMAGE_SAYS,
    IMAGE_URL,
    KEY,
    MAX_TOKENS,
    QUESTION,
    READER,
    Target,
    expect_call,
)
from results import expect, tell


@tool
def turn(side: Literal["left", "right"], steps: Literal[1, 2]) -> str:
    """Turn the camera."""
    return f"turned {side} by {steps}"


OPENAI_PART = {"type": "image_url", "image_url": {"url": IMAGE_URL}}
LANGCHAIN_PART = {"type": "image", "base64": IMAGE_DATA, "mime_type": "image/png"}


def chat_model(target: Target, **options: Any) -> Any:
    """The client of a server."""
    asked: dict[str, Any] = {"model": target.model, "max_completion_tokens": MAX_TOKENS, **options}
    return ChatOpenAI(base_url=target.url, api_key=KEY, max_retries=0, **asked)


def question(part: dict[str, Any]) -> HumanMessage:
    """The question with the image in one of its forms."""
    return HumanMessage(content=[part, {"type": "text", "text": QUESTION}])


def chat(part: dict[str, Any]) -> None:
    """Ask about the image."""
    answer = chat_model(READER).invoke([question(part)])
    expect(answer.content, IMAGE_SAYS)
    expect(answer.usage_metadata["output_tokens"] > 0, True)


def stream() -> None:
    """The same, streamed."""
    expect("".join(chunk.text for chunk in chat_model(READER).stream([question(OPENAI_PART)])), IMAGE_SAYS)


def bind_tools(streamed: bool) -> None:
    """A required call, its result, and the answer to it."""
    bound = chat_model(CALLER).bind_tools([turn], tool_choice="required", parallel_tool_calls=False, strict=True)
    turns: list[Any] = [question(OPENAI_PART)]
    if streamed:
        chunks = list(bound.stream(turns))
        first = chunks[0]
        for chunk in chunks[1:]:
            first += chunk
    else:
        first = bound.invoke(turns)
    (call,) = first.tool_calls
    expect_call(call["name"], call["args"])
    result = turn.invoke(call)
    expect(type(result), ToolMessage)
    said = AIMessage(content=first.content, tool_calls=first.tool_calls)
    second = chat_model(CALLER).bind_tools([turn]).invoke([*turns, said, result], max_tokens=4)
    expect(second.response_metadata["finish_reason"], "length", "stop", "tool_calls")


def structured(method: str) -> None:
    """A structured answer by a Pydantic model."""
    asked = chat_model(CALLER).with_structured_output(Card, method=method)
    expect(type(asked.invoke([question(OPENAI_PART)])), Card)


def responses() -> None:
    """The image, and a required call, over Responses."""
    answer = chat_model(READER, use_responses_api=True).invoke([question(LANGCHAIN_PART)])
    expect(answer.text, IMAGE_SAYS)
    bound = chat_model(CALLER, use_responses_api=True).bind_tools([turn], tool_choice="required", strict=True)
    for call in bound.invoke([question(OPENAI_PART)]).tool_calls:
        expect_call(call["name"], call["args"])


tell(
    "LangChain",
    "langchain-openai",
    {
        "a chat with an image": lambda: chat(OPENAI_PART),
        "an image as LangChain's own block": lambda: chat(LANGCHAIN_PART),
        "a stream": stream,
        "`bind_tools`, and a tool's result": lambda: bind_tools(False),
        "`bind_tools` in a stream": lambda: bind_tools(True),
        "`with_structured_output`, by JSON schema": lambda: structured("json_schema"),
        "`with_structured_output`, by a tool": lambda: structured("function_calling"),
        "Responses: an image, `bind_tools`": responses,
    },
)
