"""Answers that go on with the last message: what is reasoning, what a call and what text, right from their first token."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import scripted

from saccade.protocol.output import FinishReason, TokenDelta
from saccade.tokenization.tokenizer import Segment

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = ("<tool_call>", "\n<function=look>\n</function>\n", "</tool_call>")
ASKED = {"role": "user", "content": "What?"}
BEGUN = {"role": "assistant", "content": "It is"}
THOUGHT = {"role": "assistant", "content": None, "reasoning_content": "Hm"}


@pytest.fixture(scope="module", params=["qwen3_5", "kimi_k25"])
def thinking(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Iterator[scripted.Gateway]:
    """A gateway of a model whose template opens the reasoning of every answer."""
    with scripted.running(checkpoint(request.param)) as gateway:
        yield gateway


def answer(gateway: scripted.Gateway, pieces: tuple[str, ...], stream: bool, **fields: Any) -> Any:
    """Return (reasoning, content, names of calls) of an answer of *pieces*."""
    tokenizer = gateway.application.model_registry.get("tiny").tokenizer
    ids = tokenizer.encode([Segment(piece, piece in TAGS) for piece in pieces])
    gateway.worker.script = [
        *(TokenDelta("r", [token_id]) for token_id in ids),
        TokenDelta("r", [], FinishReason.LENGTH),
    ]
    body = {"model": "tiny", "stream": stream, **fields}
    found = gateway.ask("POST", "/v1/chat/completions", body)
    assert found.status == 200, found.body
    turns = (
        [event["choices"][0]["delta"] for event in found.events[:-1]]
        if stream
        else [found.json["choices"][0]["message"]]
    )
    reasoning, content = ("".join(turn.get(name) or "" for turn in turns) for name in ("reasoning_content", "content"))
    return reasoning, content, [call["function"]["name"] for turn in turns for call in turn.get("tool_calls") or ()]


@pytest.mark.parametrize("stream", [False, True])
def test_continued_text_stays_text(stream: bool, thinking: scripted.Gateway) -> None:
    pieces = (" red.",)
    assert answer(thinking, pieces, stream, messages=[ASKED]) == (" red.", "", [])
    continued = {"messages": [ASKED, BEGUN], "continue_final_message": True}
    assert answer(thinking, pieces, stream, **continued) == ("", " red.", [])
    # Behind thoughts that have ended, the answer is text too.
    continued = {"messages": [ASKED, THOUGHT], "continue_final_message": True}
    assert answer(thinking, pieces, stream, **continued) == ("", " red.", [])


@pytest.mark.parametrize("stream", [False, True])
def test_call_after_a_continued_text(stream: bool, checkpoint: Callable[[str], Path]) -> None:
    with scripted.running(checkpoint("qwen3_5")) as gateway:
        continued: Any = {"messages": [ASKED, BEGUN], "continue_final_message": True, "tools": [TOOL]}
        assert answer(gateway, (" red.\n", *CALL), stream, **continued) == ("", " red.", ["look"])
