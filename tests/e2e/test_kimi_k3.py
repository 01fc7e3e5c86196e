"""Kimi-K3 through HTTP and the gateway, to SMG's own servicer and to vLLM's wire, both without an engine. # A10 F13"""

import asyncio
import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import images
import msgspec
import numpy as np
import openai
import pytest
import torch
from chats import Part, openai_messages, random_image, reference_messages
from references.kimi_k3 import KimiK3
from server import Server, free_port, program
from sglang_servicer import Engine, Rooms, arguments, listening, servicer_class
from vllm_worker import VllmServer, event, kwargs_data, rendered, usage
from vllm_worker import listening as listening_vllm

from saccade.gateway.served_models.served_model import ServedModel
from saccade.models.files import read_model_files
from saccade.tokenization.tokenizer import Segment

pytestmark = pytest.mark.conformance

TRANSPARENT = images.random_image(320, 256, "RGBA")
PARTS: tuple[Part, ...] = ("First:", TRANSPARENT, "then", random_image(384, 256, 2), "which is it?")
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SPECIAL = ("<|open|>", "<|close|>", "<|sep|>")
ANSWER = [
    "A", " board.", "<|close|>", "think", "<|sep|>", "<|open|>", "response", "<|sep|>", "I look.", "<|close|>",
    "response", "<|sep|>", "<|open|>", "tools", "<|sep|>", "<|open|>", 'call tool="look" index="1"', "<|sep|>",
    "<|open|>", 'argument key="at" type="array"', "<|sep|>", "[1, 2]", "<|close|>", "argument", "<|sep|>", "<|close|>",
    "call", "<|sep|>", "<|close|>", "tools", "<|sep|>", "<|close|>", "message", "<|sep|>",
]  # fmt: skip


def ask(server: Server) -> tuple[Any, list[Any], str]:
    """The answer, the same as a stream, and the refusal of a regular expression; a required call is asked for, too."""
    server.wait_until_ready()
    create = server.client().chat.completions.create
    body: dict[str, Any] = {"model": "m", "messages": openai_messages(TRANSPARENT, "Where?"), "tools": [TOOL]}
    answer, stream = create(**body), list(create(**body, stream=True))
    create(**body, tool_choice="required")
    with pytest.raises(openai.BadRequestError) as refusal:
        create(model="m", messages=body["messages"], extra_body={"guided_regex": "a"})
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
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert {call.id for call in calls} - {None} == {"look_0"}
    assert "".join(call.function.arguments for call in calls) == '{"at": [1, 2]}'
    tags = [request.sampling_params.structural_tag for request in engine.requests]
    assert tags[:2] == [None, None]
    assert len(engine.requests[2].input_ids) > len(engine.requests[0].input_ids)  # The prompt asks for a call, too.
    assert json.loads(tags[2])["type"] == "structural_tag"
    assert 'call tool=\\"look\\" index=' in tags[2]
    assert "guided_regex" in refusal


async def test_two_images_reach_a_vllm_worker(checkpoint: Callable[[str], Path]) -> None:  # F4
    folder, port, server = checkpoint("kimi_k3"), free_port(), VllmServer()
    server.render = rendered(kwargs_data(bytes(4 * 588), (4, 3, 14, 14), (1, 2, 2), grid_name="grid_thws"))
    server.script = [event(40), event(41, reason="length"), usage()]
    asked: dict[str, Any] = {"model": "m", "messages": openai_messages(*PARTS), "temperature": 0, "max_tokens": 2}
    asked |= {"response_format": {"type": "json_object"}}
    async with listening_vllm(server) as url:
        words = ("--worker-url", url, "--model", f"m={folder}", "--port", str(port), "--decode-processes", "1")
        with program("gateway", *words) as process:
            gateway = Server(port, process)
            await asyncio.to_thread(gateway.wait_until_ready)
            await asyncio.to_thread(lambda: gateway.client().chat.completions.create(**asked))
    reference, body = KimiK3(folder), server.requests[-1]
    messages, shown = reference_messages(*PARTS)
    seen = [reference.see(image) for image in shown]
    assert body["token_ids"] == reference.token_ids(reference.render(messages, True, {}), seen)
    # The tag covers the reasoning, so the worker does not wait for its end.
    assert body["reasoning_ended"] is True
    assert "json_schema" in body["sampling_params"]["structured_outputs"]["structural_tag"]
    features = body["features"]
    assert len(set(features["mm_hashes"]["image"])) == 2
    for place, data, expected in zip(
        features["mm_placeholders"]["image"], features["kwargs_data"]["image"], seen, strict=True
    ):
        # The places are those of the placeholders alone, without the size before them.
        pads = body["token_ids"][place["offset"] : place["offset"] + place["length"]]
        assert (place["length"], set(pads)) == (expected.num_tokens, {pads[0]})
        item = msgspec.msgpack.decode(base64.b64decode(data))
        dtype, shape, raw = item["pixel_values"]["data"]
        assert expected.pixels is not None
        assert np.array_equal(np.frombuffer(raw.data, dtype).reshape(shape), expected.pixels)
        assert list(np.frombuffer(item["grid_thws"]["data"][2].data, "<i8")) == list(expected.grid or ())
