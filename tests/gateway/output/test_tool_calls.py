"""Calls are told from content by token ids, the same however the answer is cut into deltas. # F13"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tables import table

from saccade.gateway.output.call_reader import GeneratedCall, declared
from saccade.gateway.output.choice import GeneratedChoice
from saccade.gateway.output.token_record import TokenRecord
from saccade.gateway.output.tool_calls import ToolCallReader
from saccade.gateway.served_models.served_model import Parsers, ServedModel
from saccade.models.files import read_model_files
from saccade.models.tool_formats import tool_call_tokens
from saccade.protocol.output import FinishReason, TokenDelta
from saccade.tokenization.detokenizer import Detokenizer, TextRules
from saccade.tokenization.tokenizer import Segment

RELEASES: dict[str, str] = {"hermes": "qwen3_vl", "qwen3_coder": "qwen3_5", "kimi_k2": "kimi_k25", "glm45": "glm4v"}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": {"properties": {
        "text": {"type": "string"}, "count": {"type": "integer"}, "box": {"type": "array"}, "more": {"type": "object"},
    }}}},
    {"type": "function", "function": {"name": "get-time.2"}},
]  # fmt: skip
TAGS = (
    "<tool_call>", "</tool_call>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip
Models = Callable[[str], ServedModel]
Read = tuple[str, list[tuple[int, str, dict[str, Any]]], str | None, int]


@pytest.fixture(scope="module")
def models(checkpoint: Callable[[str], Path]) -> Models:
    made = {
        tool_format: ServedModel.from_files("m", read_model_files(checkpoint(name)), 4096)
        for tool_format, name in RELEASES.items()
    }
    return made.__getitem__


class Typed(str):
    """Text of an argument, and never a tag."""


def ids_of(model: ServedModel, *pieces: str) -> list[int]:
    """The ids of an answer; a piece that is a tag is that tag's token, and nothing else is."""
    return model.tokenizer.encode(
        [Segment(piece, piece in TAGS and not isinstance(piece, Typed)) for piece in pieces if piece]
    )


def written(tool_format: str, number: int, name: str, arguments: dict[str, Any]) -> list[str]:
    """A call as models write it, between its tags."""
    if tool_format == "kimi_k2":
        return [
            "<|tool_call_begin|>", f"functions.{name}:{number}", "<|tool_call_argument_begin|>", json.dumps(arguments),
            "<|tool_call_end|>",
        ]  # fmt: skip
    if tool_format == "glm45":
        pieces = [f"{name}\n"]
        for key, value in arguments.items():
            shown = value if isinstance(value, str) else json.dumps(value)
            pieces += ["<arg_key>", key, "</arg_key>", "\n", "<arg_value>", Typed(shown), "</arg_value>", "\n"]
        return ["<tool_call>", *pieces, "</tool_call>"]
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    if tool_format == "qwen3_coder":
        values = (
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
            for key, value in arguments.items()
        )
        body = f"<function={name}>\n{''.join(values)}</function>"
    return ["<tool_call>", f"\n{body}\n", "</tool_call>"]


def section(tool_format: str, calls: list[list[str]]) -> list[str]:
    """Several calls as models write them."""
    between = [] if tool_format == "kimi_k2" else ["\n"]
    pieces = [piece for call in calls for piece in (*between, *call)]
    return [TAGS[2], *pieces, TAGS[3]] if tool_format == "kimi_k2" and calls else pieces


def read(
    model: ServedModel,
    deltas: list[list[int]],
    stop: tuple[str, ...] = (),
    many: bool = True,
    finish: FinishReason = FinishReason.STOP,
) -> Read:
    """What a client sees: content, calls, why it ended, and how many tokens it had."""
    tokens = model.tool_calls
    assert tokens is not None
    reader = ToolCallReader(tokens, model.tokenizer, declared(TOOLS), many)
    choice = GeneratedChoice(0, Detokenizer(model.tokenizer, TextRules(stop=stop)), tool_calls=reader)
    content, calls = "", list[GeneratedCall]()
    for number, delta in enumerate(deltas, start=1):
        chunk = choice.take_delta(TokenDelta("r", delta, finish if number == len(deltas) else None))
        content += chunk.content
        calls += chunk.calls
        if choice.finish_reason is not None:
            break
    assert len({call.id for call in calls}) == len(calls)
    seen = [(call.index, call.name, json.loads(call.arguments)) for call in calls]
    return content, seen, choice.finish_reason, choice.num_tokens


def cuts(ids: list[int]) -> list[list[list[int]]]:
    """The same answer in one delta, token by token, and cut once at every border."""
    return [[ids], [[token_id] for token_id in ids], *([ids[:cut], ids[cut:]] for cut in range(len(ids)))]


texts = st.text(st.sampled_from('ab {}"\\<>/=\n你é😀'), max_size=12).flatmap(
    lambda text: st.sampled_from([text, f"{text}<tool_call>", "</tool_call>", "<|tool_call_end|>", "</function>"])
)
values = {
    "text": texts,
    "count": st.integers(-(2**70), 2**70),
    "box": st.lists(st.floats(allow_nan=False, allow_infinity=False) | texts | st.none(), max_size=3),
    "more": st.dictionaries(texts, st.booleans() | texts, max_size=2),
}
called = st.one_of(
    st.tuples(st.just("look"), st.fixed_dictionaries({}, optional=values)),
    st.tuples(st.just("get-time.2"), st.just({})),
)


@pytest.mark.ci
@pytest.mark.parametrize(
    "tool_format", [pytest.param(name, marks=() if name == "hermes" else pytest.mark.ci) for name in RELEASES]
)
def test_generated_calls_are_read_back(tool_format: str, models: Models) -> None:  # F13
    """1,000 calls of each format, cut at every border between tokens; tags in arguments are text."""
    model, num_calls = models(tool_format), 0

    @settings(max_examples=420, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        meant=st.lists(called, min_size=2, max_size=4), cut=st.integers(0, 400), before=st.sampled_from(["", "I <b>."])
    )
    def check(meant: list[tuple[str, dict[str, Any]]], cut: int, before: str) -> None:
        nonlocal num_calls
        pieces = section(tool_format, [written(tool_format, number, *one) for number, one in enumerate(meant)])
        ids = ids_of(model, before, *pieces)
        expected = before, [(index, *one) for index, one in enumerate(meant)], "tool_calls", len(ids)
        assert read(model, [[token_id] for token_id in ids]) == expected
        assert read(model, [ids[:cut], ids[cut:]]) == expected
        num_calls += len(meant)

    check()
    assert num_calls >= 1000


@pytest.mark.parametrize("tool_format", RELEASES)
def test_calls_cut_anywhere_are_read_alike(tool_format: str, models: Models) -> None:  # F13
    model = models(tool_format)
    calls = [written(tool_format, 0, "look", {"text": "é你", "box": [1]}), written(tool_format, 1, "get-time.2", {})]
    ids = ids_of(model, "I look.\n\n", *section(tool_format, calls), "\nDone. ")
    for deltas in cuts(ids):
        content, seen, reason, num_tokens = read(model, deltas)
        assert (content, reason, num_tokens) == ("I look.Done. ", "tool_calls", len(ids))
        assert seen == [(0, "look", {"text": "é你", "box": [1]}), (1, "get-time.2", {})]


@table("tool_format", RELEASES)
@table("fault", ["name", "arguments", "no end", "two begins", "alone", "end alone"])
def test_malformed_calls_are_content(tool_format: str, fault: str, models: Models) -> None:  # F13
    model = models(tool_format)
    call = written(tool_format, 0, "look", {"count": 1})
    pieces = {
        "name": [piece.replace("look", "book") for piece in call],
        "arguments": [
            piece.replace("1", "1]").replace("=count>", "").replace("<arg_value>", "").replace("</arg_key>", "")
            for piece in call
        ],
        "no end": [*call[:-2], call[-2][:-4]],
        "two begins": [call[0], *call[:-2]],
        "alone": call[:1],
        "end alone": call[-1:],
    }[fault]
    ids = ids_of(model, "a ", *pieces, " b ")
    for deltas in cuts(ids):
        assert read(model, deltas) == (f"a {''.join(pieces)} b ", [], "stop", len(ids))


@pytest.mark.parametrize("tool_format", RELEASES)
def test_text_that_looks_like_a_call_is_content(tool_format: str, models: Models) -> None:  # F13
    """Qwen3-Coder's form begins with text: what is no token is the tag around it."""
    model = models(tool_format)
    if tool_format == "qwen3_coder":
        ids = model.tokenizer.encode_text("<tool_call>\n<tool_call>{}</tool_call>")
        for deltas in cuts(ids):
            assert read(model, deltas) == ("<tool_call>\n<tool_call>{}</tool_call>", [], "stop", len(ids))
        return
    text = "".join(section(tool_format, [written(tool_format, 0, "look", {"count": 1})]))
    ids = model.tokenizer.encode_text(text)
    for deltas in cuts(ids):
        assert read(model, deltas) == (text, [], "stop", len(ids))


@pytest.mark.parametrize("tool_format", RELEASES)
def test_one_call_if_parallel_calls_are_not_allowed(tool_format: str, models: Models) -> None:
    model = models(tool_format)
    call = written(tool_format, 0, "look", {"count": 1})
    ids, first = ids_of(model, *section(tool_format, [call, call])), ids_of(model, *section(tool_format, [call]))
    for deltas in cuts(ids):
        content, seen, reason, num_tokens = read(model, deltas, many=False)
        assert (content, seen, reason) == ("", [(0, "look", {"count": 1})], "tool_calls")
        assert num_tokens == len(first) - (tool_format == "kimi_k2")


@pytest.mark.parametrize("tool_format", RELEASES)
def test_a_call_that_only_lacks_its_end_is_read(tool_format: str, models: Models) -> None:
    model = models(tool_format)
    begin = [TAGS[2]] if tool_format == "kimi_k2" else []
    ids = ids_of(model, *begin, *written(tool_format, 0, "look", {"count": 1})[:-1])
    whole = [(0, "look", {"count": 1})]
    assert read(model, [ids])[1:3] == (whole, "tool_calls")
    if tool_format != "glm45":  # Another argument might have followed there.
        assert read(model, [ids], finish=FinishReason.LENGTH)[1:3] == (whole, "length")


@pytest.mark.parametrize("tool_format", RELEASES)
def test_stop_strings_hold_for_content_only(tool_format: str, models: Models) -> None:
    model = models(tool_format)
    call = section(tool_format, [written(tool_format, 0, "look", {"text": "STOP"})])
    for before, content, calls, reason in (
        (["a ", *call], "ab ", [(0, "look", {"text": "STOP"})], "tool_calls"),
        ([], "b ", [], "stop"),
    ):
        ids, answer = ids_of(model, *before, "b STOP", *call), ids_of(model, *before, "b STOP")
        for deltas in cuts(ids):
            assert read(model, deltas, stop=("STOP",)) == (content, calls, reason, len(answer))


def test_tokens_after_a_stop_string_in_what_is_no_call_are_not_recorded(models: Models) -> None:
    model = models("hermes")
    assert model.tool_calls is not None
    ids, answer = ids_of(model, "<tool_call>", "b STOP c"), ids_of(model, "<tool_call>", "b STOP")
    for deltas in cuts(ids):
        reader, record = (
            ToolCallReader(model.tool_calls, model.tokenizer, declared(TOOLS)),
            TokenRecord(model.tokenizer, True, False),
        )
        detokenizer = Detokenizer(model.tokenizer, TextRules(stop=("STOP",)))
        choice = GeneratedChoice(0, detokenizer, record=record, tool_calls=reader)
        for number, delta in enumerate(deltas, start=1):
            choice.take_delta(TokenDelta("r", delta, FinishReason.STOP if number == len(deltas) else None))
        assert (choice.num_tokens, record.flush()[1]) == (len(answer), answer)


def test_ids_are_the_models_own_or_new(models: Models) -> None:
    def call_ids(tool_format: str) -> list[str]:
        model = models(tool_format)
        assert model.tool_calls is not None
        reader = ToolCallReader(model.tool_calls, model.tokenizer, declared(TOOLS))
        calls = [written(tool_format, number, "look", {}) for number in (4, 5)]
        pieces = reader.take_tokens(ids_of(model, *section(tool_format, calls)))
        return [piece.id for piece in pieces if isinstance(piece, GeneratedCall)]

    assert call_ids("kimi_k2") == ["functions.look:4", "functions.look:5"]
    assert all(one.startswith("call_") and len(one) == 29 for one in call_ids("hermes"))


def test_the_operators_choice_of_a_format(models: Models, checkpoint: Callable[[str], Path]) -> None:
    tokenizer = models("hermes").tokenizer
    assert tool_call_tokens(tokenizer, "kimi_k2") is None  # its tags are not in the vocabulary
    assert tool_call_tokens(tokenizer, None) is None
    files = read_model_files(checkpoint("qwen3_vl"))
    chosen = ServedModel.from_files("m", files, 4096, parsers=Parsers("qwen3_coder", "none"))
    assert chosen.tool_calls is not None
    assert (chosen.tool_calls.format, chosen.reasoning) == ("qwen3_coder", None)
    assert ServedModel.from_files("m", files, 4096, parsers=Parsers("none")).tool_calls is None
