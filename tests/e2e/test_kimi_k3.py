"""Kimi-K3 through HTTP, the gateway and SGLang's wire, to SMG's own servicer with a scripted engine. # A10 F13"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import images
import openai
import pytest
import torch
from chats import openai_messages
from references.kimi_k3 import KimiK3
from server import Server, free_port, program
from sglang_servicer import Engine, Rooms, arguments, listening, servicer_class

from saccade.gateway.served_models.served_model import ServedModel
from saccade.models.files import read_model_files
from saccade.tokenization.tokenizer import Segment

pytestmark = pytest.mark.conformance

TRANSPARENT = images.random_image(320, 256, "RGBA")
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SPECIAL = ("<|open|>", "<|close|>", "<|sep|>")
ANSWER = [
    "A", " board.", "<|close|>", "think", "<|sep|>", "<|open|>", "response", "<|sep|>", "I look.", "<|close|>",
    "response", "<|sep|>", "<|open|>", "tools", "<|sep|>", "<|open|>", 'call tool="look" index="1"', "<|sep|>",
    "<|open|>", 'argument key="at" type="array"', "<|sep|>", "[1, 2]", "<|close|>", "argument", "<|sep|>", "<|close|>",
    "call", "<|sep|>", "<|close|>", "tools", "<|sep|>", "<|close|>", "message", "<|sep|>",
]  # fmt: skip


def ask(server: Server) -> tuple[Any, list[Any], str]:
    """The answer, the same as a stream, and the refusal of a required call."""
    server.wait_until_ready()
    create = server.client().chat.completions.create
    body: dict[str, Any] = {"model": "m", "messages": openai_messages(TRANSPARENT, "Where?"), "tools": [TOOL]}
    answer, stream = create(**body), list(create(**body, stream=True))
    with pytest.raises(openai.BadRequestError) as refusal:
        create(**body, tool_choice="required")
    return answer, stream, refusal.value.message


async def test_a_transparent_image_an_answer_with_a_call(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, port = checkpoint("kimi_k3"), free_port()
    model = ServedModel.from_files("m", read_model_files(folder), 4096)
    token_ids = model.tokenizer.encode([Segment(piece, piece in SPECIAL) for piece in ANSWER])
    end = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    steps: list[Any] = [*(([one], None) for one in token_ids), ([end], {"type": "stop", "matched": end})]
    engine = Engine(arguments(folder), steps, Rooms())
    with servicer_class(monkeypatch) as servicer_of:
        async with listening(engine.servicer(servicer_of)) as target:
            flags = ("--worker-url", f"sglang://{target}", "--port", str(port), "--decode-processes", "1")
            with program("gateway", *flags) as process:
                answer, stream, refusal = await asyncio.to_thread(ask, Server(port, process))
    (item,) = engine.requests[0].mm_inputs.mm_items
    expected = KimiK3(folder).see(TRANSPARENT).pixel_values
    assert expected is not None
    assert torch.equal(item.feature, expected.to(torch.float32))
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("A board.", "I look.")
    (call,) = message.tool_calls
    assert (call.id, call.function.name, call.function.arguments) == ("look_0", "look", '{"at": [1, 2]}')
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage.completion_tokens == len(token_ids) + 1
    deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "A board."
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    assert [call.id for delta in deltas for call in delta.tool_calls or ()] == ["look_0"]
    assert "required" in refusal
