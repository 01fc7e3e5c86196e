"""Every value is bounded before it is decoded; what is not known is named so that headers and logs can take it."""

import json
import threading
from typing import Any

import msgspec
import pytest
from tables import table

from saccade.errors import InvalidValue, SaccadeError, UnsupportedParameter
from saccade.gateway import known_parameters, parameters
from saccade.gateway.apis.chat.reader import parse_chat
from saccade.gateway.apis.models import DetokenizeRequest, parse_detokenize, parse_tokenize
from saccade.gateway.body_bounds import MAX_STRINGS
from saccade.gateway.chat_request import ChatMessage, ChatRequest, ContentPart, TokenizeRequest
from saccade.gateway.parameters import MAX_PARAMETERS, MAX_VALUE_BYTES, NOT_SEARCHED

HEAD = b'{"model": "m", "messages": [{"role": "user", "content": "a"}]'
LONG_ARRAY = b"[" + b"0," * 2**20 + b"0]"


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}).encode()


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Names and lengths of all values that were decoded."""
    seen: list[tuple[str, int]] = []
    plain = parameters.decode
    own_thread = threading.get_ident()  # a gateway of another test may still decode

    def watching(body: Any, decoder: Any, name: str = "") -> Any:
        if name and threading.get_ident() == own_thread:  # not the whole body
            seen.append((name, memoryview(body).nbytes))
        return plain(body, decoder, name)

    monkeypatch.setattr(parameters, "decode", watching)
    return seen


BOUNDED = sorted(set(ChatRequest.__struct_fields__) - {*parameters.LONG, "model"})


@table("name", BOUNDED)
def test_long_values_are_refused_before_they_are_decoded(name: str, decoded: list[tuple[str, int]]) -> None:
    with pytest.raises(InvalidValue) as error:
        parse_chat(HEAD + b', "%s": %s}' % (name.encode(), LONG_ARRAY))
    assert error.value.param == name
    assert "bytes" in error.value.message
    assert name not in dict(decoded)


@table("name", BOUNDED)
def test_repeated_value_is_bounded_too(name: str, decoded: list[tuple[str, int]]) -> None:
    with pytest.raises(InvalidValue, match="values"):
        parse_chat(HEAD + b', "%s": %s, "%s": null}' % (name.encode(), LONG_ARRAY, name.encode()))
    assert max((length for field, length in decoded if field != "messages"), default=0) <= MAX_VALUE_BYTES


@table("name", sorted(known_parameters.LATER))
def test_long_values_that_are_refused_are_not_decoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    plain = parameters.parse

    def watching(body: Any, kind: Any) -> Any:
        lengths.append(memoryview(body).nbytes if isinstance(body, msgspec.Raw) else 0)
        return plain(body, kind)

    monkeypatch.setattr(parameters, "parse", watching)
    for parse in (parse_chat, parse_tokenize):
        if name not in TokenizeRequest.__struct_fields__ or parse is parse_chat:
            with pytest.raises(UnsupportedParameter):
                parse(HEAD + b', "%s": %s}' % (name.encode(), LONG_ARRAY))
    assert lengths == [0] * len(lengths)


def free_shapes(kind: Any) -> set[str]:
    """Fields of a struct, and of those in it, whose values may have any shape once they are decoded."""
    free, waiting = set(), [msgspec.inspect.type_info(kind)]
    while waiting:
        for field in waiting.pop().fields:  # type: ignore[attr-defined]
            inner = [field.type]
            while inner:
                here = inner.pop()
                if isinstance(here, msgspec.inspect.AnyType):
                    free.add(field.name)
                elif isinstance(here, msgspec.inspect.StructType):
                    waiting.append(here)
                inner += getattr(here, "types", ())
                inner += [getattr(here, name) for name in ("type", "item_type", "value_type") if hasattr(here, name)]
    return free


@table("kind", [ChatRequest, TokenizeRequest, DetokenizeRequest, ChatMessage, ContentPart])
def test_nothing_of_any_shape_is_decoded_unbounded(kind: type) -> None:
    assert free_shapes(kind) <= parameters.SHORT.keys()


@table(
    ("body", "param"),
    [
        (b'{"model": "m", "messages": [' + b'{"role": "user"},' * 200_000 + b"{}]}", None),
        (b'{"model": "m", "messages": [{"role": "user", "content": [' + b'{"type": "text"},' * 200_000 + b"{}]}]}", None),
        (HEAD + b"".join(b', "k%d": 0' % key for key in range(MAX_STRINGS)) + b"}", None),
        (HEAD + b"".join(b', "k%d": 0' % key for key in range(MAX_PARAMETERS)) + b"}", None),
        (HEAD[:-2] + b"".join(b', "k%d": 0' % key for key in range(MAX_STRINGS)) + b"}]}", None),
        (HEAD + b', "logit_bias": {' + b", ".join(b'"%d": 1' % key for key in range(100_000)) + b"}}", None),
        (HEAD + b', "logit_bias": {' + b", ".join(b'"%d": 1' % key for key in range(2000)) + b"}}", "logit_bias"),
        (HEAD + b', "stop": [' + b'"a",' * 100_000 + b'"a"]}', None),
        (HEAD + b', "stop_token_ids": [' + b"5," * 200_000 + b"5]}", "stop_token_ids"),
        (HEAD + b', "allowed_token_ids": [' + b"5," * 2**20 + b"5]}", "allowed_token_ids"),
        (HEAD[:-2] + b', "tool_calls": ' + b"[" * 100_000, None),
    ],
    ids=["messages", "parts", "keys", "257 keys", "keys of a message", "biases", "2000 biases", "stops", "stop ids",
         "allowed ids", "depth"],
)  # fmt: skip
def test_floods_are_refused(body: bytes, param: str | None) -> None:
    with pytest.raises(InvalidValue) as error:
        parse_chat(body)
    assert error.value.param == param


def test_tool_calls_of_any_shape_are_not_built() -> None:
    with pytest.raises(InvalidValue) as error:
        parse_chat(HEAD[:-2] + b', "tool_calls": ' + LONG_ARRAY + b"}]}")
    assert error.value.param == "messages"


def test_values_at_the_limit_are_accepted(tiny_qwen3_vl: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}] * 2}] * 2048
    request, warning = parse_chat(chat(messages=messages, allowed_token_ids=[5] * 2**20, logit_bias={"5": 1}))
    assert (len(request.messages), warning) == (2048, NOT_SEARCHED)


def test_tokens_are_counted_before_they_are_built(decoded: list[tuple[str, int]]) -> None:
    parse_detokenize(b'{"tokens": [' + b"5," * (2**20 - 1) + b"5]}")
    decoded.clear()
    with pytest.raises(InvalidValue) as error:
        parse_detokenize(b'{"tokens": [' + b"5," * 2**20 + b"5]}")
    assert error.value.param == "tokens"
    assert decoded == []


@table(
    ("unknown", "warning"),
    [
        ({}, ""),
        ({"temprature": 1}, "temprature (did you mean temperature?)"),
        ({"colour": 1, "max_token": 1}, "colour, max_token (did you mean max_tokens?)"),
        ({"a\r\nset-cookie: b": 1}, "a??set-cookie: b"),
        ({"h\u00e9": 1, "": 2}, "h?, "),
        ({"x" * 65: 1}, "x" * 61 + "..."),
        ({f"p{number}": 1 for number in range(11)}, "p0, p1, p2, p3, p4, p5, p6, p7 and 3 more"),
    ],
)
def test_warnings_are_short_and_plain(unknown: dict[str, int], warning: str) -> None:
    assert parse_chat(chat(**unknown))[1] == (f"unknown parameters ignored: {warning}" if unknown else "")
    if unknown:
        with pytest.raises(UnsupportedParameter) as error:
            parse_chat(chat(**unknown), strict=True)
        assert (error.value.param or "") == warning.split(" (")[0].split(", ")[0]
        assert error.value.message.endswith((".", "?"))


def test_the_hint_names_what_is_served() -> None:
    """Not what would be refused."""
    for name in (*ChatRequest.__struct_fields__, *known_parameters.LATER):
        for close in (name[:-1], name + "s"):
            try:
                _, warning = parse_chat(chat(**{close: None}))
            except SaccadeError:
                continue
            assert not any(f"did you mean {refused}?" in warning for refused in known_parameters.LATER)


@table(
    ("fields", "named"),
    [
        ({"stream": True, "stream_options": {"include_usage": True, "chunk": 1}}, "stream_options.chunk"),
        ({"stream": True, "stream_options": {"include_obfuscation": False}}, ""),
        ({"stream_options": None, "response_format": {"type": "text"}}, ""),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"any": 1}, "stict": True}, "x": 1}},
            "response_format.json_schema.stict, response_format.x",
        ),
        ({"colour": 1, "structured_outputs": {"choice": ["a"], "h\u00e9": 1}}, "colour, structured_outputs.h?"),
        ({"chat_template_kwargs": {"enable_thinking": True}, "metadata": {"any": 1}}, ""),
    ],
)
def test_unknown_names_in_objects_are_named(fields: dict[str, Any], named: str) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}).encode()
    assert parse_chat(body)[1] == (f"unknown parameters ignored: {named}" if named else "")
    if named:
        with pytest.raises(UnsupportedParameter) as caught:
            parse_chat(body, strict=True)
        assert caught.value.param == named.split(", ")[0]
