"""No text of a client is in the access log, the log, the board, the metrics or the traces; only its x-request-id is."""

import base64
import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import collector
import pytest
import scripted
import structlog
from test_admin import Port, opened
from waiting import wait_until

from saccade.gateway.config import GatewayConfig
from saccade.protocol.output import TokenDelta
from saccade.tracing.tracer import TraceSettings

pytestmark = pytest.mark.ci

TEXT = "zqsecretqz"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
REFUSES = "{{ raise_exception('no: ' ~ messages[0].content) }}"
FAILS = "{{ messages[0].content.no_such.attribute }}"


def said(content: Any = TEXT) -> list[Any]:
    return [{"role": "user", "content": content}]


def tool(name: str = "f", parameters: Any = None, **fields: Any) -> Any:
    function = {"name": name, "parameters": parameters or {"type": "object", "properties": {}}}
    return {"type": "function", "function": {**function, **fields}}


def schema(value: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": value, "strict": True}}


def image(url: str) -> list[Any]:
    return said([{"type": "image_url", "image_url": {"url": url}}])


OBJECT = {"type": "object", "properties": {TEXT: {"type": "nothing"}}}
UNENFORCED = {"type": "object", "properties": {TEXT: {"not": {"type": "string"}}}}
NO_REFERENCE = {"type": "object", "properties": {"a": {"$ref": f"#/$defs/{TEXT}"}}}

CHATS: list[dict[str, Any]] = [
    {"model": TEXT},
    {"messages": said([{"type": TEXT}])},
    {"messages": [{"role": TEXT, "content": "hi"}]},
    {"messages": said(), "chat_template": REFUSES},
    {"messages": said(), "chat_template": FAILS},
    {"chat_template": f"{{% {TEXT} %}}"},
    {"chat_template": f"{{{{ {TEXT}() }}}}"},
    {"chat_template_kwargs": {TEXT: True}},
    {"chat_template_kwargs": {TEXT: [1]}},
    {"chat_template_kwargs": {"enable_thinking": {TEXT: 1}}},
    {"mm_processor_kwargs": {TEXT: 1}},
    {"media_io_kwargs": {TEXT: {}}},
    {"media_io_kwargs": {"video": {TEXT: 1}}},
    {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": TEXT}}},
    {"tools": [tool()], "tool_choice": TEXT},
    {"tools": [tool(TEXT), tool(TEXT)]},
    {"tools": [tool(f"{TEXT} !")]},
    {"tools": [tool(parameters={"type": TEXT})]},
    {"tools": [tool(parameters=OBJECT)], "tool_choice": "required"},
    {"tools": [tool(parameters=UNENFORCED, strict=True)], "tool_choice": "required"},
    {"tools": [{"type": TEXT}]},
    {"tools": [{"type": "function", "function": {"name": "f", TEXT: 1, "description": 1}}]},
    {"response_format": schema(OBJECT)},
    {"response_format": schema(UNENFORCED)},
    {"response_format": schema(NO_REFERENCE)},
    {"response_format": schema({"type": "object", "required": [TEXT], "properties": {TEXT: False}})},
    {"response_format": schema({"type": "string", "pattern": f"({TEXT}"})},
    {"response_format": {"type": TEXT}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": TEXT}}},
    {"guided_regex": f"({TEXT}"},
    {"guided_grammar": f"start: {TEXT}"},
    {"guided_choice": [TEXT, 1]},
    {"structured_outputs": {TEXT: 1}},
    {"structural_tag": {TEXT: 1}},
    {"stop": [TEXT, 1]},
    {"stop": {TEXT: 1}},
    {"user": {TEXT: 1}},
    {"logit_bias": {TEXT: 1}},
    {"reasoning_effort": TEXT},
    {"temperature": TEXT},
    {"stream_options": {TEXT: 1}},
    {"metadata": {TEXT: TEXT}, TEXT: TEXT},
    {"messages": [{"role": "user", "content": "hi", TEXT: TEXT}]},
    {"messages": [{"role": "user", "content": "hi", "name": TEXT}], "user": TEXT},
    {"messages": [{"role": "tool", "tool_call_id": TEXT, "content": "hi"}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"id": TEXT, "type": TEXT, "function": {"name": TEXT}}]}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": TEXT, "arguments": TEXT}}]}]},
    {"messages": image(f"http://{TEXT}.invalid/{TEXT}.png?{TEXT}")},
    {"messages": image(f"{TEXT}://a")},
    {"messages": image(f"/{TEXT}")},
    {"messages": image(f"file:///{TEXT}")},
    {"messages": image(f"data:image/{TEXT};base64,{TEXT}")},
    {"messages": image(f"data:image/png;base64,{base64.b64encode(TEXT.encode()).decode()}")},
    {"messages": said([{"type": "image_url", "image_url": {"url": "data:,", "detail": TEXT}}])},
    {"messages": said([{"type": "image_url", "image_url": {"url": "data:,", "max_pixels": TEXT}}])},
    {"messages": said([{"type": "video_url", "video_url": {"url": f"http://{TEXT}.invalid/"}}])},
    {"messages": said([{"type": "file", "file": {"file_id": TEXT}}])},
    {"messages": said([{"type": "file", "file": {"filename": TEXT, "file_data": f"data:{TEXT};base64,AAAA"}}])},
    {"messages": said([{"type": "file", "file": {"filename": TEXT, "file_data": "data:text/plain;base64,/w=="}}])},
    {"messages": said(f"<|image_pad|> {TEXT}")},
]

OTHERS: list[tuple[str, str, Any]] = [
    ("POST", COMPLETIONS, {"model": TEXT, "prompt": "a"}),
    ("POST", COMPLETIONS, {"model": "tiny", "prompt": [TEXT, 1]}),
    ("POST", COMPLETIONS, {"model": "tiny", "prompt": TEXT, "suffix": TEXT}),
    ("POST", COMPLETIONS, {"model": "tiny", "prompt": "a", "guided_json": OBJECT}),
    ("POST", RESPONSES, {"model": TEXT, "input": "a"}),
    ("POST", RESPONSES, {"model": "tiny", "input": [{"type": TEXT}]}),
    ("POST", RESPONSES, {"model": "tiny", "input": TEXT, "previous_response_id": TEXT}),
    ("POST", RESPONSES, {"model": "tiny", "input": TEXT, "tools": [{"type": TEXT}], "include": [TEXT]}),
    ("POST", RESPONSES, {"model": "tiny", "input": "a", "text": {"format": {"type": TEXT}}}),
    (
        "POST",
        RESPONSES,
        {"model": "tiny", "input": "a", "text": {"format": {"type": "json_schema", "name": TEXT, "schema": OBJECT}}},
    ),
    ("POST", MESSAGES, {"model": TEXT, "max_tokens": 2, "messages": said("a")}),
    ("POST", MESSAGES, {"model": "tiny", "max_tokens": 2, "messages": said([{"type": TEXT}])}),
    ("POST", MESSAGES, {"model": "tiny", "max_tokens": 2, "messages": said("a"), "tool_choice": {"type": TEXT}}),
    (
        "POST",
        MESSAGES,
        {"model": "tiny", "max_tokens": 2, "messages": said("a"), "tools": [{"type": TEXT, "name": TEXT}]},
    ),
    (
        "POST",
        MESSAGES,
        {
            "model": "tiny",
            "max_tokens": 2,
            "messages": said([{"type": "tool_result", "tool_use_id": TEXT, "content": {TEXT: 1}}]),
        },
    ),
    (
        "POST",
        MESSAGES,
        {"model": "tiny", "max_tokens": 2, "messages": said("a"), TEXT: 1, "metadata": {"user_id": TEXT}},
    ),
    ("POST", "/tokenize", {"model": "tiny", TEXT: 1}),
    ("POST", "/tokenize", {"model": TEXT, "prompt": TEXT}),
    ("POST", "/detokenize", {"model": "tiny", "tokens": [TEXT]}),
    ("POST", "/invocations", {TEXT: TEXT}),
    ("GET", f"/v1/models/{TEXT}", None),
    ("GET", f"/v1/responses/{TEXT}", None),
    ("DELETE", f"/v1/responses/{TEXT}", None),
    ("GET", f"/v1/files/{TEXT}", None),
    ("GET", f"/v1/files/{TEXT}/content", None),
    ("DELETE", f"/v1/files/{TEXT}", None),
    ("GET", f"/v1/files?purpose={TEXT}&order={TEXT}&limit={TEXT}&after={TEXT}", None),
    ("GET", f"/{TEXT}", None),
    ("GET", f"/live?{TEXT}={TEXT}", None),
    ("POST", f"/live?{TEXT}", {}),
    ("POST", CHAT, f"{TEXT}".encode()),
    ("POST", CHAT, f'{{"{TEXT}": {TEXT}}}'.encode()),
    ("POST", CHAT, f'{{"model": "tiny", "messages": [{TEXT}]}}'.encode()),
]

HEADERS: list[dict[str, str]] = [
    {"Content-Type": TEXT},
    {"Content-Type": f"multipart/form-data; boundary={TEXT}"},
    {"Content-Encoding": TEXT},
    {"Accept": TEXT, "User-Agent": TEXT, "Referer": TEXT, "Cookie": TEXT, "X-Forwarded-For": TEXT},
    {"traceparent": f"00-{TEXT}-1-01", "tracestate": TEXT, "baggage": TEXT},
    {"Origin": f"http://{TEXT}.example"},
    {"Authorization": f"Bearer {TEXT}"},
    {"Authorization": TEXT},
    {"X-Request-Id": f"{TEXT} with blanks is not taken"},
]


@dataclass(frozen=True)
class Attacked:
    """A gateway that got every text, and what it wrote and answered."""

    answers: list[scripted.Answer]
    places: dict[str, str]


def ask_all(gateway: scripted.Gateway) -> Iterator[scripted.Answer]:
    gateway.answer_two_tokens()
    chat = {"model": "tiny", "messages": said("hi"), "max_tokens": 2}
    for fields in CHATS:
        yield gateway.ask("POST", CHAT, chat | fields)
    for method, path, body in OTHERS:
        yield gateway.ask(method, path, body)
    for headers in HEADERS:
        yield gateway.ask("POST", CHAT, chat, **headers)
    form = f'--b\r\nContent-Disposition: form-data; name="{TEXT}"; filename="{TEXT}"\r\n\r\n{TEXT}\r\n--b--\r\n'
    yield gateway.ask("POST", "/v1/files", form.encode(), Content_Type="multipart/form-data; boundary=b")
    gateway.worker.script = [RuntimeError(TEXT)]
    yield gateway.chat()
    yield gateway.chat(stream=True)
    gateway.worker.script = [TokenDelta("r", [300]), KeyError(TEXT)]
    yield gateway.chat(stream=True)
    gateway.answer_two_tokens()
    yield gateway.chat(TEXT, user=TEXT, stop=[TEXT])


@pytest.fixture(scope="module")
def attacked(tiny_qwen3_vl: Path) -> Iterator[Attacked]:
    with ExitStack() as stack:
        spans = stack.enter_context(collector.collecting())
        config = GatewayConfig(trusts_request_templates=True, tracing=TraceSettings(endpoint=spans.endpoint))
        gateway = stack.enter_context(scripted.running(tiny_qwen3_vl, config))
        port: Port = stack.enter_context(opened(gateway))
        lines = stack.enter_context(structlog.testing.capture_logs())
        handler = Kept()
        stack.callback(logging.getLogger().removeHandler, handler)
        logging.getLogger().addHandler(handler)
        answers = list(ask_all(gateway))
        wait_until(lambda: spans.num_spans >= len(answers))
        gateway.log.writer.flush()
        access = Path(f"/proc/self/fd/{gateway.log_file.fileno()}").read_text()
        status, board = port.ask("GET", "/board", Authorization="Bearer admin")
        assert status == 200
        # An exception is written by traceback_of(), which has a test of its own.
        written = [{name: value for name, value in line.items() if name != "exc_info"} for line in lines]
        yield Attacked(
            answers,
            {
                "access log": access,
                "board": board.decode(),
                "metrics": gateway.ask("GET", "/metrics").body.decode(),
                "spans": repr(list(spans.spans)),
                "log": repr(written),
                "other log lines": "\n".join(handler.lines),
            },
        )


class Kept(logging.Handler):
    """Keeps the lines of Python's logging."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.getMessage()} {record.exc_text or ''}")


@pytest.mark.ci
def test_no_text_of_a_client_is_where_an_operator_looks(attacked: Attacked) -> None:
    found = {name: text.partition(TEXT)[0][-200:] for name, text in attacked.places.items() if TEXT in text.lower()}
    assert found == {}


def test_the_texts_reach_what_could_repeat_them(attacked: Attacked) -> None:
    statuses = [answer.status for answer in attacked.answers]
    assert sum(400 <= status < 500 for status in statuses) > 80
    assert statuses.count(500) >= 2
    repeated = [answer for answer in attacked.answers if TEXT in answer.body.decode() or TEXT in str(answer.headers)]
    assert len(repeated) > 15
    lines = [json.loads(line) for line in attacked.places["access log"].splitlines()]
    refused = [line for line in lines if line.get("code")]
    assert sum(bool(line.get("field")) for line in refused) > 50
    assert sum(bool(line.get("is_warned")) for line in lines) >= 3
