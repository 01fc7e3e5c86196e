"""Answers of several samples: each has its own text, reason and end. # B9"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scripted
from chats import openai_messages, random_image
from tables import table

from saccade.errors import WorkerFailed
from saccade.protocol.output import Failure, FinishReason, SampleTimes, TokenDelta
from saccade.tokenization.tokenizer_json import JsonTokenizer

STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT
TIMES = SampleTimes(0.25, 0.5, 2.0, 0.125)


@pytest.fixture
def ids_of(tiny_qwen3_vl: Path) -> Callable[[str], list[int]]:
    return JsonTokenizer((tiny_qwen3_vl / "tokenizer.json").read_bytes(), {}).encode_text


def delta(index: int, ids: list[int], reason: FinishReason | None = None, **fields: Any) -> TokenDelta:
    return TokenDelta("r", ids, reason, index=index, **fields)


def choices(answer: scripted.Answer) -> dict[int, tuple[str, str | None]]:
    """Text and finish reason of each choice, streamed or not."""
    found: dict[int, tuple[str, str | None]] = {}
    if answer.headers["content-type"] == "application/json":
        return {c["index"]: (c["message"]["content"], c["finish_reason"]) for c in answer.json["choices"]}
    for event in answer.events:
        for choice in event["choices"] if event != "[DONE]" else ():
            text, reason = found.get(choice["index"], ("", None))
            assert reason is None  # nothing follows the end of a choice
            found[choice["index"]] = (text + choice["delta"].get("content", ""), choice["finish_reason"])
    return found


@pytest.mark.parametrize("stream", [True, False])
def test_each_sample_is_a_choice(stream: bool, gateway: scripted.Gateway, ids_of: Callable[[str], list[int]]) -> None:
    # The first bytes of a character in one sample, then those of another in the other.
    one, other = ids_of("\u4f60a"), ids_of("\u597db")
    gateway.worker.script = [
        delta(1, other[:1], num_cached_tokens=8),
        delta(0, one[:1], num_cached_tokens=8),
        delta(1, other[1:]),
        delta(0, one[1:], LENGTH),
        delta(2, [gateway.eos], STOP),
        delta(1, [gateway.eos], STOP),
    ]
    answer = gateway.chat(n=3, **scripted.streamed(stream))
    assert choices(answer) == {0: ("\u4f60a", "length"), 1: ("\u597db", "stop"), 2: ("", "stop")}
    (request,) = gateway.worker.requests
    usage = answer.events[-2]["usage"] if stream else answer.json["usage"]
    assert request.num_samples == 3
    assert usage["prompt_tokens"] == len(request.token_ids)
    assert usage["completion_tokens"] == len(one) + len(other) + 2
    assert usage["prompt_tokens_details"]["cached_tokens"] == 8
    assert (gateway.worker.aborted, gateway.worker.num_aborted) == ([], 0)
    if stream:
        roles = [event["choices"][0] for event in answer.events[:3]]
        assert [(choice["index"], choice["delta"]) for choice in roles] == [
            (index, {"role": "assistant", "content": ""}) for index in range(3)
        ]


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_its_own_sample_only(
    stream: bool, gateway: scripted.Gateway, ids_of: Callable[[str], list[int]]
) -> None:
    gateway.worker.script = [
        delta(1, ids_of("ab<stop>never")),
        delta(1, ids_of("late")),
        delta(1, [], ABORT, times=TIMES),
        delta(0, ids_of("cd"), LENGTH),
    ]
    answer = gateway.chat(n=2, stop="<stop>", stream=stream)
    assert choices(answer) == {0: ("cd", "length"), 1: ("ab", "stop")}
    assert ([index for _, index in gateway.worker.aborted], gateway.worker.num_aborted) == ([1], 0)


def test_the_last_sample_that_a_stop_string_ends_takes_the_request_along(
    gateway: scripted.Gateway, ids_of: Callable[[str], list[int]]
) -> None:
    gateway.worker.script = [delta(0, [300], LENGTH), delta(1, ids_of("a<stop>")), 30.0]
    assert choices(gateway.chat(n=2, stop="<stop>"))[1] == ("a", "stop")
    assert gateway.worker.aborted == []


@table("stream", [True, False])
@table(
    ("first", "fault", "status"),
    [
        ([], delta(1, [], FinishReason.ERROR, failure=Failure("queue_full", "Too much.")), 429),
        ([delta(0, [])], WorkerFailed("The worker stopped."), 500),
        ([], delta(1, [], ABORT), 500),
        ([], delta(2, [300]), 500),
        ([], delta(-1, [300]), 500),
        ([delta(0, [300], LENGTH)], WorkerFailed("The worker stopped."), 200),
    ],
)
def test_error_of_one_sample_is_the_requests(
    stream: bool, first: list[scripted.Step], fault: Any, status: int, gateway: scripted.Gateway
) -> None:
    gateway.worker.script = [*first, fault]
    answer = gateway.chat(n=2, stream=stream)
    assert answer.status == (status if stream or status != 200 else 500)
    error = answer.events[-1]["error"] if answer.status == 200 else answer.json["error"]
    assert error["code"] == ("queue_full" if status == 429 else "worker_failed")
    assert b"[DONE]" not in answer.body


def test_openai_sdk_gets_several_choices_for_an_image(gateway: scripted.Gateway) -> None:
    gateway.worker.script = [delta(1, [300], STOP), delta(0, [301], STOP)]
    messages = openai_messages(random_image(64, 64, 1), "What is it?")
    whole = gateway.client().chat.completions.create(model="tiny", messages=messages, n=2)
    assert [choice.index for choice in whole.choices] == [0, 1]
    with gateway.client().chat.completions.stream(model="tiny", messages=messages, n=2) as stream:
        final = stream.get_final_completion()
    assert [c.message.content for c in final.choices] == [c.message.content for c in whole.choices]
    assert [len(request.media) for request in gateway.worker.requests] == [1, 1]


@pytest.mark.parametrize(
    ("fields", "ids", "shown"),
    [
        ({}, "a<stop>b", "a"),
        ({"include_stop_str_in_output": True}, "a<stop>b", "a<stop>"),
        # A stop string that is complete within min_tokens ends nothing; one that begins there may.
        ({"min_tokens": 7}, "a<stop>b<stop>c", "a<stop>b"),
        ({"min_tokens": 6}, "a<stop>b<stop>c", "a"),
    ],
)
def test_text_of_stop_strings(
    fields: dict[str, Any], ids: str, shown: str, gateway: scripted.Gateway, ids_of: Callable[[str], list[int]]
) -> None:
    token_ids = [token_id for character in ids for token_id in ids_of(character)]
    gateway.worker.script = [*(delta(0, [token_id]) for token_id in token_ids), delta(0, [], LENGTH)]
    assert choices(gateway.chat(stop=["<stop>"], **fields))[0][0] == shown


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "a"),
        ({"skip_special_tokens": True}, "a"),
        ({"skip_special_tokens": False}, "<|vision_end|>a"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "<|vision_end|>a<|im_end|>"),
        ({"include_stop_str_in_output": True}, "a"),
    ],
)
def test_text_of_special_tokens(
    fields: dict[str, Any], shown: str, gateway: scripted.Gateway, tiny_qwen3_vl: Path
) -> None:
    tokenizer = JsonTokenizer((tiny_qwen3_vl / "tokenizer.json").read_bytes(), {})
    end = tokenizer.special_tokens["<|im_end|>"]
    ids = [tokenizer.special_tokens["<|vision_end|>"], *tokenizer.encode_text("a"), end]
    gateway.worker.script = [delta(0, ids, STOP)]
    assert choices(gateway.chat(**fields, stop_token_ids=[end]))[0] == (shown, "stop")


@pytest.mark.parametrize("shows_it", [True, False])
def test_text_of_a_stop_token_that_is_plain(
    shows_it: bool, gateway: scripted.Gateway, ids_of: Callable[[str], list[int]]
) -> None:
    gateway.worker.script = [delta(0, [*ids_of("a"), *ids_of("b")], STOP)]
    answer = gateway.chat(stop_token_ids=ids_of("b"), include_stop_str_in_output=shows_it)
    assert choices(answer)[0] == ("ab" if shows_it else "a", "stop")
    assert answer.json["usage"]["completion_tokens"] == 2


STAGES_OF_VLLM = ("queue", "prefill", "decode", "inference")


def test_metrics_of_samples(gateway: scripted.Gateway) -> None:  # F10
    def value(name: str, **labels: str) -> float:
        return gateway.metric(name, **labels)

    def values() -> list[float]:
        stages = [value("saccade_engine_stage_seconds_sum", stage=s) for s in ("queue", "encode", "prefill", "decode")]
        times = [value(f"vllm:request_{s}_time_seconds_sum", model_name="tiny") for s in STAGES_OF_VLLM]
        reasons = [
            value("vllm:request_success_total", model_name="tiny", finished_reason=reason)
            for reason in ("stop", "length", "abort", "error")
        ]
        sizes = [
            value(f"vllm:request_{kind}_tokens_sum", model_name="tiny")
            for kind in ("prompt", "generation", "max_num_generation")
        ]
        counts = ["vllm:request_time_per_output_token_seconds", "vllm:time_to_first_token_seconds"]
        return [*stages, *times, *reasons, *sizes, *(value(f"{name}_count", model_name="tiny") for name in counts)]

    before = values()
    routed = value("saccade_stage_seconds_count", stage="route")
    gateway.worker.script = [
        delta(0, [300]),
        delta(1, [301, gateway.eos], STOP, times=TIMES),
        delta(0, [302, 303], LENGTH, times=TIMES),
    ]
    num_prompt_tokens = gateway.chat(n=2).json["usage"]["prompt_tokens"]
    gateway.worker.script = [delta(0, []), WorkerFailed("The worker stopped.")]
    gateway.chat()
    grown = [after - value for after, value in zip(values(), before, strict=True)]
    assert grown[:4] == [0.5, 0.25, 1.0, 4.0]
    assert grown[4:8] == [0.5, 1.0, 4.0, 5.0]
    assert grown[8:12] == [1, 1, 0, 1]
    assert grown[12:] == [2 * num_prompt_tokens, 5, 3, 2, 1]
    assert value("saccade_stage_seconds_count", stage="route") == routed + 2


def test_labels_of_metrics_hold_nothing_of_a_user(gateway: scripted.Gateway) -> None:
    gateway.chat("my secret", cache_salt="my other secret", user="my secret name")
    assert "secret" not in gateway.ask("GET", "/metrics").body.decode()


def test_token_ids(gateway: scripted.Gateway, ids_of: Callable[[str], list[int]]) -> None:
    ids = ids_of("ab<stop>")
    script = [*(delta(0, [token_id]) for token_id in ids), delta(0, ids_of("never")), 30.0]
    gateway.worker.script = script
    whole = gateway.chat(return_token_ids=True, stop="<stop>").json
    assert whole["prompt_token_ids"] == gateway.worker.requests[0].token_ids
    assert whole["choices"][0]["token_ids"] == ids
    gateway.worker.script = script
    events = gateway.chat(return_token_ids=True, stop="<stop>", stream=True).events[:-1]
    assert [event.get("prompt_token_ids") for event in events] == [
        whole["prompt_token_ids"],
        *[None] * (len(events) - 1),
    ]
    assert "token_ids" not in events[0]["choices"][0]
    assert [token_id for event in events[1:] for token_id in event["choices"][0]["token_ids"]] == ids
    assert "token_ids" not in json.dumps(gateway.chat(stop="<stop>").json)
