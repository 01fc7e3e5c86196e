"""Ten turns of an agent with a screenshot each, in the forms of three APIs: each turn begins in the prefix cache. E5 F13"""

import base64
import io
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from chats import anthropic_client, data_url, random_image
from PIL import Image
from server import Server, serving
from tables import table

pytestmark = pytest.mark.ci

FAMILIES = ("qwen3_vl", "qwen3_5", "gemma4_e2b")
NUM_TURNS, MAX_TOKENS = 10, 4
BLOCK_SIZE = 16
INSTRUCTIONS = "You control a browser. " * 20
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
ARGUMENTS = [{"at": f"{97 * turn} {31 * turn}"} for turn in range(NUM_TURNS)]


def screenshot(turn: int) -> Image.Image:
    return random_image(96, 64, turn)


def task(form: str) -> str:
    """Return a text that differs between forms, which would share their blocks otherwise."""
    return f"Open the page of {form}, and press the button that says so."


def ask_responses(server: Server, turn: int) -> tuple[int, int]:
    """As Codex asks: everything before, in items."""
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": task("Responses")}]}]
    for number, arguments in enumerate(ARGUMENTS[:turn]):
        call_id = f"call_{number}"
        output = [
            {"type": "input_text", "text": f"clicked {number}"},
            {"type": "input_image", "image_url": data_url(screenshot(number))},
        ]
        items += [
            {"type": "function_call", "call_id": call_id, "name": "click", "arguments": json.dumps(arguments)},
            {"type": "function_call_output", "call_id": call_id, "output": output},
        ]
    tool: Any = {"type": "function", "name": "click", "parameters": PARAMETERS, "strict": False}
    with server.client() as client:
        answer = client.responses.create(
            model=server.name, instructions=INSTRUCTIONS, input=items, tools=[tool], store=False,
            max_output_tokens=MAX_TOKENS,
        )  # fmt: skip
    assert answer.usage is not None
    return answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens


def ask_messages(server: Server, turn: int) -> tuple[int, int]:
    """As Claude Code asks, with results as blocks of the user's turns."""
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": task("Messages")}]}]
    for number, arguments in enumerate(ARGUMENTS[:turn]):
        buffer = io.BytesIO()
        screenshot(number).save(buffer, "PNG")
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(buffer.getvalue()).decode()}
        content = [{"type": "text", "text": f"clicked {number}"}, {"type": "image", "source": source}]
        call_id = f"toolu_{number}"
        messages += [
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": call_id, "name": "click", "input": arguments}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": content}]},
        ]
    tool: Any = {"name": "click", "input_schema": PARAMETERS}
    with anthropic_client(server.url, api_key=server.key) as client:
        answer = client.messages.create(
            model=server.name, system=[{"type": "text", "text": INSTRUCTIONS}], messages=messages, tools=[tool],
            max_tokens=MAX_TOKENS,
        )  # fmt: skip
    num_cached = answer.usage.cache_read_input_tokens or 0
    return answer.usage.input_tokens + num_cached, num_cached


def ask_chats(server: Server, turn: int) -> tuple[int, int]:
    """As Qwen Code and opencode ask."""
    messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": task("chats")}]
    for number, arguments in enumerate(ARGUMENTS[:turn]):
        call_id = f"call_{number}"
        function = {"name": "click", "arguments": json.dumps(arguments)}
        content = [
            {"type": "text", "text": f"clicked {number}"},
            {"type": "image_url", "image_url": {"url": data_url(screenshot(number))}},
        ]
        messages += [
            {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": call_id, "content": content},
        ]
    tool: Any = {"type": "function", "function": {"name": "click", "parameters": PARAMETERS}}
    with server.client() as client:
        answer = client.chat.completions.create(
            model=server.name, messages=messages, tools=[tool], max_tokens=MAX_TOKENS
        )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens or 0


@pytest.fixture(scope="module", params=FAMILIES)
def server(request: pytest.FixtureRequest, network_folder: Callable[[str], Path]) -> Iterator[Server]:
    with serving(str(network_folder(request.param)), "--max-model-len", "4096") as running:
        yield running


@table("ask", [ask_responses, ask_messages, ask_chats], ["Responses", "Messages", "chats"])
def test_a_turn_begins_in_the_cache_where_the_last_prompt_ended(
    ask: Callable[[Server, int], tuple[int, int]], server: Server
) -> None:
    prompts = [ask(server, turn) for turn in range(NUM_TURNS)]
    for (before, _), (length, num_cached) in pairwise(prompts):
        assert before - 2 * BLOCK_SIZE <= num_cached < length, prompts
