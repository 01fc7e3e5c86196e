"""OpenAI's Responses with its SDK, against `saccade serve`. F13"""

import json
from typing import Any

import jsonschema
from chats import data_url, openai_messages, random_image
from pydantic import BaseModel
from server import Server
from tool_calls import SCHEMAS, TOOLS

IMAGE = random_image(96, 64, 8)
FUNCTIONS: Any = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]
ASKED: Any = {
    "role": "user",
    "content": [
        {"type": "input_image", "image_url": data_url(IMAGE), "detail": "auto"},
        {"type": "input_text", "text": "What is it?"},
    ],
}


class Card(BaseModel):
    is_red: bool


def test_an_image_is_answered_as_by_a_chat(tiny_server: Server) -> None:
    with tiny_server.client() as client:
        chat = client.chat.completions.create(
            model=tiny_server.name, messages=openai_messages(IMAGE, "What is it?"), max_tokens=20, temperature=0
        )
        asked: Any = {"model": tiny_server.name, "input": [ASKED], "max_output_tokens": 20, "temperature": 0}
        whole = client.responses.create(**asked)
        deltas, last = [], None
        for event in client.responses.create(**asked, stream=True):
            last = event
            if event.type == "response.output_text.delta":
                deltas.append(event.delta)
    assert last is not None
    assert last.type == "response.incomplete"
    assert whole.output_text == last.response.output_text == "".join(deltas) == chat.choices[0].message.content
    assert len(deltas) > 1
    assert chat.usage is not None
    for response in (whole, last.response):
        assert response.usage is not None
        assert response.usage.input_tokens == chat.usage.prompt_tokens
        assert response.usage.output_tokens == chat.usage.completion_tokens
        assert response.usage.input_tokens_details.cached_tokens > 0


def test_conversation_with_tools_continues_by_id(tiny_server: Server) -> None:
    with tiny_server.client() as client:
        first = client.responses.create(
            model=tiny_server.name, input=[ASKED], tools=FUNCTIONS, tool_choice={"type": "function", "name": "zoom"}
        )
        (call,) = first.output
        assert call.type == "function_call"
        assert call.name == "zoom"
        jsonschema.validate(json.loads(call.arguments), SCHEMAS["zoom"])
        result: Any = {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": [{"type": "input_image", "image_url": data_url(random_image(64, 64, 9)), "detail": "auto"}],
        }
        asked: Any = {"model": tiny_server.name, "max_output_tokens": 8, "temperature": 0, "tools": FUNCTIONS}
        asked["tool_choice"] = "none"
        by_id = client.responses.create(input=[result], previous_response_id=first.id, **asked)
        in_full = client.responses.create(input=[ASKED, call.to_dict(), result], **asked)  # type: ignore[list-item]
    assert by_id.output_text == in_full.output_text
    assert by_id.usage is not None
    assert in_full.usage is not None
    assert by_id.usage.input_tokens == in_full.usage.input_tokens
    assert by_id.usage.input_tokens_details.cached_tokens > 0


def test_parse_with_pydantic(tiny_server: Server) -> None:
    with tiny_server.client() as client:
        response = client.responses.parse(model=tiny_server.name, input=[ASKED], text_format=Card)
    assert isinstance(response.output_parsed, Card)
    assert response.status == "completed"
