"""Answers, streamed and whole: shape, usage, stop strings, aborts, errors on the way."""

import asyncio
import contextlib
import http.client
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import scripted
import structlog
from chats import data_url, openai_messages, random_image
from tables import table
from waiting import wait_until

from saccade.errors import QueueFull, WorkerFailed
from saccade.gateway.admission import Admission
from saccade.gateway.config import GatewayConfig
from saccade.models import family_of, load_layout
from saccade.protocol.media import Span
from saccade.protocol.output import Failure, FinishReason, TokenDelta
from saccade.tokenization.tokenizer_json import JsonTokenizer

STOP = FinishReason.STOP


@pytest.fixture
def ids_of(tiny_qwen3_vl: Path) -> Callable[[str], list[int]]:
    return JsonTokenizer((tiny_qwen3_vl / "tokenizer.json").read_bytes(), {}).encode_text


def deltas(*steps: list[int], finish: FinishReason = STOP, cached: int = 0) -> list[scripted.Step]:
    first, *others = steps
    script = [TokenDelta("r", first, None, cached), *(TokenDelta("r", ids) for ids in others)]
    return [*script[:-1], TokenDelta("r", steps[-1], finish, script[-1].num_cached_tokens)]


def test_whole_answer(gateway: scripted.Gateway, ids_of: Callable[[str], list[int]]) -> None:
    ids = ids_of("Héllo 你好")
    gateway.worker.script = deltas(*([i] for i in ids), [gateway.eos], cached=8)
    answer = gateway.chat().json
    num_prompt_tokens = len(gateway.worker.requests[0].token_ids)
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Héllo 你好", "refusal": None},
            "finish_reason": "stop",
            "logprobs": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": len(ids) + 1,
        "total_tokens": num_prompt_tokens + len(ids) + 1,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@pytest.mark.parametrize("include_usage", [True, False, None])
def test_streamed_answer(
    include_usage: bool | None, gateway: scripted.Gateway, ids_of: Callable[[str], list[int]]
) -> None:
    gateway.worker.script = deltas(*([i] for i in ids_of("你好 a")), [gateway.eos])
    options = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}
    answer = gateway.chat(stream=True, **options)
    *chunks, done = answer.events
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")
    assert done == "[DONE]"
    usage = chunks.pop() if include_usage else None
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "你好 a"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all(("usage" in chunk) == bool(include_usage) for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    if usage is not None:
        assert usage["choices"] == []
        assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert usage["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_chunks_of_plain_text_are_the_chunks_of_any_text(
    gateway: scripted.Gateway, ids_of: Callable[[str], list[int]]
) -> None:
    """They are written another way than chunks that have more than text, here the ids of their tokens."""
    script = deltas(*([i] for i in ids_of('a "b"\\ \n你{"content":""}')), [gateway.eos])

    def chunks(**asked: bool) -> list[Any]:
        gateway.worker.script = script
        *events, _ = gateway.chat(stream=True, n=2, stream_options={"include_usage": True}, **asked).events
        for event in events:
            del event["id"], event["created"]
            event.pop("prompt_token_ids", None)
            for choice in event["choices"]:
                choice.pop("token_ids", None)
        return events

    plain = chunks()
    assert plain == chunks(return_token_ids=True)
    assert len(plain) >= len(script)


def test_every_chunk_has_the_usage_so_far_if_asked(gateway: scripted.Gateway) -> None:
    num_tokens = gateway.answer_pieces("<think>", "why", "</think>", "a", "b")
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, _ = gateway.chat(stream=True, stream_options=options).events
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert len(set(counts)) > 2
    assert counts[-1] == num_tokens
    prompt = {event["usage"]["prompt_tokens"] for event in events}
    assert len(prompt) == 1
    body = {"model": "tiny", "prompt": "a", "stream": True, "stream_options": options}
    *events, _ = gateway.ask("POST", "/v1/completions", body).events
    assert [event["usage"]["completion_tokens"] for event in events][-1] == num_tokens
    *events, _ = gateway.chat(stream=True, stream_options={"continuous_usage_stats": True}).events
    assert all("usage" not in event for event in events)


@pytest.mark.parametrize("stream", [True, False])
def test_stop_string_over_tokens_ends_the_answer_and_the_work(
    stream: bool, gateway: scripted.Gateway, ids_of: Callable[[str], list[int]]
) -> None:
    pieces = [[i] for character in "ab<stop>never" for i in ids_of(character)]
    gateway.worker.script = [*(TokenDelta("r", ids) for ids in pieces), 30.0]
    answer = gateway.chat(stop=["<stop>"], **scripted.streamed(stream))
    if stream:
        text = "".join(c["delta"].get("content", "") for e in answer.events[:-2] for c in e["choices"])
        reason, usage = answer.events[-3]["choices"][0]["finish_reason"], answer.events[-2]["usage"]
    else:
        text, reason = answer.json["choices"][0]["message"]["content"], answer.json["choices"][0]["finish_reason"]
        usage = answer.json["usage"]
    assert (text, reason, usage["completion_tokens"]) == ("ab", "stop", len("ab<stop>"))
    wait_until(lambda: gateway.worker.num_aborted == 1)


def test_length_and_unfinished_characters(gateway: scripted.Gateway, ids_of: Callable[[str], list[int]]) -> None:
    ids = ids_of("\U0001f9ff")
    assert len(ids) > 1
    gateway.worker.script = deltas(ids[:-1], finish=FinishReason.LENGTH)
    choice = gateway.chat().json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("\ufffd", "length")


@pytest.mark.parametrize("stream", [True, False])
def test_disconnected_client_aborts_its_request(stream: bool, gateway: scripted.Gateway) -> None:
    gateway.worker.script = [TokenDelta("r", [300]), TokenDelta("r", [301]), 30.0]
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=10)
    body = {"model": "tiny", "messages": openai_messages("hi", random_image(40, 40, 1)), "stream": stream}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    wait_until(lambda: len(gateway.worker.requests) == 1)
    assert gateway.worker.num_aborted == 0
    connection.close()
    wait_until(lambda: gateway.worker.num_aborted == 1)
    wait_until(lambda: gateway.metric("saccade_requests_in_flight") == 0)
    assert gateway.metric("saccade_slots_in_use") == 0


@table("stream", [True, False])
@table(
    ("fault", "status", "code"),
    [
        (WorkerFailed("The worker stopped."), 500, "worker_failed"),
        (QueueFull("Too much is waiting."), 429, "queue_full"),
        (TokenDelta("r", [], FinishReason.ERROR, failure=Failure("worker_failed", "It broke.")), 500, "worker_failed"),
        (TokenDelta("r", [], FinishReason.ABORT), 500, "worker_failed"),
        (ZeroDivisionError("secret"), 500, "internal_error"),
    ],
)
def test_error_before_the_first_text_has_a_status(
    stream: bool, fault: Any, status: int, code: str, gateway: scripted.Gateway
) -> None:
    gateway.worker.script = [fault]
    answer = gateway.chat(stream=stream)
    assert (answer.status, answer.json["error"]["code"]) == (status, code)
    assert answer.headers.get("retry-after") == ("1" if status == 429 else None)
    assert answer.headers.get("x-should-retry") == ("false" if code == "internal_error" else None)
    assert b"secret" not in answer.body


@pytest.mark.parametrize("fault", [WorkerFailed("The worker stopped."), ZeroDivisionError("secret")])
def test_error_in_a_stream_is_its_last_event(fault: Exception, gateway: scripted.Gateway) -> None:
    gateway.worker.script = [TokenDelta("r", [300]), fault]
    answer = gateway.chat(stream=True)
    assert answer.status == 200
    assert set(answer.events[-1]["error"]) == {"message", "type", "param", "code"}
    assert b"[DONE]" not in answer.body
    assert b"secret" not in answer.body
    with pytest.raises(openai.APIError):
        list(gateway.client().chat.completions.create(model="tiny", messages=openai_messages("hi"), stream=True))


def test_silence_is_filled_with_comments(tiny_qwen3_vl: Path) -> None:
    with scripted.running(tiny_qwen3_vl, scripted.PINGS_OFTEN) as gateway:
        gateway.worker.script = [0.3, *deltas([300], [gateway.eos])]
        answer = gateway.chat(stream=True)
        assert answer.body.startswith(b": ping\n\n: ping\n\n")
        assert answer.events[-1] == "[DONE]"
        gateway.worker.script = [*deltas([300], [301])[:1], 0.3, *deltas([gateway.eos])]
        head, _, tail = gateway.chat(stream=True).body.partition(b": ping\n\n: ping\n\n")
        assert (head.startswith(b"data: {"), tail.endswith(b"data: [DONE]\n\n")) == (True, True)
        gateway.worker.script = [0.2, WorkerFailed("The worker stopped.")]
        late = gateway.chat(stream=True)
        assert (late.status, late.events[-1]["error"]["code"]) == (200, "worker_failed")


def test_openai_sdk(gateway: scripted.Gateway) -> None:
    client = gateway.client()
    messages = openai_messages("What", random_image(64, 64, 1), "and", random_image(96, 64, 2), system="Be brief.")
    whole = client.chat.completions.create(model="tiny", messages=messages)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    assert whole._request_id is not None
    with client.chat.completions.stream(model="tiny", messages=messages) as stream:
        assert stream.get_final_completion().choices[0].message.content == whole.choices[0].message.content
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


@table(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
        ("/tokenize", {"prompt": "hi"}),
    ],
)
def test_the_only_model_needs_no_name(path: str, fields: dict[str, Any], gateway: scripted.Gateway) -> None:
    answer = gateway.ask("POST", path, fields)
    assert (answer.status, answer.json.get("model", "tiny")) == (200, "tiny")


@table(
    ("path", "ending"),
    [
        ("/v1/chat/completion", "; did you mean /v1/chat/completions?"),
        ("/chat/completions", "; did you mean /v1/chat/completions?"),
        ("/v1/v1/responses", "; did you mean /v1/responses?"),
        ("/models", "; did you mean /v1/models?"),
        (
            "/api/chat",
            ": Ollama's API is not served. Send chats to /v1/chat/completions, and list the models by GET /v1/models.",
        ),
        ("/v1/embeddings", "."),
        ("/" + "v1/chat/completions" * 50, "."),
    ],
)
def test_a_near_route_is_named(path: str, ending: str, gateway: scripted.Gateway) -> None:
    answer = gateway.ask("POST", path, {})
    assert (answer.status, answer.json["error"]["message"]) == (404, f"There is no {path} here{ending}")


def test_sampling_parameters_and_defaults(gateway: scripted.Gateway) -> None:
    gateway.chat()
    gateway.chat(max_tokens=7, temperature=0.5, top_p=0.9, top_k=40, seed=-3, ignore_eos=True)
    gateway.chat(max_tokens=7, max_completion_tokens=5, top_k=-1)
    default, given, other = (request.sampling for request in gateway.worker.requests)
    num_prompt_tokens = len(gateway.worker.requests[0].token_ids)
    assert (default.temperature, default.top_p, default.top_k, default.seed) == (0.0, 1.0, 0, None)
    assert default.max_tokens == scripted.MAX_MODEL_LEN - num_prompt_tokens
    assert default.stop_token_ids[0] == gateway.eos
    assert len(default.stop_token_ids) == 2
    assert (given.temperature, given.top_p, given.top_k, given.seed) == (0.5, 0.9, 40, -3)
    assert (given.max_tokens, given.stop_token_ids) == (7, ())
    assert (other.max_tokens, other.top_k) == (5, 0)


def test_images_lie_at_their_spans(gateway: scripted.Gateway, tiny_qwen3_vl: Path) -> None:  # F1
    config = json.loads((tiny_qwen3_vl / "config.json").read_text())
    layout = load_layout(family_of(config))(
        config, json.loads((tiny_qwen3_vl / "preprocessor_config.json").read_text())
    )
    images = [random_image(64, 96, 1), random_image(300, 200, 2), random_image(64, 96, 1)]
    typed = "<|vision_start|><|image_pad|><|vision_end|>"
    parts = ["a", images[0], typed, images[1], "b", images[2]]
    assert gateway.client().chat.completions.create(model="tiny", messages=openai_messages(*parts)).choices
    request = gateway.worker.requests[0]
    counts = [layout.image(*image.size, layout.settings).num_tokens for image in images]
    spans = [item.spans[0] for item in request.media]
    assert [span.length for span in spans] == counts
    assert all(isinstance(span, Span) for span in spans)
    placeholder = config["image_token_id"]
    placed = [position for span in spans for position in range(span.start, span.start + span.length)]
    assert [i for i, token_id in enumerate(request.token_ids) if token_id == placeholder] == placed
    first, second, third = request.media
    assert first.content_hash == third.content_hash != second.content_hash
    assert None is not first.slot == third.slot != second.slot is not None
    assert gateway.worker.pixels[0] == gateway.worker.pixels[2] != gateway.worker.pixels[1]


def test_same_image_is_decoded_once(gateway: scripted.Gateway) -> None:
    before = gateway.metric("saccade_stage_seconds_count", stage="decode")
    url = data_url(random_image(50, 60, 9))
    parts = [{"type": "image_url", "image_url": url}] * 3
    assert gateway.chat([*parts, {"type": "text", "text": "?"}]).status == 200
    assert gateway.metric("saccade_stage_seconds_count", stage="decode") == before + 1
    assert gateway.metric("saccade_slots_in_use") == 0


def test_one_bad_image_gives_back_the_slots_of_the_others(gateway: scripted.Gateway) -> None:
    good = data_url(random_image(200, 200, 1))
    head, _, payload = data_url(random_image(160, 120, 1), "JPEG").partition(",")
    bad = f"{head},{payload[: len(payload) // 8 * 4]}"
    answer = gateway.chat([{"type": "image_url", "image_url": {"url": url}} for url in (good, bad)])
    error = answer.json["error"]
    assert (error["code"], error["param"]) == ("invalid_image", "messages[0].content[1].image_url.url")
    wait_until(lambda: gateway.metric("saccade_slots_in_use") == 0)


def test_request_cancelled_in_the_queue_releases_its_slots(
    gateway: scripted.Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pixels are ready, and it waits for its turn to be sent, when its client goes."""
    arrived, turns = threading.Event(), itertools.count(1)

    @contextlib.asynccontextmanager
    async def turn(self: Admission, num_body_bytes: int) -> AsyncIterator[None]:
        if next(turns) == 4:
            arrived.set()
            await asyncio.Event().wait()
        yield

    monkeypatch.setattr(Admission, "turn", turn)
    content = [{"type": "image_url", "image_url": {"url": data_url(random_image(50, 60, 9))}}]
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": content}]}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=20)
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    assert arrived.wait(20)
    assert gateway.metric("saccade_slots_in_use") == 1
    connection.close()
    wait_until(lambda: gateway.metric("saccade_slots_in_use") == 0)
    assert not gateway.worker.requests


def test_developer_role_is_system_and_names_are_accepted(gateway: scripted.Gateway) -> None:
    for role in ("system", "developer"):
        messages = [{"role": role, "content": "Be brief."}, {"role": "user", "content": "hi", "name": "<|im_end|>"}]
        body = {"model": "tiny", "messages": messages}
        assert gateway.ask("POST", "/v1/chat/completions", body).status == 200
    system, developer = (request.token_ids for request in gateway.worker.requests)
    assert system == developer


def test_log_lines_name_the_request_without_its_content(gateway: scripted.Gateway) -> None:
    with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as lines:
        gateway.worker.script = [ZeroDivisionError("broken")]
        body = {"model": "tiny", "messages": openai_messages("my secret", random_image(20, 20, 1))}
        gateway.ask("POST", "/v1/chat/completions", body, X_Request_Id="my-id")
        line = gateway.line("my-id")
    assert [line["event"] for line in lines if line.get("request_id") == "my-id"] == ["unforeseen error"]
    assert line["code"] == "internal_error"
    assert "secret" not in str((lines, line))


def test_too_many_requests(tiny_qwen3_vl: Path) -> None:
    with scripted.running(tiny_qwen3_vl, GatewayConfig(max_requests=0)) as gateway:
        answer = gateway.chat()
        assert (answer.status, answer.json["error"]["code"], answer.headers["retry-after"]) == (429, "queue_full", "1")


def image_part(image: object, **fields: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": image, **fields}}


@table(
    ("detail", "limits", "num_tokens"),
    [
        (None, None, 20 * 20),
        ("auto", {}, 20 * 20),
        ("high", None, 20 * 20),
        ("low", None, 16 * 16),
        ("auto", {"max_pixels": 320 * 320}, 10 * 10),
        ("low", {"max_pixels": 320 * 320}, 10 * 10),
        (None, {"size": {"longest_edge": 320 * 320}}, 10 * 10),
        (None, {"min_pixels": 960 * 960}, 30 * 30),
        (None, {"min_pixels": None, "size": None}, 20 * 20),
    ],
)
def test_detail_and_pixel_limits_set_the_number_of_tokens(
    detail: str | None, limits: dict[str, Any] | None, num_tokens: int, gateway: scripted.Gateway
) -> None:
    part = image_part(data_url(random_image(640, 640, 1)), **({"detail": detail} if detail else {}))
    assert gateway.chat([part], mm_processor_kwargs=limits).status == 200
    assert gateway.worker.requests[-1].media[0].spans[0].length == num_tokens


def test_one_image_seen_in_two_ways_is_two(gateway: scripted.Gateway) -> None:  # F3
    url = data_url(random_image(640, 640, 1))
    assert gateway.chat([image_part(url, detail="low"), image_part(url, detail="high"), image_part(url)]).status == 200
    low, high, auto = gateway.worker.requests[0].media
    assert low.content_hash != high.content_hash == auto.content_hash


@pytest.mark.parametrize("stream", [True, False])
def test_answer_continues_the_last_message(
    stream: bool, gateway: scripted.Gateway, ids_of: Callable[[str], list[int]]
) -> None:
    gateway.worker.script = deltas(ids_of(" sunny,"), [*ids_of(" I think"), gateway.eos])
    messages = [{"role": "user", "content": "How is it?"}, {"role": "assistant", "content": "It is"}]
    fields = {"model": "tiny", "messages": messages, "stream": stream, "continue_final_message": True}
    answer = gateway.ask("POST", "/v1/chat/completions", fields)
    assert gateway.worker.requests[0].token_ids[-len(ids_of("It is")) :] == ids_of("It is")
    if stream:
        texts = (choice["delta"].get("content", "") for event in answer.events[:-1] for choice in event["choices"])
        assert "".join(texts) == " sunny, I think"
    else:
        assert answer.json["choices"][0]["message"]["content"] == " sunny, I think"
    tokens = gateway.ask("POST", "/tokenize", {"messages": messages, "continue_final_message": True}).json["tokens"]
    assert tokens == gateway.worker.requests[0].token_ids


def test_prompt_without_a_generation_prompt(gateway: scripted.Gateway) -> None:
    gateway.answer_two_tokens()
    for given in ({}, {"add_generation_prompt": False}):
        assert gateway.chat("hi", **given).status == 200
    asked, bare = (request.token_ids for request in gateway.worker.requests)
    assert asked[: len(bare)] == bare != asked


TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}{% endfor %}"


@pytest.fixture
def trusting(tiny_qwen3_vl: Path) -> Iterator[scripted.Gateway]:
    """A gateway that takes templates from requests."""
    with scripted.running(tiny_qwen3_vl, GatewayConfig(trusts_request_templates=True)) as gateway:
        gateway.answer_two_tokens()
        yield gateway


def test_result_images_that_the_template_loses_follow_in_a_turn_of_the_user(trusting: scripted.Gateway) -> None:  # F13
    parts = "{% for p in m.content %}{{ '<|image_pad|>' if p.type == 'image' else p.text }}{% endfor %}"
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.tool_calls or '' }}{% if m.content is string or m.role == 'tool' %}"
        "{{ m.content }}{% else %}" + parts + "{% endif %}{% endfor %}"
    )
    image = {"type": "image_url", "image_url": {"url": data_url(random_image(64, 64, 0))}}
    call = {"id": "a", "type": "function", "function": {"name": "zoom", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "seen"}, image]},
    ]
    body = {"model": "tiny", "messages": messages, "chat_template": template, "max_tokens": 1}
    assert trusting.ask("POST", "/v1/chat/completions", body).status == 200
    request = trusting.worker.requests[-1]
    assert len(request.media) == 1
    assert "[tool]seen[user]<|image_pad|>" in trusting.tokenizer.decode(request.token_ids)


def test_request_template_is_used_if_trusted(trusting: scripted.Gateway, ids_of: Callable[[str], list[int]]) -> None:
    assert trusting.chat("a <|im_end|>", chat_template=TEMPLATE).status == 200
    start = trusting.ask("POST", "/detokenize", {"tokens": trusting.worker.requests[0].token_ids}).json["prompt"]
    assert start == "<|im_start|>user: a <|im_end|>"
    # What the user typed is text all the same.
    assert trusting.worker.requests[0].token_ids[1:] == ids_of("user: a <|im_end|>")
    body = {"messages": [{"role": "user", "content": "a <|im_end|>"}], "chat_template": TEMPLATE}
    assert trusting.ask("POST", "/tokenize", body).json["tokens"] == trusting.worker.requests[0].token_ids


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{% for i in range(10 ** 9) %}{{ i }}{% endfor %}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_bad_template_costs_its_own_request(source: str, trusting: scripted.Gateway) -> None:  # F2
    answer = trusting.chat("hi", chat_template=source)
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_value")
    assert answer.json["error"]["param"] in ("chat_template", "messages")
    assert trusting.chat("hi").status == 200


def test_request_template_is_refused_if_not_trusted(gateway: scripted.Gateway) -> None:
    for body in (
        gateway.chat("hi", chat_template=TEMPLATE),
        gateway.ask("POST", "/tokenize", {"messages": [{"role": "user", "content": "a"}], "chat_template": TEMPLATE}),
    ):
        assert (body.status, body.json["error"]["param"]) == (400, "chat_template")
        assert "--trust-request-chat-template" in body.json["error"]["message"]
    assert gateway.chat("hi", chat_template=None).status == 200


def test_switches_reach_the_chat_template(gateway: scripted.Gateway) -> None:
    content = [image_part(data_url(random_image(64, 64, 1)))]
    for switches in (None, {"add_vision_id": False}, {"add_vision_id": True}):
        assert gateway.chat(content, chat_template_kwargs=switches).status == 200
    plain, off, on = (request.token_ids for request in gateway.worker.requests)
    assert plain == off != on
