"""Responses over HTTP, from the worker's tokens to items and events, as an OpenAI client sees them."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import scripted
from chats import data_url, random_image
from openai.types.responses import Response

from saccade.errors import WorkerFailed
from saccade.gateway.config import GatewayConfig
from saccade.gateway.parameters import MAX_VALUE_BYTES
from saccade.protocol.output import Failure, FinishReason, TokenDelta

TOOL: Any = {"type": "function", "name": "zoom", "parameters": {"type": "object", "properties": {}}, "strict": False}
CALL = '{"name": "zoom", "arguments": {"box": [1, 2.5], "text": "<b> 你"}}'


@pytest.fixture
def client(gateway: scripted.Gateway) -> Iterator[openai.OpenAI]:
    with gateway.client() as made:
        yield made


def answer(client: openai.OpenAI, stream: bool, **fields: Any) -> Response:
    """Return the answer, which the client puts together from events where it is streamed."""
    asked: Any = {"model": "tiny", "input": "hi", **fields}
    if not stream:
        return client.responses.create(**asked)
    with client.responses.stream(**asked) as events:
        seen: list[Any] = list(events)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    final: Response = seen[-1].response
    return final


def prompt_of(gateway: scripted.Gateway) -> str:
    return str(gateway.tokenizer.decode(gateway.worker.requests[-1].token_ids))


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_text_and_calls(stream: bool, gateway: scripted.Gateway, client: openai.OpenAI) -> None:
    call = ("<tool_call>", CALL, "</tool_call>")
    num_tokens = gateway.answer_pieces("<think>", "Hm", "</think>", "I look.", *call, *call, num_cached_tokens=3)
    response = answer(client, stream, tools=[TOOL], metadata={"a": "b"}, instructions="Be brief.")
    reasoning, message, *calls = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert (reasoning.content[0].text, reasoning.summary) == ("Hm", [])
    assert (message.type, response.output_text) == ("message", "I look.")
    for found in calls:
        assert found.type == "function_call"
        assert (found.name, json.loads(found.arguments)) == ("zoom", {"box": [1, 2.5], "text": "<b> 你"})
    assert len({item.id for item in response.output}) == 4
    assert (response.status, response.error, response.metadata) == ("completed", None, {"a": "b"})
    assert (response.instructions, response.tools[0].name) == ("Be brief.", "zoom")  # type: ignore[union-attr]
    usage = response.usage
    assert usage is not None
    assert usage.input_tokens == len(gateway.worker.requests[-1].token_ids)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens) == (3, num_tokens)
    assert usage.output_tokens_details.reasoning_tokens > 0


def test_streamed_and_whole_answers_agree(gateway: scripted.Gateway, client: openai.OpenAI) -> None:
    gateway.answer_pieces("<think>", "Hm", "</think>", "one ", "two", finish=FinishReason.LENGTH)
    own = ("id", "created_at")
    whole, streamed = (answer(client, stream).model_dump(exclude=set(own)) for stream in (False, True))
    for given in (whole, streamed):
        for item in given["output"]:
            del item["id"]
            for part in item["content"]:
                # What the client's parser of streams adds.
                part.pop("parsed", None)
    assert {key: streamed[key] for key in whole} == whole
    assert whole["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in whole["output"]] == ["completed", "incomplete"]


def test_events_are_in_the_order_of_the_reference(gateway: scripted.Gateway) -> None:
    gateway.answer_pieces("I look.")
    events = gateway.ask("POST", "/v1/responses", {"model": "tiny", "input": "hi", "stream": True})
    kinds = [block.split("\n")[0].removeprefix("event: ") for block in events.body.decode().strip().split("\n\n")]
    assert [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_items_are_in_the_order_of_the_answer(stream: bool, gateway: scripted.Gateway, client: openai.OpenAI) -> None:
    call = ("<tool_call>", CALL, "</tool_call>")
    gateway.answer_pieces(*call, "one", *call, "two")
    for send in (lambda: None, gateway.send_at_once):
        send()
        items = answer(client, stream, tools=[TOOL]).output
        assert [item.type for item in items] == ["function_call", "message"] * 2
        assert [item.content[0].text for item in items if item.type == "message"] == ["one", "two"]  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_conversations_are_continued(stream: bool, gateway: scripted.Gateway, client: openai.OpenAI) -> None:
    call = ("<tool_call>", CALL, "</tool_call>")
    gateway.answer_pieces("I look.", *call)
    first = answer(client, stream, tools=[TOOL], instructions="Be brief.")
    gateway.answer_pieces("Red.")
    result: Any = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "it is red"}  # type: ignore[union-attr]
    answer(client, stream, tools=[TOOL], input=[result], previous_response_id=first.id)
    kept = prompt_of(gateway)
    assert "I look." in kept
    assert "it is red" in kept
    assert "Be brief." not in kept  # instructions hold for one request
    # The same as if the client had sent everything.
    everything: Any = [{"role": "user", "content": "hi"}, *(item.to_dict() for item in first.output), result]
    answer(client, stream, tools=[TOOL], input=everything, store=False)
    assert prompt_of(gateway) == kept


def test_kept_responses_are_read_and_forgotten(gateway: scripted.Gateway, client: openai.OpenAI) -> None:
    first = answer(client, stream=False)
    assert client.responses.retrieve(first.id).model_dump() == first.model_dump()
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.retrieve(first.id)
    assert missing.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError) as lost:
        answer(client, stream=False, previous_response_id=first.id)
    assert (lost.value.param, lost.value.code) == ("previous_response_id", "previous_response_not_found")
    unstored = answer(client, stream=False, store=False)
    assert unstored.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_a_gateway_may_keep_nothing(tiny_qwen3_vl: Any) -> None:
    with scripted.running(tiny_qwen3_vl, GatewayConfig(response_store_bytes=0)) as gateway, gateway.client() as client:
        gateway.worker.script = [TokenDelta("r", [300], FinishReason.LENGTH)]
        assert answer(client, stream=False).to_dict()["store"] is False
        with pytest.raises(openai.BadRequestError, match="keeps no responses"):
            answer(client, stream=False, previous_response_id="resp_1")


def test_errors_name_the_clients_fields(client: openai.OpenAI) -> None:
    bad: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,!"}]}]
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model="tiny", instructions="Be brief.", input=bad)
    assert (raised.value.code, raised.value.param) == ("invalid_base64", "input[0].content[0].image_url")


def test_a_large_image_is_read(client: openai.OpenAI) -> None:
    """A body's other values are short, and `input` is none of them."""
    url = data_url(random_image(700, 500, 1))
    assert len(url) > MAX_VALUE_BYTES
    large: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
    used = answer(client, stream=False, input=large).usage
    assert used is not None
    assert used.input_tokens > 300


def test_answers_are_of_the_clients_types(gateway: scripted.Gateway) -> None:
    gateway.answer_pieces("I look.")
    Response.model_validate_json(gateway.ask("POST", "/v1/responses", {"model": "tiny", "input": "hi"}).body)


def test_failed_response_is_not_stored(tiny_qwen3_vl: Any) -> None:
    with (
        scripted.running(tiny_qwen3_vl, GatewayConfig(response_store_bytes=200_000)) as gateway,
        gateway.client() as client,
    ):
        gateway.worker.script = [TokenDelta("r", [300], FinishReason.LENGTH)]
        first = answer(client, stream=False)
        for stream in (False, True, False, True):
            with pytest.raises(openai.BadRequestError, match="context"):
                client.responses.create(model="tiny", input="hi " * 20_000, stream=stream)
        with pytest.raises(openai.NotFoundError, match="nope"):
            client.responses.create(model="nope", input="hi " * 20_000)
        assert client.responses.retrieve(first.id).id == first.id


def test_a_conversation_too_large_for_the_store_is_answered_and_not_kept(tiny_qwen3_vl: Any) -> None:
    config = GatewayConfig(response_store_bytes=16_000)
    with scripted.running(tiny_qwen3_vl, config) as gateway, gateway.client() as client:
        gateway.worker.script = [TokenDelta("r", [300], FinishReason.LENGTH)]
        assert client.responses.create(model="tiny", input="hi").to_dict()["store"] is True
        asked = {"model": "tiny", "input": "hi " * 1000, "colour": 1}
        large = gateway.ask("POST", "/v1/responses", asked)
        assert large.json["store"] is False
        assert "colour; not stored: " in large.headers["x-saccade-warning"]
        unstored = gateway.ask("POST", "/v1/responses", {"model": "tiny", "input": "hi " * 1000, "store": False})
        assert "x-saccade-warning" not in unstored.headers
        # The answer makes it too large.
        gateway.worker.script = [TokenDelta("r", [300] * 4000, FinishReason.LENGTH)]
        for stream in (False, True):
            long = answer(client, stream)
            assert long.to_dict()["store"] is False
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(long.id)


def test_ids_of_calls_are_bounded(gateway: scripted.Gateway) -> None:
    for item in (
        {"type": "function_call", "call_id": "a" * 1025, "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a" * 1025, "output": "x"},
    ):
        answer = gateway.ask("POST", "/v1/responses", {"model": "tiny", "input": [item]})
        assert (answer.status, answer.json["error"]["param"]) == (400, "input[0].call_id")


def test_a_failure_after_silence_begins_as_every_stream(tiny_qwen3_vl: Any) -> None:
    with scripted.running(tiny_qwen3_vl, scripted.PINGS_OFTEN) as gateway:
        gateway.worker.script = [0.2, WorkerFailed("The worker stopped.")]
        with gateway.client() as client, client.responses.stream(model="tiny", input="hi") as stream:
            events: list[Any] = list(stream)
    assert [event.type for event in events] == [
        "response.created", "response.in_progress", "error", "response.failed"
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == [0, 1, 2, 3]


def test_a_failure_is_the_last_event(gateway: scripted.Gateway, client: openai.OpenAI) -> None:
    failure = Failure(WorkerFailed.code, "The engine failed.")
    gateway.worker.script = [TokenDelta("r", [300]), TokenDelta("r", [], FinishReason.ERROR, failure=failure)]
    events = list(client.responses.create(model="tiny", input="hi", stream=True))
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    failed = events[-1]
    assert failed.type == "response.failed"
    assert failed.response.error is not None
    assert failed.response.error.message == "The engine failed."
