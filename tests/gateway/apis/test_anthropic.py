"""Messages over HTTP, from the worker's tokens to blocks and events, as an Anthropic client sees them."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
import scripted
from chats import anthropic_client
from tables import table

from saccade.errors import WorkerFailed
from saccade.gateway.config import GatewayConfig
from saccade.protocol.output import Failure, FinishReason, TokenDelta

TOOL: Any = {"name": "zoom", "description": "Zooms.", "input_schema": {"type": "object", "properties": {}}}
CALL = '{"name": "zoom", "arguments": {"box": [1, 2.5], "text": "<b> 你"}}'
ASKED: Any = {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def client(gateway: scripted.Gateway) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(f"http://127.0.0.1:{gateway.port}") as made:
        yield made


def answer(client: anthropic.Anthropic, stream: bool, **fields: Any) -> anthropic.types.Message:
    """Return the answer, which the client puts together from events where it is streamed."""
    if not stream:
        return client.messages.create(**ASKED, **fields)
    with client.messages.stream(**ASKED, **fields) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_text_and_calls(stream: bool, gateway: scripted.Gateway, client: anthropic.Anthropic) -> None:
    call = ("<tool_call>", CALL, "</tool_call>")
    num_tokens = gateway.answer_pieces("<think>", "Hm", "</think>", "I look.", *call, *call, num_cached_tokens=3)
    message = answer(client, stream, tools=[TOOL])
    thinking, text, *calls = message.content
    assert (thinking.type, text.type) == ("thinking", "text")
    assert (thinking.thinking, text.text) == ("Hm", "I look.")  # type: ignore[union-attr]
    assert [(block.type, block.name, block.input) for block in calls] == [  # type: ignore[union-attr]
        ("tool_use", "zoom", {"box": [1, 2.5], "text": "<b> 你"})
    ] * 2
    assert len({block.id for block in calls}) == 2  # type: ignore[union-attr]
    assert (message.stop_reason, message.stop_sequence, message.role) == ("tool_use", None, "assistant")
    assert message.id.startswith("msg_")
    prompt = gateway.worker.requests[-1].token_ids
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (
        len(prompt) - 3, 3, num_tokens
    )  # fmt: skip


@table("stream", [False, True])
@table(
    ("finish", "fields", "expected"),
    [
        (FinishReason.STOP, {}, ("one two", "end_turn", None)),
        (FinishReason.LENGTH, {}, ("one two", "max_tokens", None)),
        (FinishReason.STOP, {"stop_sequences": ["x", " tw"]}, ("one", "stop_sequence", " tw")),
    ],
)
def test_stop_reasons(
    stream: bool,
    finish: FinishReason,
    fields: dict[str, Any],
    expected: tuple[str, str, str | None],
    gateway: scripted.Gateway,
    client: anthropic.Anthropic,
) -> None:
    gateway.answer_pieces("one two", finish=finish)
    message = answer(client, stream, **fields)
    (block,) = message.content
    assert block.type == "text"
    assert (block.text, message.stop_reason, message.stop_sequence) == expected


def test_events_are_in_the_order_of_the_reference(gateway: scripted.Gateway) -> None:
    gateway.answer_pieces("<think>", "Hm", "</think>", "I look.")
    events = gateway.ask("POST", "/v1/messages", {**ASKED, "stream": True})
    assert events.headers["content-type"].startswith("text/event-stream")
    blocks = [line.split("\ndata: ")[0] for line in events.body.decode().strip().split("\n\n")]
    names = [name.removeprefix("event: ") for name in blocks]
    assert [name for name, before in zip(names, ["", *names], strict=False) if name != before] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_stop") * 2,
        "message_delta",
        "message_stop",
    ]


def test_an_empty_answer_has_no_block(gateway: scripted.Gateway, client: anthropic.Anthropic) -> None:
    gateway.worker.script = [TokenDelta("r", [gateway.eos], FinishReason.STOP)]
    for stream in (False, True):
        message = answer(client, stream)
        assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "end_turn", 1)


def test_streamed_and_whole_answers_agree(gateway: scripted.Gateway, client: anthropic.Anthropic) -> None:
    gateway.answer_pieces("I ", "look.", "<tool_call>", CALL, "</tool_call>", "Done.")
    whole, streamed = (answer(client, stream, tools=[TOOL]) for stream in (False, True))
    assert [block.type for block in whole.content] == ["text", "tool_use", "text"]
    # A worker may send many tokens at a time.
    gateway.send_at_once()
    others = [streamed, *(answer(client, stream, tools=[TOOL]) for stream in (False, True))]
    for message in others:
        assert [block.to_dict() | {"id": ""} for block in message.content] == [
            block.to_dict() | {"id": ""} for block in whole.content
        ]


def test_clients_see_the_requests_id(client: anthropic.Anthropic) -> None:
    assert answer(client, stream=False)._request_id


def test_errors_have_anthropics_form(gateway: scripted.Gateway, client: anthropic.Anthropic) -> None:
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "!"}}
    with pytest.raises(anthropic.BadRequestError) as raised:
        client.messages.create(
            model="tiny", max_tokens=1, system="Be brief.", messages=[{"role": "user", "content": [block]}]  # type: ignore[list-item]
        )  # fmt: skip
    error = raised.value.body["error"]  # type: ignore[index]
    assert error["type"] == "invalid_request_error"
    assert (error["code"], error["param"]) == ("invalid_base64", "messages[0].content[0].source.data")
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**{**ASKED, "model": "other"})
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert gateway.ask("GET", "/v1/messages").json["type"] == "error"


def test_a_failure_is_the_last_event(gateway: scripted.Gateway, client: anthropic.Anthropic) -> None:
    failure = Failure(WorkerFailed.code, "The engine failed.")
    gateway.worker.script = [TokenDelta("r", [300]), TokenDelta("r", [], FinishReason.ERROR, failure=failure)]
    with pytest.raises(anthropic.APIStatusError, match="The engine failed"):
        answer(client, stream=True)
    events = gateway.ask("POST", "/v1/messages", {**ASKED, "stream": True}).body.decode().strip().split("\n\n")
    assert events[-1].startswith('event: error\ndata: {"type":"error","error":{"type":"api_error"')


def test_tokens_are_counted(gateway: scripted.Gateway, client: anthropic.Anthropic) -> None:
    client.messages.create(**ASKED, tools=[TOOL])
    counted = client.messages.count_tokens(model="tiny", messages=ASKED["messages"], tools=[TOOL])
    assert counted.input_tokens == len(gateway.worker.requests[-1].token_ids)
    assert len(gateway.worker.requests) == 1
    with pytest.raises(anthropic.BadRequestError, match=r"`system\[0\].text` is missing"):
        client.messages.count_tokens(model="tiny", messages=ASKED["messages"], system=[{"type": "text"}])  # type: ignore[typeddict-item]


WEB_SEARCH: Any = {"type": "web_search_20250305", "name": "web_search"}
SCHEMA: Any = {"type": "json_schema", "schema": {"type": "nothing"}}
STRICT: Any = {**TOOL, "strict": True, "input_schema": {"type": "object", "properties": {"a": {"not": {}}}}}


@table(
    "fields",
    [
        {"output_config": {"format": SCHEMA}},
        {"tools": [STRICT]},
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}},
        {"tools": [WEB_SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
        {"system": [{"type": "text"}]},
        {"messages": [{"role": "user", "content": "word " * scripted.MAX_MODEL_LEN}]},
    ],
)
def test_counting_refuses_what_messages_refuses(fields: Any, gateway: scripted.Gateway) -> None:
    answers = [gateway.ask("POST", f"/v1/messages{path}", {**ASKED, **fields}) for path in ("", "/count_tokens")]
    assert [answer.status for answer in answers] == [400, 400]
    assert answers[0].json["error"] == answers[1].json["error"]


def test_an_answer_gets_the_room_that_the_context_has(gateway: scripted.Gateway, client: anthropic.Anthropic) -> None:
    """Agents ask for as many tokens as Anthropic's models have room for; clients of chats match the refusal."""
    gateway.answer_pieces("one two", finish=FinishReason.LENGTH)
    message = client.messages.create(**{**ASKED, "max_tokens": 10**6, "stop_sequences": ["x"]}, timeout=60)
    assert message.stop_reason == "max_tokens"
    sent = gateway.worker.requests[-1]
    assert sent.sampling.max_tokens == scripted.MAX_MODEL_LEN - len(sent.token_ids)
    client.messages.create(**{**ASKED, "max_tokens": 7})
    assert gateway.worker.requests[-1].sampling.max_tokens == 7
    chat = gateway.ask("POST", "/v1/chat/completions", {**ASKED, "max_tokens": 10**6})
    assert (chat.status, chat.json["error"]["code"]) == (400, "context_length_exceeded")


def test_warnings_of_all_steps_are_in_one_header(gateway: scripted.Gateway) -> None:
    gateway.answer_pieces("one")
    loose = {**TOOL, "name": "loose", "input_schema": STRICT["input_schema"]}
    fields = {"tools": [WEB_SEARCH, loose, {**TOOL, "strict": True}], "colour": "red", "speed": "fast"}
    for path in ("", "/count_tokens"):
        warning = gateway.ask("POST", f"/v1/messages{path}", {**ASKED, **fields}).headers["x-saccade-warning"]
        unknown, left_out, dropped = warning.split("; ")
        assert unknown == "unknown parameters ignored: colour"
        assert left_out == "tools of Anthropic's own types left out: web_search_20250305"
        assert dropped.startswith("keywords that the grammar does not enforce: tools[1].input_schema.")


def test_models_have_the_form_of_the_client(gateway: scripted.Gateway, client: anthropic.Anthropic) -> None:
    page = client.models.list()
    (model,) = page
    assert (page.has_more, page.first_id, page.last_id) == (False, "tiny", "tiny")
    assert (model.type, model.id, model.display_name) == ("model", "tiny", "tiny")
    assert model.max_input_tokens == scripted.MAX_MODEL_LEN
    assert client.models.retrieve("tiny") == model
    assert model.created_at.timestamp() == gateway.ask("GET", "/v1/models").json["data"][0]["created"]
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("other")


def test_key_is_read_from_either_header(gateway: scripted.Gateway, tiny_qwen3_vl: Any) -> None:
    with scripted.running(tiny_qwen3_vl, GatewayConfig(api_keys=("one",))) as guarded:
        guarded.worker.script = [TokenDelta("r", [300], FinishReason.LENGTH)]
        url = f"http://127.0.0.1:{guarded.port}"
        for options in ({"api_key": "one"}, {"api_key": None, "auth_token": "one"}):
            with anthropic_client(url, **options) as known:
                assert known.messages.create(**ASKED).content
        with anthropic_client(url, api_key="two") as unknown, pytest.raises(anthropic.AuthenticationError):
            unknown.messages.create(**ASKED)
        assert guarded.ask("GET", "/v1/models", X_Api_Key="one").status == 401
