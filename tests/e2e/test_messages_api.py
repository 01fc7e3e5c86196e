"""Anthropic's API with the anthropic SDK, against `saccade serve`. F13"""

import base64
import io
from typing import Any

import jsonschema
from chats import anthropic_client, openai_messages, random_image
from server import Server
from tool_calls import TOOLS

IMAGE = random_image(96, 64, 7)
NAMES = [tool["function"]["name"] for tool in TOOLS]
ANTHROPIC_TOOLS: Any = [
    {"name": tool["function"]["name"], "description": "A tool.", "input_schema": tool["function"]["parameters"]}
    for tool in TOOLS
]


def image() -> dict[str, Any]:
    buffer = io.BytesIO()
    IMAGE.save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def test_an_image_is_answered_as_by_a_chat(tiny_server: Server) -> None:
    with tiny_server.client() as client:
        chat = client.chat.completions.create(
            model=tiny_server.name, messages=openai_messages(IMAGE, "What is it?"), max_tokens=20, temperature=0
        )
    turn: Any = {"role": "user", "content": [image(), {"type": "text", "text": "What is it?"}]}
    with anthropic_client(tiny_server.url, api_key=tiny_server.key) as client:
        asked: Any = {"model": tiny_server.name, "messages": [turn]}
        sent = {"max_tokens": 20, "extra_body": {"temperature": 0}, **asked}
        whole = client.messages.create(**sent)
        with client.messages.stream(**sent) as events:
            texts = list(events.text_stream)
            streamed = events.get_final_message()
        counted = client.messages.count_tokens(**asked).input_tokens
    assert chat.usage is not None
    for message in (whole, streamed):
        (block,) = message.content
        assert block.type == "text"
        assert block.text == chat.choices[0].message.content
        assert message.stop_reason == "max_tokens"
        usage = message.usage
        assert usage.output_tokens == chat.usage.completion_tokens
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == chat.usage.prompt_tokens == counted
    assert len(texts) > 1
    assert (whole.usage.cache_read_input_tokens or 0) > 0


def test_a_conversation_with_tools(tiny_server: Server) -> None:
    messages: Any = [{"role": "user", "content": [image(), {"type": "text", "text": "Zoom."}]}]
    asked: Any = {"model": tiny_server.name, "max_tokens": 600, "tools": ANTHROPIC_TOOLS}
    with anthropic_client(tiny_server.url, api_key=tiny_server.key) as client:
        first = client.messages.create(messages=messages, tool_choice={"type": "tool", "name": NAMES[0]}, **asked)
        (call,) = first.content
        assert (call.type, first.stop_reason) == ("tool_use", "tool_use")
        assert call.name == NAMES[0]
        jsonschema.validate(call.input, TOOLS[0]["function"]["parameters"])
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [image(), {"type": "text", "text": "left"}]}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = client.messages.create(messages=messages, **{**asked, "max_tokens": 8})
    assert second.usage.output_tokens <= 8
    # Two images and the call are part of the prompt.
    assert second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0) > first.usage.input_tokens
    assert (second.usage.cache_read_input_tokens or 0) > 0


def test_a_schema_holds_the_answer(tiny_server: Server) -> None:
    schema = {"enum": ["one", "two"]}
    with anthropic_client(tiny_server.url, api_key=tiny_server.key) as client:
        message = client.messages.create(
            model=tiny_server.name,
            max_tokens=100,
            messages=[{"role": "user", "content": "Which?"}],
            extra_body={"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        )
    (block,) = message.content
    assert block.type == "text"
    assert block.text in ('"one"', '"two"')
    assert message.stop_reason == "end_turn"
