"""The chunk with the finish reason has nothing else: clients stop reading there."""

import json
from typing import Any

import pytest
import scripted
from tables import table

from saccade.protocol.output import FinishReason, TokenDelta, TokenLogprob
from saccade.tokenization.tokenizer import Segment

pytestmark = pytest.mark.ci

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
CALL = ("<tool_call>", '{"name": "look", "arguments": {}}', "</tool_call>")
NAMED = {"type": "function", "function": {"name": "look"}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CASES: dict[str, tuple[tuple[str, ...], FinishReason, dict[str, Any], str]] = {
    "text": (("Hi", " you"), STOP, {}, "stop"),
    "text, cut": (("Hi", " you"), LENGTH, {}, "length"),
    "a text whose end waits": (("Hi", " you 2"), LENGTH, {"stop": "23"}, "length"),
    "a stop string": (("Hi", " you", " END"), LENGTH, {"stop": "END"}, "stop"),
    "nothing": ((), STOP, {}, "stop"),
    "reasoning and text": (("<think>", "Hm", "</think>", "Yes"), STOP, {}, "stop"),
    "reasoning, cut": (("<think>", "Hm"), LENGTH, {}, "length"),
    "reasoning left out": (("<think>", "Hm"), LENGTH, {"include_reasoning": False}, "length"),
    "a call": (CALL, STOP, {}, "tool_calls"),
    "a required call": (CALL, STOP, {"tool_choice": "required"}, "tool_calls"),
    "text and a call": (("I look.", *CALL), STOP, {}, "tool_calls"),
    "two calls": ((*CALL, *CALL), STOP, {}, "tool_calls"),
    "a named call": (CALL, STOP, {"tool_choice": NAMED}, "tool_calls"),
    "one call at most": ((*CALL, *CALL), LENGTH, {"parallel_tool_calls": False}, "tool_calls"),
    "a call, cut": (CALL[:2], LENGTH, {}, "length"),
    "a call, cut in its arguments": ((CALL[0], CALL[1][:-4]), LENGTH, {}, "length"),
    "a required call, cut": ((CALL[0], CALL[1][:-4]), LENGTH, {"tool_choice": "required"}, "length"),
}
RECORDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "log probabilities": {"logprobs": True},
    "token ids": {"return_token_ids": True},
    "usage": {"stream_options": {"include_usage": True}},
    "all usages": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
}


def prepare(gateway: scripted.Gateway, pieces: tuple[str, ...], finish: FinishReason, n: int, at_once: bool) -> None:
    """Have the worker answer *pieces* in *n* choices, its last tokens with the finish reason."""
    ids = gateway.tokenizer.encode([Segment(piece, piece in scripted.TAGS) for piece in pieces])
    ids += [gateway.eos] if finish is STOP else []
    steps = [ids] if at_once else [*([one] for one in ids[:-1]), ids[-1:]]
    gateway.worker.script = [
        TokenDelta(
            "r",
            step,
            finish if place == len(steps) - 1 else None,
            index=index,
            logprobs=[TokenLogprob(-0.5, 1, [one], [-0.5]) for one in step],
        )
        for place, step in enumerate(steps)
        for index in range(n)
    ]


@table("at_once", [False, True])
@table("n", [1, 2])
@table("record", RECORDS)
@table("case", CASES)
def test_the_finish_reason_comes_alone(
    case: str, record: str, n: int, at_once: bool, gateway: scripted.Gateway
) -> None:  # F2 F13
    pieces, finish, fields, reason = CASES[case]
    asked = {"tools": [TOOL], "n": n, **fields, **RECORDS[record]}
    with gateway.describing(takes_grammars=True):
        prepare(gateway, pieces, finish, n, at_once)
        whole = gateway.chat(**{**asked, "stream_options": None}).json["choices"]
        prepare(gateway, pieces, finish, n, at_once)
        *events, done = gateway.chat(stream=True, **asked).events
    assert done == "[DONE]"
    for index in range(n):
        parts = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        *before, last = parts
        assert (last["delta"], last["finish_reason"]) == ({}, reason)
        assert not (last["logprobs"] or {}).get("content")
        assert all(part["finish_reason"] is None for part in before)
        message = whole[index]["message"]
        for name in ("content", "reasoning_content"):
            assert "".join(part["delta"].get(name, "") for part in before) == (message.get(name) or "")
        calls: list[dict[str, str]] = []
        for call in (call for part in before for call in part["delta"].get("tool_calls", ())):
            calls += [call["function"]] if "id" in call else []
            calls[-1]["arguments"] += "" if "id" in call else call["function"]["arguments"]
        assert calls == [call["function"] for call in message.get("tool_calls", ())]
        entries = [entry for part in before if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert entries == ((whole[index]["logprobs"] or {}).get("content") or [])
        ids = [one for part in parts for one in part.get("token_ids", ())]
        assert ids == whole[index].get("token_ids", [])


def test_the_last_piece_and_the_finish_reason_are_written_at_once(gateway: scripted.Gateway) -> None:
    """They come in one delta of the worker, and leave in one chunk of the transfer coding."""
    prepare(gateway, ("a", "b"), LENGTH, 1, at_once=False)
    gateway.worker.script.insert(1, 0.05)  # The stream has begun before the last delta.
    with gateway.connect() as connection:
        body = json.dumps({"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "hi"}]}).encode()
        head = ["POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        head += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
        connection.sendall("\r\n".join(head).encode() + body)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    chunk = next(part for part in received.split(b"\r\n") if b'"finish_reason":"length"' in part)
    assert b'"content":"b"' in chunk
