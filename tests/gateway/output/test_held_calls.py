"""Calls that a grammar holds come in pieces; calls that the limit of tokens cuts come as far as they are. F13"""

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tables import table
from written_answers import CUT, FORMS, TOOLS, Call, choice_of, ids_of, read

from saccade.gateway.output.call_reader import GeneratedCall, joined_calls
from saccade.gateway.served_models.served_model import ServedModel
from saccade.models.tool_formats.json_pieces import complete_object
from saccade.protocol.output import FinishReason, TokenDelta

Models = Callable[[str], ServedModel]
HELD = {"tool_choice": "required"}
TEXTS = ("a b", "", "\n", "é你😀 and so on", '"quoted" \\ {x} [y]', "x</b>\n\ny", "3", "null", "long " * 9)
SIZES = (1, 2, 3, 7)
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def any_call(draw: random.Random) -> Call:
    values = {
        "text": draw.choice(TEXTS),
        "count": draw.randrange(-99, 10**6),
        "list": [draw.choice([1, 2.5, None, True, "x y", [], {"a": draw.choice(TEXTS)}]) for _ in range(3)],
    }
    return "look", {key: value for key, value in values.items() if draw.random() < 0.7}


def pieces_of(
    model: ServedModel, ids: Sequence[int], size: int, finish: FinishReason, **fields: Any
) -> tuple[list[GeneratedCall], str, str | None, int]:
    """The pieces of calls, the content, the reason and the number of tokens of *ids* in deltas of *size*."""
    choice = choice_of(model, **fields)
    content, pieces = "", list[GeneratedCall]()
    for start in range(0, len(ids) + 1, size):
        chunk = choice.take_delta(
            TokenDelta("r", list(ids[start : start + size]), finish if start + size > len(ids) else None)
        )
        content, pieces = content + chunk.content, [*pieces, *chunk.calls]
    return pieces, content, choice.finish_reason, choice.num_tokens


def shown(pieces: Sequence[GeneratedCall]) -> list[tuple[int, str, str, bool]]:
    return [(call.index, call.name, call.arguments, call.is_cut) for call in joined_calls(pieces)]


@pytest.mark.ci
@table("name", FORMS)
def test_held_calls_are_those_that_are_read_whole(name: str, models: Models) -> None:
    model, form, draw = models(name), FORMS[name], random.Random(f"held calls of {name}")
    for _ in range(25):
        calls = [any_call(draw) for _ in range(draw.randrange(1, 4))]
        text = form.calls(*calls)
        assert read(model, text)[:4] == read(model, text, **HELD)[:4] == ("", "", calls, "tool_calls")
        wanted = [
            (place, name, json.dumps(given, ensure_ascii=False), False) for place, (name, given) in enumerate(calls)
        ]
        for size in SIZES:
            pieces, _, _, num_tokens = pieces_of(model, ids_of(model, text), size, STOP, **HELD)
            assert shown(pieces) == wanted
            assert num_tokens == len(ids_of(model, text))


@table("name", FORMS)
def test_the_first_piece_has_the_name_and_the_others_the_arguments(name: str, models: Models) -> None:
    model, form = models(name), FORMS[name]
    ids = ids_of(model, form.calls(("look", {"text": TEXTS[-1], "list": list(range(9))})))
    pieces, *_ = pieces_of(model, ids, 1, STOP, **HELD)
    first, *others = pieces
    assert (first.begins, first.ends, first.name, first.arguments) == (True, False, "look", "")
    assert not any(piece.begins for piece in others)
    assert [piece.ends for piece in others] == [False] * (len(others) - 1) + [True]
    assert {(piece.index, piece.id, piece.name) for piece in pieces} == {(0, first.id, "look")}
    assert len([piece for piece in others if piece.arguments]) > 15


@pytest.mark.ci
@table("name", FORMS)
def test_a_held_call_is_cut_at_any_token(name: str, models: Models) -> None:
    model, form, draw = models(name), FORMS[name], random.Random(f"held and cut calls of {name}")
    for _ in range(4):
        calls = [any_call(draw), any_call(draw)]
        ids = ids_of(model, form.calls(*calls))
        texts = [json.dumps(given, ensure_ascii=False) for _, given in calls]
        most = [0, 0]
        for end in range(len(ids)):
            whole = pieces_of(model, ids[:end], len(ids), LENGTH, **HELD)
            pieces, content, reason, num_tokens = pieces_of(model, ids[:end], 1, LENGTH, **HELD)
            assert shown(pieces) == shown(whole[0])
            assert (content, reason, num_tokens) == whole[1:] == (content, "length", end)
            for place, (number, _, text, is_cut) in enumerate(shown(pieces)):
                assert number == place
                assert texts[place].startswith(text)
                assert is_cut or text == texts[place]
                assert len(text) >= most[place]
                most[place] = len(text)
            assert not any(call[-1] for call in shown(pieces)[:-1])


@pytest.mark.ci
@table("name", FORMS)
def test_a_call_that_nothing_holds_is_cut_at_any_token(name: str, models: Models) -> None:
    """It comes whole, or as far as it is certain once its function is; and the same in a stream."""
    model, form, draw = models(name), FORMS[name], random.Random(f"cut calls of {name}")
    for _ in range(3):
        call = "look", {"text": TEXTS[-1], **any_call(draw)[1]}
        ids = ids_of(model, f"I look.\n{form.calls(call)}")
        wanted, num_calls = json.dumps(call[1], ensure_ascii=False), 0
        for end in range(len(ids)):
            pieces, content, reason, num_tokens = pieces_of(model, ids[:end], 1, LENGTH)
            whole = pieces_of(model, ids[:end], len(ids), LENGTH)
            assert shown(pieces) == shown(whole[0])
            assert (content, reason, num_tokens) == whole[1:] == (content, "length", end)
            assert all(piece.begins and piece.ends for piece in pieces)
            for _, name_of_call, text_so_far, is_cut in shown(pieces):
                num_calls += 1
                assert (name_of_call, content) == ("look", "I look.")
                assert wanted.startswith(text_so_far)
                assert is_cut or text_so_far == wanted
        assert num_calls > 2


CUT_CALLS = {
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"text": "a b',
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=text>\na b",
    "glm45": "<tool_call>look\n<arg_key>text</arg_key>\n<arg_value>a b",
    "gemma4": '<|tool_call>call:look{text:<|"|>a b',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
    '{"text": "a b',
}


@table("name", CUT_CALLS)
def test_what_a_cut_call_is(name: str, models: Models) -> None:
    model, form, text = models(name), FORMS[name], CUT_CALLS[name]
    partial = ("look", {CUT: '{"text": "a b'})
    assert read(model, text, finish=LENGTH)[1:4] == ("", [partial], "length")
    first = ("look", {"count": 1})
    before = form.calls(first)
    assert read(model, before + text, finish=LENGTH)[1:4] == ("", [first, partial], "length")
    # What is no call of a declared function, what ends by itself, and what is a thought, is none.
    other = text.replace("look", "book")
    for fields in ({"text": other, "finish": LENGTH}, {"text": text}, {"text": form.thinks + text, "finish": LENGTH}):
        assert read(model, **fields, skip_special_tokens=False).calls == []  # type: ignore[arg-type]
    assert read(model, text, finish=LENGTH, tools=())[2] == []


@table("name", CUT_CALLS)
def test_a_held_call_that_stops_in_the_middle_is_cut(name: str, models: Models) -> None:
    """A token of `stop_token_ids` may end it."""
    seen = read(models(name), CUT_CALLS[name], **HELD)
    assert seen[1:4] == ("", [("look", {CUT: '{"text": "a b'})], "stop")


@table("name", CUT_CALLS)
@table("end", ["broken", "another name"])
def test_what_breaks_the_grammar_is_content(name: str, end: str, models: Models) -> None:
    model, form = models(name), FORMS[name]
    if end == "another name":
        text = form.calls(("book", {"text": "a"}))
        seen = read(model, text, skip_special_tokens=False, **HELD)
        assert (seen.calls, seen.finish_reason) == ([], "stop")
        assert "book" in seen.content
        return
    text = CUT_CALLS[name] + form.tags[1] + "and more"
    seen = read(model, text, **HELD)
    assert seen.finish_reason == "stop"
    assert [call[0] for call in seen.calls] == ["look"]


BROKEN_JSON = {
    'x" "y': ('{"text": "x', '"y"}}', STOP),
    'x" LOST': ('{"text": "x', "LOST}}", STOP),
    'x", "count": 1x2': ('{"text": "x", "count": ', "1x2}}", STOP),
    r"x\q LOST": ('{"text": "x', r"\q LOST\"}}", STOP),
    r"x\uD83D LOST": ('{"text": "x', r"\uD83D LOST\"}}", STOP),
    'x": 5': ('{"text": "x', ': 5"}}', STOP),
    'x"]': ('{"text": "x', "]", STOP),
    'x",, "count": 1': ('{"text": "x"', ",", STOP),
}
"""What stands after `{"text": "`: the arguments of the partial call, and how what follows them begins."""


@table("written", BROKEN_JSON)
def test_json_that_is_none_ends_the_call_and_goes_on_as_content(written: str, models: Models) -> None:
    model = models("hermes")
    text = f'<tool_call>\n{{"name": "look", "arguments": {{"text": "{written}"}}}}\n</tool_call>'
    seen = read(model, text, skip_special_tokens=False, **HELD)
    [(name, arguments)] = seen.calls
    assert (name, seen.finish_reason) == ("look", "stop")
    assert arguments[CUT].startswith('{"text": "x')
    for word in re.findall("LOST|y|5|1x2|q|D83D|count", written):
        assert word in seen.content + arguments[CUT], word


def test_text_after_the_arguments_is_content(models: Models) -> None:
    text = '<tool_call>\n{"name": "look", "arguments": {"text": "x"}} and LOST\n</tool_call>'
    seen = read(models("hermes"), text, skip_special_tokens=False, **HELD)
    assert (seen.calls, seen.finish_reason) == ([("look", {"text": "x"})], "tool_calls")
    assert "and LOST" in seen.content


MARKER = re.compile(r"w\d{3}w")


@table("name", FORMS)
def test_a_damaged_held_call_loses_no_text(name: str, models: Models) -> None:
    """A token is lost, there twice, or of another value: what is no argument is content, and arguments are JSON."""
    model, form, draw = models(name), FORMS[name], random.Random(f"damaged calls of {name}")
    for _ in range(30):
        words = [f"w{draw.randrange(100, 1000)}w" for _ in range(4)]
        given = {"text": f"{words[0]} {words[1]}", "list": [words[2], 7, {"a": words[3]}], "count": 25}
        ids = ids_of(model, form.calls(("look", given), ("look", {"text": words[0]})))
        place = draw.randrange(len(ids))
        ids[place : place + 1] = draw.choice([[], [ids[place]] * 2, [draw.choice(ids)]])
        pieces, content, *_ = pieces_of(model, ids, 1, STOP, skip_special_tokens=False, **HELD)
        calls = joined_calls(pieces)
        for call in calls:
            assert isinstance(json.loads(complete_object(call.arguments) if call.is_cut else call.arguments), dict)
        shown_text = content + "".join(call.arguments for call in calls)
        for word in MARKER.findall(model.tokenizer.decode(ids)):
            assert word in shown_text, model.tokenizer.decode(ids)


@table("name", FORMS)
def test_one_call_if_parallel_calls_are_not_allowed(name: str, models: Models) -> None:
    calls: list[Call] = [("look", {"text": "a"}), ("look", {"count": 1})]
    seen = read(models(name), FORMS[name].calls(*calls), parallel_tool_calls=False, **HELD)
    assert seen[1:4] == ("", calls[:1], "tool_calls")


@table("name", FORMS)
def test_text_before_strict_calls_is_content(name: str, models: Models) -> None:
    strict = ({"type": "function", "function": {**TOOLS[0]["function"], "strict": True}},)
    calls: list[Call] = [("look", {"text": "a b"}), ("look", {})]
    text = f"I look.\n\n{FORMS[name].calls(*calls)}"
    assert read(models(name), text, tools=strict)[1:4] == ("I look.", calls, "tool_calls")
    assert read(models(name), "I do not.", tools=strict)[1:4] == ("I do not.", [], "stop")
