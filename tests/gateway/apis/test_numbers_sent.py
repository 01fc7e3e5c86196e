"""A number without a fraction is whole in every field of every API, whoever writes it as 4.0 or 1e1; no other is."""

import json
from collections.abc import Callable
from typing import Any, Final

import pytest
import scripted
from msgspec import inspect
from tables import table

from saccade.errors import InvalidValue, RequestError
from saccade.gateway.apis.chat.reader import parse_chat
from saccade.gateway.apis.completions.reader import CompletionRequest, parse_completion
from saccade.gateway.apis.messages.reader import parse_count, parse_messages
from saccade.gateway.apis.messages.wire import CountRequest, MessagesRequest
from saccade.gateway.apis.models import DetokenizeRequest, parse_detokenize, parse_tokenize
from saccade.gateway.apis.responses.reader import parse_response
from saccade.gateway.apis.responses.wire import ResponseRequest
from saccade.gateway.chat_request import ChatRequest, TokenizeRequest
from saccade.gateway.prompt.media_options import read_media_options

Parse = Callable[[bytes], Any]
TURNS: Final = '"messages": [{"role": "user", "content": "hi"}]'
SHARED: Final = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "min_tokens", "top_k", "seed", "prompt_logprobs"), "#"),
    "n": "#",
    "stop_token_ids": "[1, #]",
    "allowed_token_ids": "[#, 1]",
}
PRIORITY: Final = {"priority": "#"}
CHAT: Final = {**SHARED, **PRIORITY, "top_logprobs": '#, "logprobs": true', "thinking_token_budget": "#"}
COMPLETION: Final = {**SHARED, **PRIORITY, "logprobs": "#", "best_of": '#, "n": 4'}
EDIT: Final = '{"edits": [{"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": #}}]}'
COUNT: Final = {"thinking": '{"type": "enabled", "budget_tokens": #}', "context_management": EDIT}
APIS: Final[list[tuple[Parse, type, str, dict[str, str]]]] = [
    (parse_chat, ChatRequest, TURNS, CHAT),
    (parse_completion, CompletionRequest, '"prompt": "hi"', COMPLETION),
    (parse_messages, MessagesRequest, f'{TURNS}, "max_tokens": 9', {**COUNT, "max_tokens": "#", "top_k": "#"}),
    (parse_count, CountRequest, TURNS, COUNT),
    (parse_response, ResponseRequest, '"input": "hi"', {**PRIORITY, "max_output_tokens": "#", "top_logprobs": "null"}),
    (parse_tokenize, TokenizeRequest, TURNS, {}),
    (parse_detokenize, DetokenizeRequest, '"model": "tiny"', {"tokens": "[#, 1, #]"}),
]
"""The parser of each API, the struct of its bodies, a body, and each field with a whole number, whose place # marks."""


def holds_whole_number(kind: Any) -> bool:
    """Whether a value of *kind* may hold a whole number whose place has a type."""
    fields = kind.fields if isinstance(kind, inspect.StructType) and kind.cls.__name__ != "Block" else ()
    inner = [getattr(kind, name) for name in ("type", "item_type", "value_type") if hasattr(kind, name)]
    return isinstance(kind, inspect.IntType) or any(
        map(holds_whole_number, (*inner, *getattr(kind, "types", ()), *(field.type for field in fields)))
    )


@table("kind, fields", [(kind, fields) for _, kind, _, fields in APIS], ids=[kind.__name__ for _, kind, _, _ in APIS])
def test_every_field_is_in_the_table(kind: type, fields: dict[str, str]) -> None:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    assert {field.name for field in info.fields if holds_whole_number(field.type)} == fields.keys()


FIELDS: Final = [
    (parse, f"{{{body}, {json.dumps(name)}: {value}}}")
    for parse, _, body, fields in APIS
    for name, value in fields.items()
    if "#" in value
]


def result(parse: Parse, body: str) -> Any:
    try:
        return parse(body.encode())
    except RequestError as error:
        return error.message


@table("parse, body", FIELDS, ids=[body for _, body in FIELDS])
def test_a_number_without_a_fraction_is_whole(parse: Parse, body: str) -> None:
    for one in ("4.0", "4.000", "4e0", "0.4e1", "40E-1"):
        assert result(parse, body.replace("#", one)) == result(parse, body.replace("#", "4")), one
    assert not isinstance(result(parse, body.replace("#", "4.0")), str)


@table("parse, body", FIELDS, ids=[body for _, body in FIELDS])
def test_other_values_are_no_whole_numbers(parse: Parse, body: str) -> None:
    in_arrays = ("4.0, 4.5", '4.0, "4"', "4.0, true") if "#, 1" in body or "1, #" in body else ()
    for other in ("4.5", "true", '"4"', '"4.0"', "[4.0]", "{}", "1e300", "-1e300", "1e19", *in_arrays):
        assert "whole number" in str(result(parse, body.replace("#", other))), other


@table("parse, body", FIELDS, ids=[body for _, body in FIELDS])
def test_bounds_are_those_of_whole_numbers(parse: Parse, body: str) -> None:
    """A complaint may repeat the number as it was written."""
    for one in ("-7", "99999999999"):
        plain, written = result(parse, body.replace("#", one)), result(parse, body.replace("#", f"{one}.0"))
        assert (written.replace(f"{one}.0", one) if isinstance(written, str) else written) == plain


@table("prompt, ids", [("[4.0, 1e1]", [[4, 10]]), ("[[4.0], [1, 2.0]]", [[4], [1, 2]]), ("[1, 2.0]", [[1, 2]])])
def test_prompts_of_token_ids(prompt: str, ids: list[list[int]]) -> None:
    batch, _ = parse_completion(f'{{"prompt": {prompt}}}'.encode())
    assert [one.content for one in batch.prompts] == ids


@table("prompt", ["[4.0, 4.5]", '["4", 4.0]', '[4.0, "4"]', "4.0", "[true, 4.0]", "[[4.0], [4.5]]"])
def test_other_prompts(prompt: str) -> None:
    assert isinstance(result(parse_completion, f'{{"prompt": {prompt}}}'), str)


@table(
    "processor, media_io",
    [
        ({"min_pixels": 4096.0, "max_pixels": 65536.0}, {}),
        ({"size": {"shortest_edge": 4096.0, "longest_edge": 65536.0}}, {}),
        ({"max_soft_tokens": 280.0}, {}),
        ({"num_frames": 4.0}, {}),
        ({}, {"video": {"num_frames": 4.0}}),
        ({}, {"video": {"frames_indices": [0.0, 2, 4.0], "total_num_frames": 9.0}}),
    ],
)
def test_limits_of_media(processor: dict[str, Any], media_io: dict[str, Any]) -> None:
    def rewritten(old: str, new: str) -> tuple[dict[str, Any], dict[str, Any]]:
        return tuple(json.loads(json.dumps(value).replace(old, new)) for value in (processor, media_io))  # type: ignore[return-value]

    whole = read_media_options(*rewritten(".0", ""))
    assert repr(read_media_options(processor, media_io)) == repr(whole)
    for other in (".5", "e300"):
        with pytest.raises(InvalidValue, match="whole number"):
            read_media_options(*rewritten(".0", other))


def test_numbers_that_are_not_ours_stay_as_they_are() -> None:
    """A template's arguments, a schema and a function's parameters may hold whole numbers, and fractions, as texts do."""
    free = {
        "chat_template_kwargs": {"budget": 4.0},
        "guided_json": {"const": 4.0},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"maximum": 4.0}}}],
    }
    request, _ = parse_chat(f'{{{TURNS}, "max_tokens": 4.0, {json.dumps(free)[1:]}'.encode())
    assert repr(request.chat_template_kwargs) == "{'budget': 4.0}"
    assert bytes(request.guided_json) == b'{"const": 4.0}'  # type: ignore[arg-type]
    assert "4.0" in repr(request.tools)


def test_a_written_limit_reaches_the_worker(gateway: scripted.Gateway) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 7.0}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 7.0}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 7.0}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 7.0}),
    ):
        gateway.answer_two_tokens()
        assert gateway.ask("POST", path, {"model": "tiny", **body}).status == 200
        assert repr(gateway.worker.requests[-1].sampling.max_tokens) == "7"
