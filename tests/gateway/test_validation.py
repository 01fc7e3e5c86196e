"""Every bad input is answered with a status, a code and the field; the next request works."""

import base64
import io
import json
from typing import Any

import pytest
import scripted
from chats import data_url, picture

from saccade.errors import UnsupportedParameter
from saccade.gateway.openai_requests import TokenizeRequest
from saccade.gateway.parameters import LATER, parse_chat, parse_tokenize

TEXT = [{"type": "text", "text": "hi"}]
GOOD = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
URL = "messages[0].content[0].image_url.url"


def body(**fields: Any) -> dict[str, Any]:
    return {**GOOD, **fields}


def content(*parts: Any) -> dict[str, Any]:
    return body(messages=[{"role": "user", "content": list(parts)}])


def message(**fields: Any) -> dict[str, Any]:
    return body(messages=[{"role": "user", "content": "hi", **fields}])


def image(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def encoded(raw: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(raw).decode()


def jpeg_half() -> bytes:
    buffer = io.BytesIO()
    picture(160, 120, 1).save(buffer, "JPEG")
    return buffer.getvalue()[:-900]


CASES: dict[str, tuple[Any, int, str, str | None]] = {
    "nothing": (b"", 400, "invalid_value", None),
    "not JSON": (b"{nope", 400, "invalid_value", None),
    "not UTF-8": (b'{"model": "\xff"}', 400, "invalid_value", None),
    "lone surrogate": (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800 x"}]}', 400, "invalid_value", None),
    "an array": (b"[]", 400, "invalid_value", None),
    "too deep": (b'{"tools": ' + b"[" * 100_000, 400, "invalid_value", None),
    "NaN": (b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "temperature": NaN}', 400, "invalid_value", None),
    "huge number": (json.dumps(GOOD)[:-1].encode() + b', "top_p": 1e999}', 400, "invalid_value", "top_p"),
    "no model": ({"messages": GOOD["messages"]}, 400, "invalid_value", "model"),
    "no messages": ({"model": "tiny"}, 400, "invalid_value", "messages"),
    "empty messages": (body(messages=[]), 400, "invalid_value", "messages"),
    "unknown model": (body(model="gpt-9"), 404, "model_not_found", "model"),
    "model of a wrong type": (body(model=3), 400, "invalid_value", "model"),
    "content of a wrong type": (message(content=7), 400, "invalid_value", "messages[0].content"),
    "no content": (body(messages=[{"role": "user"}]), 400, "invalid_value", "messages[0].content"),
    "no role": (body(messages=[{"content": "a"}]), 400, "invalid_value", "messages[0].role"),
    "unknown role": (message(role="boss"), 400, "invalid_value", "messages[0].role"),
    "tool role": (message(role="tool"), 400, "unsupported_parameter", "messages[0]"),
    "tool calls": (message(tool_calls=[{}]), 400, "unsupported_parameter", "messages[0]"),
    "part without type": (content({"text": "a"}), 400, "invalid_value", "messages[0].content[0].type"),
    "text part without text": (content({"type": "text"}), 400, "invalid_value", "messages[0].content[0].text"),
    "video": (content({"type": "video_url"}), 400, "unsupported_parameter", "messages[0].content[0].type"),
    "audio": (content({"type": "input_audio"}), 400, "unsupported_parameter", "messages[0].content[0].type"),
    "audio by URL": (content({"type": "audio_url"}), 400, "unsupported_parameter", "messages[0].content[0].type"),
    "embeddings": (content({"type": "image_embeds"}), 400, "unsupported_parameter", "messages[0].content[0].type"),
    "file": (content(*TEXT, {"type": "file"}), 400, "unsupported_parameter", "messages[0].content[1].type"),
    "image part without image": (content({"type": "image_url"}), 400, "invalid_value", "messages[0].content[0].image_url"),
    "image URL without URL": (content({"type": "image_url", "image_url": {}}), 400, "invalid_value", "messages[0].content[0].image_url.url"),
    "unknown detail": (content({"type": "image_url", "image_url": {"url": "", "detail": "x"}}), 400, "invalid_value", "messages[0].content[0].image_url.detail"),
    "temperature over 2": (body(temperature=2.5), 400, "invalid_value", "temperature"),
    "temperature below 0": (body(temperature=-1), 400, "invalid_value", "temperature"),
    "temperature as text": (body(temperature="hot"), 400, "invalid_value", "temperature"),
    "top_p 0": (body(top_p=0), 400, "invalid_value", "top_p"),
    "top_k -2": (body(top_k=-2), 400, "invalid_value", "top_k"),
    "top_k too large": (body(top_k=2**64), 400, "invalid_value", "top_k"),
    "top_k as float": (body(top_k=1.5), 400, "invalid_value", "top_k"),
    "seed too large": (body(seed=2**70), 400, "invalid_value", "seed"),
    "max_tokens 0": (body(max_tokens=0), 400, "invalid_value", "max_tokens"),
    "max_completion_tokens -1": (body(max_completion_tokens=-1), 400, "invalid_value", "max_completion_tokens"),
    "stop empty": (body(stop=""), 400, "invalid_value", "stop"),
    "stop too long": (body(stop="a" * 1025), 400, "invalid_value", "stop"),
    "stop of 17": (body(stop=["a"] * 17), 400, "invalid_value", "stop"),
    "stop with a number": (body(stop=["a", 1]), 400, "invalid_value", "stop[1]"),
    "stream as text": (body(stream="yes"), 400, "invalid_value", "stream"),
    "stream_options of a wrong type": (body(stream_options=[]), 400, "invalid_value", "stream_options"),
    "tools": (body(tools=[{"type": "function"}]), 400, "unsupported_parameter", "tools"),
    "thinking by another name": (body(enable_thinking=False), 400, "unsupported_parameter", "enable_thinking"),
    "processor setting": (body(mm_processor_kwargs={"fps": 2}), 400, "unsupported_parameter", "mm_processor_kwargs.fps"),
    "processor settings of a wrong type": (body(mm_processor_kwargs=[]), 400, "invalid_value", "mm_processor_kwargs"),
    "no pixels": (body(mm_processor_kwargs={"max_pixels": 0}), 400, "invalid_value", "mm_processor_kwargs.max_pixels"),
    "limits crossed": (body(mm_processor_kwargs={"min_pixels": 9, "max_pixels": 8}), 400, "invalid_value", "mm_processor_kwargs"),
    "limits crossed with the model's": ({**content(image(data_url(picture(8, 8, 1)))), "mm_processor_kwargs": {"min_pixels": 2**24}}, 400, "invalid_value", "mm_processor_kwargs"),
    "switch": (body(chat_template_kwargs={"tokenize": True}), 400, "unsupported_parameter", "chat_template_kwargs.tokenize"),
    "switch of a wrong type": (body(chat_template_kwargs={"add_vision_id": [1]}), 400, "invalid_value", "chat_template_kwargs.add_vision_id"),
    "switches of a wrong type": (body(chat_template_kwargs=1), 400, "invalid_value", "chat_template_kwargs"),
    "include_reasoning as text": (body(include_reasoning="no"), 400, "invalid_value", "include_reasoning"),
    "reasoning of a user": (message(reasoning_content="Hm"), 400, "invalid_value", "messages[0].reasoning_content"),
    "reasoning of a wrong type": (message(role="assistant", reasoning={}), 400, "invalid_value", "messages[0].reasoning"),
    "uuid for a picture": (content({"type": "image_url", "image_url": None, "uuid": "a"}), 400, "invalid_value", "messages[0].content[0].image_url"),
    "no choices": (body(n=0), 400, "invalid_value", "n"),
    "129 choices": (body(n=129), 400, "invalid_value", "n"),
    "min_p over 1": (body(min_p=1.5), 400, "invalid_value", "min_p"),
    "frequency_penalty over 2": (body(frequency_penalty=2.5), 400, "invalid_value", "frequency_penalty"),
    "presence_penalty below -2": (body(presence_penalty=-3), 400, "invalid_value", "presence_penalty"),
    "repetition_penalty 0": (body(repetition_penalty=0), 400, "invalid_value", "repetition_penalty"),
    "bias over 100": (body(logit_bias={"5": 101}), 400, "invalid_value", "logit_bias"),
    "bias as text": (body(logit_bias={"5": "high"}), 400, "invalid_value", "logit_bias"),
    "bias of a word": (body(logit_bias={"word": 1}), 400, "invalid_value", "logit_bias"),
    "bias of a negative id": (body(logit_bias={"-5": 1}), 400, "invalid_value", "logit_bias"),
    "bias of an id in another spelling": (body(logit_bias={"05": 1}), 400, "invalid_value", "logit_bias"),
    "bias of no token": (body(logit_bias={"123456": 1}), 400, "invalid_value", "logit_bias"),
    "bias of a huge id": (body(logit_bias={"9" * 5000: 1}), 400, "invalid_value", "logit_bias"),
    "biases as a list": (body(logit_bias=[5]), 400, "invalid_value", "logit_bias"),
    "no allowed token": (body(allowed_token_ids=[]), 400, "invalid_value", "allowed_token_ids"),
    "allowed token of no model": (body(allowed_token_ids=[5, 123456]), 400, "invalid_value", "allowed_token_ids"),
    "negative stop token": (body(stop_token_ids=[5, -1]), 400, "invalid_value", "stop_token_ids[1]"),
    "stop token of no model": (body(stop_token_ids=[123456]), 400, "invalid_value", "stop_token_ids"),
    "257 stop tokens": (body(stop_token_ids=[5] * 257), 400, "invalid_value", "stop_token_ids"),
    "min_tokens over max_tokens": (body(min_tokens=5, max_tokens=4), 400, "invalid_value", "min_tokens"),
    "min_tokens over the context": (body(min_tokens=9999), 400, "invalid_value", "min_tokens"),
    "21 top_logprobs": (body(logprobs=True, top_logprobs=21), 400, "invalid_value", "top_logprobs"),
    "top_logprobs alone": (body(top_logprobs=2), 400, "invalid_value", "top_logprobs"),
    "logprobs as a number": (body(logprobs=2), 400, "invalid_value", "logprobs"),
    "21 prompt_logprobs": (body(prompt_logprobs=21), 400, "invalid_value", "prompt_logprobs"),
    "prompt_logprobs in a stream": (body(prompt_logprobs=1, stream=True), 400, "invalid_value", "prompt_logprobs"),
    "empty cache_salt": (body(cache_salt=""), 400, "invalid_value", "cache_salt"),
    "response_format": (body(response_format={"type": "json_object"}), 400, "unsupported_parameter", "response_format"),
    "tool_choice": (body(tool_choice="required"), 400, "unsupported_parameter", "tool_choice"),
    "best_of": (body(best_of=2, n=2), 400, "unsupported_parameter", "best_of"),
    "answer over the context": (body(max_tokens=9999), 400, "context_length_exceeded", "max_tokens"),
    "prompt over the context": (message(content="word " * 9000), 400, "context_length_exceeded", "messages"),
    "picture over the context": (content(*[image(data_url(picture(900, 900, 1)))] * 6), 400, "context_length_exceeded", "messages"),
    "17 pictures": (content(*[image(data_url(picture(8, 8, 1)))] * 17), 400, "too_many_images", "messages"),
    "http URL": (content(image("http://example.com/a.png")), 400, "invalid_image_url", URL),
    "private URL": (content(image("https://127.0.0.1/a.png")), 400, "invalid_image_url", URL),
    "file URL": (content(image("file:///etc/passwd")), 400, "invalid_image_url", URL),
    "no URL at all": (content(image("")), 400, "invalid_image_url", URL),
    "data URL without comma": (content(image("data:image/png;base64")), 400, "invalid_image_url", URL),
    "data URL not in base64": (content(image("data:image/svg+xml,<svg/>")), 400, "invalid_image_url", URL),
    "garbage in base64": (content(image("data:image/png;base64,@@@@")), 400, "invalid_base64", URL),
    "base64 cut short": (content(image("data:image/png;base64,YWJjZ")), 400, "invalid_base64", URL),
    "base64 that is not ASCII": (content(image("data:image/png;base64,YWé=")), 400, "invalid_base64", URL),
    "empty picture": (content(image("data:image/png;base64,")), 400, "invalid_image", URL),
    "a text as picture": (content(image(encoded(b"hello, I am a text"))), 400, "unsupported_image_format", URL),
    "truncated header": (content(image(encoded(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"))), 400, "invalid_image", URL),
    "truncated picture": (content(image(encoded(jpeg_half()))), 400, "invalid_image", URL),
    "plain string as image_url": (content({"type": "image_url", "image_url": "ftp://x"}), 400, "invalid_image_url", "messages[0].content[0].image_url"),
}  # fmt: skip


@pytest.mark.parametrize(("request_body", "status", "code", "param"), CASES.values(), ids=CASES.keys())
def test_bad_input(request_body: Any, status: int, code: str, param: str | None, gateway: scripted.Gateway) -> None:
    before = gateway.metric("saccade_slots_in_use")
    answer = gateway.ask("POST", "/v1/chat/completions", request_body)
    error = answer.json["error"]
    assert (answer.status, error["code"], error["param"]) == (status, code, param), error
    assert error["message"].endswith(".")
    assert error["type"] == "invalid_request_error"
    assert not gateway.worker.requests
    assert gateway.chat().status == 200
    assert gateway.metric("saccade_slots_in_use") == before


@pytest.mark.parametrize("name", LATER)
def test_parameters_that_come_later_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedParameter) as error:
        parse_chat(json.dumps(body(**{name: "something"})).encode())
    assert error.value.param == name
    for harmless in (None, *LATER[name]):
        parse_chat(json.dumps(body(**{name: harmless})).encode())


@pytest.mark.parametrize("name", sorted(LATER.keys() - set(TokenizeRequest.__struct_fields__)))
def test_tokenize_refuses_them_too(name: str) -> None:
    with pytest.raises(UnsupportedParameter) as error:
        parse_tokenize(json.dumps(body(**{name: "something"})).encode())
    assert error.value.param == name


def test_unknown_fields_and_values_that_change_nothing_are_taken(gateway: scripted.Gateway) -> None:
    extras = {"user": "me", "store": False, "metadata": {"a": "b"}, "n": 1, "frequency_penalty": 0.0, "logit_bias": {}}
    answer = gateway.chat(**extras, response_format={"type": "text"}, tool_choice="none", parallel_tool_calls=True)
    assert answer.status == 200, answer.body


def test_messages_say_nothing_about_libraries(gateway: scripted.Gateway) -> None:
    for request_body, *_ in CASES.values():
        answer = gateway.ask("POST", "/v1/chat/completions", request_body).body.decode()
        assert not any(word in answer for word in ("msgspec", "Traceback", "$.", "pybase64", "PIL", "0x", "jinja"))
