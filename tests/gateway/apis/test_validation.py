"""Every bad input is answered with a status, a code and the field; the next request works."""

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import scripted
from chats import data_url, random_image
from tables import table

from saccade.errors import UnsupportedParameter
from saccade.gateway.apis.chat.reader import parse_chat
from saccade.gateway.apis.models import parse_tokenize
from saccade.gateway.body_bounds import MAX_TOOLS_BYTES
from saccade.gateway.chat_request import TokenizeRequest
from saccade.gateway.config import GatewayConfig
from saccade.gateway.known_parameters import LATER
from saccade.protocol.output import FinishReason, TokenDelta

TEXT = [{"type": "text", "text": "hi"}]
GOOD = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
URL = "messages[0].content[0].image_url.url"


def body(**fields: Any) -> dict[str, Any]:
    return {**GOOD, **fields}


def tool(**fields: Any) -> dict[str, Any]:
    """A tool of a request."""
    return {"type": "function", "function": {"name": "f", **fields}}


def nested_schema(depth: int) -> dict[str, Any]:
    """A schema of nested objects."""
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def call(arguments: str, **fields: Any) -> dict[str, Any]:
    """A call in an earlier turn."""
    return {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}, **fields}


def called(arguments: str, **fields: Any) -> dict[str, Any]:
    """A body with such a turn."""
    return message(role="assistant", tool_calls=[call(arguments, **fields)])


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
    random_image(160, 120, 1).save(buffer, "JPEG")
    return buffer.getvalue()[:-900]


CASES: dict[str, tuple[Any, int, str, str | None]] = {
    "nothing": (b"", 400, "invalid_value", None),
    "not JSON": (b"{nope", 400, "invalid_value", None),
    "not UTF-8": (b'{"model": "\xff"}', 400, "invalid_value", None),
    "lone surrogate": (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800 x"}]}', 400, "invalid_value", None),
    "many arrays": (body(messages=[{"role": "user", "content": "hi", "a": [[]] * 70_000}]), 400, "invalid_value", None),
    "an array": (b"[]", 400, "invalid_value", None),
    "too deep": (b'{"tools": ' + b"[" * 60_000, 400, "invalid_value", None),
    "NaN": (b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "temperature": NaN}', 400, "invalid_value", None),
    "huge number": (json.dumps(GOOD)[:-1].encode() + b', "top_p": 1e999}', 400, "invalid_value", "top_p"),
    "no messages": ({"model": "tiny"}, 400, "invalid_value", "messages"),
    "empty messages": (body(messages=[]), 400, "invalid_value", "messages"),
    "unknown model": (body(model="gpt-9"), 404, "model_not_found", "model"),
    "model of a wrong type": (body(model=3), 400, "invalid_value", "model"),
    "content of a wrong type": (message(content=7), 400, "invalid_value", "messages[0].content"),
    "no content": (body(messages=[{"role": "user"}]), 400, "invalid_value", "messages[0].content"),
    "no role": (body(messages=[{"content": "a"}]), 400, "invalid_value", "messages[0].role"),
    "unknown role": (message(role="boss"), 400, "invalid_value", "messages[0].role"),
    "tool role without a call": (message(role="tool"), 400, "invalid_value", "messages[0].tool_call_id"),
    "function role": (message(role="function"), 400, "unsupported_parameter", "messages[0]"),
    "function call": (message(function_call={"name": "f"}), 400, "unsupported_parameter", "messages[0]"),
    "tool call without a function": (message(tool_calls=[{"id": "a"}]), 400, "invalid_value", "messages[0].tool_calls[0].function"),
    "tool calls of a user": (message(tool_calls=[call("{}")]), 400, "invalid_value", "messages[0].tool_calls"),
    "deep arguments": (called('{"a":' * 70 + "1" + "}" * 70), 400, "invalid_value", "messages[0].tool_calls[0].function.arguments"),
    "call of another type": (called("{}", type="custom"), 400, "unsupported_parameter", "messages[0].tool_calls[0].type"),
    "part without type": (content({"text": "a"}), 400, "invalid_value", "messages[0].content[0].type"),
    "text part without text": (content({"type": "text"}), 400, "invalid_value", "messages[0].content[0].text"),
    "video without a URL": (content({"type": "video_url"}), 400, "invalid_value", "messages[0].content[0].video_url"),
    "video that is none": (content({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}), 400, "unsupported_video_format", "messages[0].content[0].video_url.url"),
    "frames of videos": (body(media_io_kwargs={"video": {"num_frames": 0}}), 400, "invalid_value", "media_io_kwargs.video.num_frames"),
    "another way to read videos": (body(media_io_kwargs={"video": {"backend": "x"}}), 400, "unsupported_parameter", "media_io_kwargs.video.backend"),
    "audio": (content({"type": "input_audio"}), 400, "unsupported_parameter", "messages[0].content[0].type"),
    "audio by URL": (content({"type": "audio_url"}), 400, "unsupported_parameter", "messages[0].content[0].type"),
    "embeddings": (content({"type": "image_embeds"}), 400, "unsupported_parameter", "messages[0].content[0].type"),
    "file": (content(*TEXT, {"type": "file"}), 400, "invalid_value", "messages[0].content[1].file"),
    "file of nothing": (content(*TEXT, {"type": "file", "file": {}}), 400, "invalid_value", "messages[0].content[1].file"),
    "file that is no object": (content(*TEXT, {"type": "file", "file": 1}), 400, "invalid_value", "messages[0].content[1].file"),
    "file twice": (content({"type": "file", "file": {"file_id": "file-1", "file_data": "data:image/png;base64,"}}), 400, "invalid_value", "messages[0].content[0].file"),
    "file of another kind": (content({"type": "file", "file": {"file_data": "data:application/zip;base64,YSxi"}}), 400, "unsupported_parameter", "messages[0].content[0].file.file_data"),
    "file by a URL": (content({"type": "file", "file": {"file_data": "http://127.0.0.1/a.png"}}), 400, "unsupported_parameter", "messages[0].content[0].file.file_data"),
    "URL for the id of a file": (content({"type": "file", "file": {"file_id": "http://127.0.0.1/a.png"}}), 404, "file_not_found", "messages[0].content[0].file.file_id"),
    "file in a text": (content({"type": "text", "text": "a", "file": {"file_id": "file-1"}}), 400, "unsupported_parameter", "messages[0].content[0].file"),
    "file in a message": (message(file={"file_id": "file-1"}), 400, "unsupported_parameter", "messages[0].file"),
    "image part without image": (content({"type": "image_url"}), 400, "invalid_value", "messages[0].content[0].image_url"),
    "image URL without URL": (content({"type": "image_url", "image_url": {}}), 400, "invalid_value", "messages[0].content[0].image_url.url"),
    "unknown detail": (content({"type": "image_url", "image_url": {"url": "", "detail": "x"}}), 400, "invalid_value", "messages[0].content[0].image_url.detail"),
    "temperature over 2": (body(temperature=2.5), 400, "invalid_value", "temperature"),
    "temperature below 0": (body(temperature=-1), 400, "invalid_value", "temperature"),
    "temperature as text": (body(temperature="hot"), 400, "invalid_value", "temperature"),
    "top_p below 0": (body(top_p=-0.1), 400, "invalid_value", "top_p"),
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
    "tools": (body(tools=[{"type": "function"}]), 400, "invalid_value", "tools[0].function"),
    "tool of another type": (body(tools=[{"type": "web_search"}]), 400, "unsupported_parameter", "tools[0].type"),
    "tool without a name": (body(tools=[tool(name=None)]), 400, "invalid_value", "tools[0].function.name"),
    "tool with a wrong name": (body(tools=[tool(name="a b")]), 400, "invalid_value", "tools[0].function.name"),
    "tool with a long name": (body(tools=[tool(name="a" * 129)]), 400, "invalid_value", "tools[0].function.name"),
    "tool twice": (body(tools=[tool(), tool()]), 400, "invalid_value", "tools"),
    "tools of brackets": (body(tools=[{"type": "function", "function": {"name": "f", "parameters": [[]] * 60_000}}]), 400, "invalid_value", "tools"),
    "too long tools": (body(tools=[tool(description="a" * MAX_TOOLS_BYTES)]), 400, "invalid_value", "tools"),
    "description of a wrong type": (body(tools=[tool(description=1)]), 400, "invalid_value", "tools[0].function.description"),
    "parameters of a wrong type": (body(tools=[tool(parameters=[])]), 400, "invalid_value", "tools[0].function.parameters"),
    "parameters of no object": (body(tools=[tool(parameters={"type": "array"})]), 400, "invalid_value", "tools[0].function.parameters"),
    "deep parameters": (body(tools=[tool(parameters=nested_schema(70))]), 400, "invalid_value", "tools[0].function"),
    "strict tool": (body(tools=[tool(strict=True)]), 400, "unsupported_parameter", "tools"),
    "strict of a wrong type": (body(tools=[tool(strict=1)]), 400, "invalid_value", "tools[0].function.strict"),
    "functions": (body(functions=[{"name": "f"}]), 400, "unsupported_parameter", "functions"),
    "function_call": (body(function_call={"name": "f"}), 400, "unsupported_parameter", "function_call"),
    "named tool": (body(tools=[tool()], tool_choice={"type": "function", "function": {"name": "f"}}), 400, "unsupported_parameter", "tool_choice"),
    "named tool that is not there": (body(tools=[tool()], tool_choice={"type": "function", "function": {"name": "g"}}), 400, "invalid_value", "tool_choice"),
    "two that hold the answer": (body(tools=[tool()], tool_choice="required", guided_regex="a"), 400, "invalid_value", "tool_choice"),
    "unknown tool_choice": (body(tools=[tool()], tool_choice="some"), 400, "invalid_value", "tool_choice"),
    "unknown effort": (body(reasoning_effort="some"), 400, "invalid_value", "reasoning_effort"),
    "Ollama's images": (message(images=["aGk="]), 400, "unsupported_parameter", "messages[0].images"),
    "Ollama's format": (body(format="json"), 400, "unsupported_parameter", "format"),
    "Ollama's options": (body(options={"temperature": 0}), 400, "unsupported_parameter", "options"),
    "images beside the messages": (body(images=["aGk="]), 400, "unsupported_parameter", "images"),
    "a source in a part": (content({**TEXT[0], "source": {"data": "aGk="}}), 400, "unsupported_parameter", "messages[0].content[0].source"),
    "other media that are no text": (b'{"model": "tiny", "messages": [{"role": "user", "content": "a", "images": "\\ud800"}]}', 400, "invalid_value", None),
    "other media that are not UTF-8": (b'{"model": "tiny", "messages": [{"role": "user", "content": "a", "images": "\xff"}]}', 400, "invalid_value", None),
    "refused value that is not UTF-8": (b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "functions": "\xff"}', 400, "invalid_value", None),
    "unknown name that is not UTF-8": (b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "\xff": 1}', 400, "invalid_value", None),
    "2049 messages": (body(messages=GOOD["messages"] * 2049), 400, "invalid_value", "messages"),
    "4097 parts": (body(messages=[{"role": "user", "content": TEXT * 4096}, {"role": "user", "content": TEXT}]), 400, "invalid_value", "messages"),
    "switches of 16 KiB": (body(chat_template_kwargs={"add_vision_id": "x" * 2**14}), 400, "invalid_value", "chat_template_kwargs"),
    "more allowed tokens than there are": (body(allowed_token_ids=[5] * 200_000), 400, "invalid_value", "allowed_token_ids"),
    "text beyond the context by its bytes": (message(content="word " * 200_000), 400, "context_length_exceeded", "messages"),
    "processor setting": (body(mm_processor_kwargs={"do_resize": 2}), 400, "unsupported_parameter", "mm_processor_kwargs.do_resize"),
    "processor settings of a wrong type": (body(mm_processor_kwargs=[]), 400, "invalid_value", "mm_processor_kwargs"),
    "no pixels": (body(mm_processor_kwargs={"max_pixels": 0}), 400, "invalid_value", "mm_processor_kwargs.max_pixels"),
    "limits crossed": (body(mm_processor_kwargs={"min_pixels": 9, "max_pixels": 8}), 400, "invalid_value", "mm_processor_kwargs"),
    "limits crossed with the model's": ({**content(image(data_url(random_image(8, 8, 1)))), "mm_processor_kwargs": {"min_pixels": 2**24}}, 400, "invalid_value", "mm_processor_kwargs"),
    "switch": (body(chat_template_kwargs={"tokenize": True}), 400, "unsupported_parameter", "chat_template_kwargs.tokenize"),
    "switch of a wrong type": (body(chat_template_kwargs={"add_vision_id": [1]}), 400, "invalid_value", "chat_template_kwargs.add_vision_id"),
    "switches of a wrong type": (body(chat_template_kwargs=1), 400, "invalid_value", "chat_template_kwargs"),
    "include_reasoning as text": (body(include_reasoning="no"), 400, "invalid_value", "include_reasoning"),
    "reasoning of a user": (message(reasoning_content="Hm"), 400, "invalid_value", "messages[0].reasoning_content"),
    "reasoning of a wrong type": (message(role="assistant", reasoning={}), 400, "invalid_value", "messages[0].reasoning"),
    "uuid for an image": (content({"type": "image_url", "image_url": None, "uuid": "a"}), 400, "invalid_value", "messages[0].content[0].image_url"),
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
    "tool_choice": (body(tool_choice="required"), 400, "invalid_value", "tool_choice"),
    "best_of": (body(best_of=2, n=2), 400, "unsupported_parameter", "best_of"),
    "answer over the context": (body(max_tokens=9999), 400, "context_length_exceeded", "max_tokens"),
    "prompt over the context": (message(content="word " * 9000), 400, "context_length_exceeded", "messages"),
    "image over the context": (content(*[image(data_url(random_image(900, 900, 1)))] * 6), 400, "context_length_exceeded", "messages"),
    "17 images": (content(*[image(data_url(random_image(8, 8, 1)))] * 17), 400, "too_many_images", "messages"),
    "http URL": (content(image("http://example.com/a.png")), 400, "invalid_image_url", URL),
    "private URL": (content(image("https://127.0.0.1/a.png")), 400, "invalid_image_url", URL),
    "file URL": (content(image("file:///etc/passwd")), 400, "invalid_image_url", URL),
    "no URL at all": (content(image("")), 400, "invalid_image_url", URL),
    "data URL without comma": (content(image("data:image/png;base64")), 400, "invalid_image_url", URL),
    "data URL not in base64": (content(image("data:image/svg+xml,<svg/>")), 400, "invalid_image_url", URL),
    "garbage in base64": (content(image("data:image/png;base64,@@@@")), 400, "invalid_base64", URL),
    "base64 cut short": (content(image("data:image/png;base64,YWJjZ")), 400, "invalid_base64", URL),
    "base64 that is not ASCII": (content(image("data:image/png;base64,YWé=")), 400, "invalid_base64", URL),
    "empty image": (content(image("data:image/png;base64,")), 400, "invalid_image", URL),
    "a text as image": (content(image(encoded(b"hello, I am a text"))), 400, "unsupported_image_format", URL),
    "truncated header": (content(image(encoded(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"))), 400, "invalid_image", URL),
    "truncated image": (content(image(encoded(jpeg_half()))), 400, "invalid_image", URL),
    "plain string as image_url": (content({"type": "image_url", "image_url": "ftp://x"}), 400, "invalid_image_url", "messages[0].content[0].image_url"),
}  # fmt: skip


@table(("request_body", "status", "code", "param"), CASES.values(), ids=CASES.keys())
def test_bad_input_is_refused_by_name(
    request_body: Any, status: int, code: str, param: str | None, gateway: scripted.Gateway
) -> None:
    before = gateway.metric("saccade_slots_in_use")
    gateway.worker.requests.clear()
    answer = gateway.ask("POST", "/v1/chat/completions", request_body)
    error = answer.json["error"]
    assert (answer.status, error["code"], error["param"]) == (status, code, param), error
    assert error["message"].endswith(".")
    assert error["type"] == "invalid_request_error"
    assert not gateway.worker.requests
    assert gateway.chat().status == 200
    assert gateway.metric("saccade_slots_in_use") == before


@table("name", LATER)
def test_parameters_that_come_later_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedParameter) as error:
        parse_chat(json.dumps(body(**{name: "something"})).encode())
    assert error.value.param == name
    for harmless in (None, *LATER[name]):
        parse_chat(json.dumps(body(**{name: harmless})).encode())


@table("name", sorted(LATER.keys() - set(TokenizeRequest.__struct_fields__)))
def test_tokenize_refuses_later_parameters_too(name: str) -> None:
    with pytest.raises(UnsupportedParameter) as error:
        parse_tokenize(json.dumps(body(**{name: "something"})).encode())
    assert error.value.param == name


@pytest.mark.parametrize(
    ("name", "spelling"), [("format", "`response_format`"), ("options", "`max_tokens`"), ("images", "image_url")]
)
def test_other_spellings_get_the_openai_spelling(name: str, spelling: str) -> None:
    with pytest.raises(UnsupportedParameter) as error:
        parse_chat(json.dumps(body(**{name: ["something"]})).encode())
    assert spelling in error.value.message


HARMLESS = {
    "user": "me", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "a",
    "prompt_cache_key": "a", "prompt_cache_retention": "24h", "parallel_tool_calls": True, "n": 1,
    "frequency_penalty": 0.0, "logit_bias": {}, "prediction": {"type": "content", "content": "hello"},
    "response_format": {"type": "text"}, "tool_choice": "none", "verbosity": "medium", "reasoning_effort": "none",
    "enable_thinking": False, "chat_template_kwargs": {"enable_thinking": False},
}  # fmt: skip


def test_parameters_without_effect_cause_no_warning(gateway: scripted.Gateway) -> None:
    answer = gateway.chat(**HARMLESS)
    assert answer.status == 200, answer.body
    assert "x-saccade-warning" not in answer.headers


def test_openai_client_gets_no_warning(gateway: scripted.Gateway) -> None:
    sent = gateway.client().chat.completions.with_raw_response.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        store=False,
        parallel_tool_calls=True,
        safety_identifier="a",
    )
    assert sent.status_code == 200
    assert "x-saccade-warning" not in sent.headers
    assert list(sent.parse())  # an answer that nobody reads keeps its socket


@pytest.mark.parametrize(
    "fields",
    [{}, {"stream": True}, {"temperature": 0.5, "min_tokens": 5, "max_tokens": 4}],
    ids=["whole", "stream", "error"],
)
def test_unknown_parameters_are_named(fields: dict[str, Any], gateway: scripted.Gateway) -> None:
    answer = gateway.chat(max_token=5, colour="red", **fields)
    assert answer.status == (400 if "min_tokens" in fields else 200)
    warning = "unknown parameters ignored: max_token (did you mean max_tokens?), colour"
    assert answer.headers["x-saccade-warning"] == warning


def test_the_log_names_unknown_parameters(gateway: scripted.Gateway) -> None:
    asked = body(max_token=5, **{"a\nb": "my secret"})
    gateway.ask("POST", "/v1/chat/completions", asked, X_Request_Id="warned")
    line = gateway.line("warned")
    assert line["is_warned"] is True
    assert "secret" not in str(line)


def test_tokenize_and_detokenize_name_unknown_parameters(gateway: scripted.Gateway) -> None:
    tokenized = gateway.ask("POST", "/tokenize", body(temperature=0.5, promt="a"))
    assert tokenized.status == 200
    assert tokenized.headers["x-saccade-warning"] == "unknown parameters ignored: promt (did you mean prompt?)"
    detokenized = gateway.ask("POST", "/detokenize", {"tokens": [5], "token": 5})
    assert detokenized.status == 200
    assert detokenized.headers["x-saccade-warning"] == "unknown parameters ignored: token (did you mean tokens?)"


def test_strict_parameters(tiny_qwen3_vl: Path) -> None:
    with scripted.running(tiny_qwen3_vl, GatewayConfig(strict_parameters=True)) as gateway:
        refused = gateway.chat(max_token=5)
        assert (refused.status, refused.json["error"]["code"]) == (400, "unsupported_parameter")
        assert refused.json["error"]["param"] == "max_token"
        assert "did you mean `max_tokens`?" in refused.json["error"]["message"]
        for path in ("/tokenize", "/detokenize"):
            asked = {"prompt": "a", "tokens": [5], "colour": 1}
            assert gateway.ask("POST", path, asked).json["error"]["code"] == "unsupported_parameter"
        gateway.worker.script = [TokenDelta("r", [gateway.eos], FinishReason.STOP)]
        assert gateway.chat(**HARMLESS).status == 200


EXCEEDED = (
    r"This model's maximum context length is 4096 tokens\. However, you requested (at least )?(\d+) tokens "
    r"\((at least )?(\d+) in the messages, (\d+) in the completion\)\. "
    r"Please reduce the length of the messages or completion\."
)


@table(
    ("text", "fields", "completion"),
    [("hi", {"max_tokens": 5000}, 5000), ("hi", {"max_completion_tokens": 4096}, 4096), ("word " * 9000, {}, 1),
     ("word " * 9000, {"max_tokens": 7}, 7), ("word " * 200_000, {}, 1)],
)  # fmt: skip
def test_the_context_error_is_in_the_words_that_clients_look_for(
    text: str, fields: dict[str, Any], completion: int, gateway: scripted.Gateway
) -> None:
    error = gateway.chat(text, **fields).json["error"]
    found = re.fullmatch(EXCEEDED, error["message"])
    assert error["code"] == "context_length_exceeded"
    assert found, error["message"]
    assert (found[1] is not None) == (found[3] is not None) == (len(text) == 1_000_000)
    assert int(found[2]) == int(found[4]) + completion > 4096
    assert int(found[5]) == completion


def test_messages_say_nothing_about_libraries(gateway: scripted.Gateway) -> None:
    for request_body, *_ in CASES.values():
        answer = gateway.ask("POST", "/v1/chat/completions", request_body).body.decode()
        assert not any(word in answer for word in ("msgspec", "Traceback", "$.", "pybase64", "PIL", "0x", "jinja"))
