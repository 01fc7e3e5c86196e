"""Answers whose tags have several tokens: reasoning, content and calls, however they are cut into deltas. # F13"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tables import table

from saccade.errors import UnsupportedParameter
from saccade.gateway.chat import Chat
from saccade.gateway.chat_request import ChatRequest
from saccade.gateway.output.call_reader import GeneratedCall
from saccade.gateway.output.choice import choices_of
from saccade.gateway.output.sampling import sampling_params, token_rules
from saccade.gateway.served_models.served_model import Parsers, ServedModel
from saccade.models.files import read_model_files
from saccade.protocol.output import FinishReason, TokenDelta
from saccade.tokenization.tokenizer import Segment

SPECIAL = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
TOOLS: tuple[dict[str, Any], ...] = ({"type": "function", "function": {"name": "look"}},)
QUESTION = {"role": "user", "content": "What?"}
THOUGHT = ["Hm", "<|close|>", "think", "<|sep|>", "<|open|>", "response", "<|sep|>"]
END = ["<|close|>", "message", "<|sep|>", "<|end_of_msg|>"]
ANSWERED = ["Yes.", "<|close|>", "response", "<|sep|>"]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> ServedModel:
    return ServedModel.from_files("m", read_model_files(checkpoint("kimi_k3")), 4096)


def argument(key: str, kind: str, value: str) -> list[str]:
    opened = ["<|open|>", f'argument key="{key}" type="{kind}"', "<|sep|>"]
    return [*opened, value, "<|close|>", "argument", "<|sep|>"]


def call(name: str, number: int, *arguments: list[str]) -> list[str]:
    inside = [piece for one in arguments for piece in one]
    opened = ["<|open|>", f'call tool="{name}" index="{number}"', "<|sep|>"]
    return [*opened, *inside, "<|close|>", "call", "<|sep|>"]


def calls(*those: list[str]) -> list[str]:
    inside = [piece for one in those for piece in one]
    return ["<|open|>", "tools", "<|sep|>", *inside, "<|close|>", "tools", "<|sep|>"]


def read(
    model: ServedModel,
    pieces: list[str],
    length: int = 1,
    messages: tuple[dict[str, Any], ...] = (QUESTION,),
    thinks: bool = True,
    finish: FinishReason = FinishReason.STOP,
) -> tuple[str, str, list[GeneratedCall], int]:
    """Reasoning, content, calls and number of tokens of an answer in deltas of *length* tokens."""
    chat = Chat(list(messages), 0, [], True, {"thinking": thinks}, TOOLS)
    prompt = model.tokenizer.encode(model.template.render(messages, True, chat.switches, TOOLS))
    [choice] = choices_of(ChatRequest(messages=[]), chat, model, prompt)
    token_ids = model.tokenizer.encode([Segment(piece, piece in SPECIAL) for piece in pieces])
    reasoning, content, made = "", "", list[GeneratedCall]()
    for start in range(0, len(token_ids), length):
        is_last = start + length >= len(token_ids)
        chunk = choice.take_delta(TokenDelta("r", token_ids[start : start + length], finish if is_last else None))
        assert choice.num_tokens == min(start + length, len(token_ids))
        reasoning, content, made = reasoning + chunk.reasoning, content + chunk.content, [*made, *chunk.calls]
    assert choice.finish_reason == ("tool_calls" if made else finish.value)
    return reasoning, content, made, choice.num_tokens


@table("length", [1, 2, 3, 7, 1000])
def test_channels_become_reasoning_content_and_calls(model: ServedModel, length: int) -> None:
    one = call(
        "look", 1, argument("a", "string", '"<|close|>"'), argument("n", "number", "3"), argument("x", "null", "null")
    )
    two = call("look", 2)
    answer = [*THOUGHT, *ANSWERED, *calls(one, two), *END]
    reasoning, content, made, _ = read(model, answer, length)
    assert (reasoning, content) == ("Hm", "Yes.")
    assert made == [
        GeneratedCall(0, "look_0", "look", '{"a": "\\"<|close|>\\"", "n": 3, "x": null}'),
        GeneratedCall(1, "look_1", "look", "{}"),
    ]


def test_an_answer_without_reasoning(model: ServedModel) -> None:
    assert read(model, [*ANSWERED, *END], thinks=False)[:3] == ("", "Yes.", [])


def test_ids_count_the_calls_of_the_chat(model: ServedModel) -> None:
    earlier = [{"id": f"look_{n}", "type": "function", "function": {"name": "look", "arguments": {}}} for n in (0, 1)]
    results = ({"role": "tool", "tool_call_id": f"look_{n}", "content": str(n)} for n in (0, 1))
    messages = (QUESTION, {"role": "assistant", "content": "", "tool_calls": earlier}, *results)
    made = read(model, [*THOUGHT, *calls(call("look", 1)), *END], 1000, messages)[2]
    assert [one.id for one in made] == ["look_2"]


@table(
    ("pieces", "reasoning", "content"),
    [
        (["Hm", "<|close|>"], "Hm", ""),
        ([*THOUGHT, "Yes.", "<|close|>", "resp"], "Hm", "Yes."),
        ([*THOUGHT, "<|open|>", "b", "<|sep|>", "Yes."], "Hm", "bYes."),
        ([*THOUGHT, "<|open|>", "<|open|>", "response", "<|sep|>", "Yes."], "Hm", "Yes."),
        ([*THOUGHT, *ANSWERED, *calls(call("other", 1))], "Hm", 'Yes.call tool="other" index="1"'),
    ],
)
def test_answers_of_another_form(model: ServedModel, pieces: list[str], reasoning: str, content: str) -> None:
    assert read(model, pieces, finish=FinishReason.LENGTH)[:2] == (reasoning, content)


@table(
    ("body", "arguments"),
    [
        (argument("b", "boolean", "true"), '{"b": true}'),
        (argument("o", "object", '{"a": [1]}'), '{"o": {"a": [1]}}'),
        (argument("n", "number", "three"), '{"n": "three"}'),
        (argument("a&quot;&amp;", "string", "é\n"), '{"a\\"&": "é\\n"}'),
        (["<|open|>", 'json type="object"', "<|sep|>", '{"a": 1}', "<|close|>", "json", "<|sep|>"], '{"a": 1}'),
    ],
)
def test_arguments_have_the_type_of_their_tag(model: ServedModel, body: list[str], arguments: str) -> None:
    made = read(model, [*THOUGHT, *calls(call("look", 1, body)), *END])[2]
    assert [one.arguments for one in made] == [arguments]


def test_without_parsers_everything_is_content(checkpoint: Callable[[str], Path]) -> None:
    files = read_model_files(checkpoint("kimi_k3"))
    model = ServedModel.from_files("m", files, 4096, parsers=Parsers(tool_calls="none", reasoning="none"))
    assert read(model, [*THOUGHT, *ANSWERED, *END])[:2] == ("", "HmYes.")


def test_reasoning_has_no_budget(model: ServedModel) -> None:
    request = ChatRequest(messages=[], thinking_token_budget=9)
    with pytest.raises(UnsupportedParameter, match="no single token"):
        sampling_params(request, model, token_rules(request, model), [1])
