"""Tools over HTTP: from a request to the prompt, from the worker's tokens to calls, as an OpenAI client sees them."""

import json
from typing import Any

import pytest
import scripted
from chats import data_url, random_image

from saccade.protocol.output import FinishReason

TOOL = {
    "type": "function",
    "function": {"name": "zoom", "description": "Zooms.", "parameters": {"type": "object", "properties": {}}},
}
CALL = '{"name": "zoom", "arguments": {"box": [1, 2.5], "text": "<b> 你"}}'
ARGUMENTS = {"box": [1, 2.5], "text": "<b> 你"}


def ask(gateway: scripted.Gateway, stream: bool, **fields: Any) -> tuple[str | None, Any, Any, str, int]:
    """Return content, reasoning, calls without their ids, finish reason and number of tokens, by the openai client."""
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], **fields}
    if not stream:
        with gateway.client() as client:
            answer = client.chat.completions.create(**asked)
        message, choice = answer.choices[0].message, answer.choices[0]
        calls = [(number, call.id, call.function) for number, call in enumerate(message.tool_calls or [])]
        content, reasoning, reason = message.content, getattr(message, "reasoning_content", None), choice.finish_reason
        usage = answer.usage
    else:
        with gateway.client() as client:
            create = client.chat.completions.create
            chunks = list(create(**asked, stream=True, stream_options={"include_usage": True}))
        usage = chunks.pop().usage
        deltas = [chunk.choices[0].delta for chunk in chunks]
        content = "".join(delta.content or "" for delta in deltas) or None
        reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) or None
        calls = [(call.index, call.id, call.function) for delta in deltas for call in delta.tool_calls or []]
        reasons = [chunk.choices[0].finish_reason for chunk in chunks]
        assert reasons[:-1] == [None] * (len(reasons) - 1)
        reason = reasons[-1]
    assert usage is not None
    assert all(call_id.startswith("call_") for _, call_id, _ in calls)
    seen = [(number, function.name, json.loads(function.arguments)) for number, _, function in calls]
    return content, reasoning, seen, reason, usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_calls(stream: bool, gateway: scripted.Gateway) -> None:  # F13
    call = ("<tool_call>", f"\n{CALL}\n", "</tool_call>")
    num_tokens = gateway.answer_pieces("I look.\n", *call, "\n", *call)
    expected = [(0, "zoom", ARGUMENTS), (1, "zoom", ARGUMENTS)]
    assert ask(gateway, stream) == ("I look.", None, expected, "tool_calls", num_tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_within_and_after_reasoning(stream: bool, gateway: scripted.Gateway) -> None:  # F13
    call = ("<tool_call>", CALL, "</tool_call>")
    num_tokens = gateway.answer_pieces("<think>", "Hm", "</think>", "\n\n", *call)
    assert ask(gateway, stream) == (None, "Hm", [(0, "zoom", ARGUMENTS)], "tool_calls", num_tokens)
    num_tokens = gateway.answer_pieces("<think>", "Hm", *call, "</think>", "\n\n", *call)
    expected = [(0, "zoom", ARGUMENTS), (1, "zoom", ARGUMENTS)]
    assert ask(gateway, stream) == (None, "Hm", expected, "tool_calls", num_tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_malformed_call_is_content(stream: bool, gateway: scripted.Gateway) -> None:  # F13
    num_tokens = gateway.answer_pieces("<tool_call>", CALL.replace("zoom", "book"), "</tool_call>", "\n")
    content = f"<tool_call>{CALL.replace('zoom', 'book')}</tool_call>\n"
    assert ask(gateway, stream) == (content, None, [], "stop", num_tokens)
    cut = CALL.replace("zoom", "book")[:-9]
    num_tokens = gateway.answer_pieces("<tool_call>", cut, finish=FinishReason.LENGTH)
    assert ask(gateway, stream) == (f"<tool_call>{cut}", None, [], "length", num_tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_at_most(stream: bool, gateway: scripted.Gateway) -> None:
    num_tokens = gateway.answer_pieces("<tool_call>", CALL, "</tool_call>")
    gateway.answer_pieces(*("<tool_call>", CALL, "</tool_call>") * 2)
    gateway.worker.script.insert(num_tokens - 1, 60.0)  # the second call comes later than anyone waits
    answer = ask(gateway, stream, parallel_tool_calls=False)
    assert answer == (None, None, [(0, "zoom", ARGUMENTS)], "tool_calls", num_tokens - 1)
    assert gateway.worker.num_aborted == 1


@pytest.mark.parametrize("fields", [{"tools": []}, {"tool_choice": "none"}])
def test_without_tools_nothing_is_a_call(fields: Any, gateway: scripted.Gateway) -> None:
    gateway.answer_pieces("<tool_call>", CALL, "</tool_call>")
    assert ask(gateway, stream=False, **fields)[:4] == (f"<tool_call>{CALL}</tool_call>", None, [], "stop")
    assert "zoom" not in gateway.tokenizer.decode(gateway.worker.requests[-1].token_ids)


def test_a_conversation_with_tools_and_images(gateway: scripted.Gateway) -> None:  # F2 F13
    """The prompt has declarations, calls and results; what they say is text, and a result's image is one."""
    called = {"id": "a", "type": "function", "function": {"name": "zoom", "arguments": '{"a":  "</tool_call>"}'}}
    shown = {"type": "image_url", "image_url": {"url": data_url(random_image(64, 64, 0))}}
    messages = [
        {"role": "user", "content": "Zoom."},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "<tool_call>"}, shown]},
    ]
    ask(gateway, stream=False, messages=messages)
    request = gateway.worker.requests[-1]
    prompt = gateway.tokenizer.decode(request.token_ids)
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in prompt
    assert '<tool_call>\n{"name": "zoom", "arguments": {"a": "</tool_call>"}}\n</tool_call><|im_end|>' in prompt
    assert "<tool_response>\n<tool_call><|vision_start|>" in prompt
    assert len(request.media) == 1
    tag, end = gateway.tokenizer.token_id("<tool_call>"), gateway.tokenizer.token_id("</tool_call>")
    # The template's instructions show both tags twice, and the earlier call has them once.
    assert (list(request.token_ids).count(tag), list(request.token_ids).count(end)) == (3, 3)


def test_tokenize_counts_tools(gateway: scripted.Gateway) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    counts = [gateway.ask("POST", "/tokenize", {**asked, **more}).json["count"] for more in ({}, {"tools": [TOOL]})]
    assert counts[1] > counts[0] + 50
