"""Completions over HTTP, from the worker's tokens to texts, as an openai client sees them."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import scripted
from tables import table

from saccade.errors import UnsupportedParameter, WorkerFailed
from saccade.protocol.output import Failure, FinishReason, TokenDelta, TokenLogprob
from saccade.tokenization.tokenizer_json import JsonTokenizer

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
Ids = Callable[[str], list[int]]


@pytest.fixture
def ids_of(tiny_qwen3_vl: Path) -> Ids:
    return JsonTokenizer((tiny_qwen3_vl / "tokenizer.json").read_bytes(), {}).encode_text


def complete(gateway: scripted.Gateway, prompt: Any = "Once", **fields: Any) -> scripted.Answer:
    return gateway.ask("POST", "/v1/completions", {"model": "tiny", "prompt": prompt, **fields})


def texts(answer: scripted.Answer) -> dict[int, tuple[str, str | None]]:
    """Text and finish reason of each choice, streamed or not."""
    if answer.headers["content-type"] == "application/json":
        return {choice["index"]: (choice["text"], choice["finish_reason"]) for choice in answer.json["choices"]}
    assert answer.events[-1] == "[DONE]"
    found: dict[int, tuple[str, str | None]] = {}
    for choice in (choice for event in answer.events[:-1] for choice in event["choices"]):
        text, reason = found.get(choice["index"], ("", None))
        assert reason is None  # nothing follows the end of a choice
        found[choice["index"]] = (text + choice["text"], choice["finish_reason"])
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_text_is_continued(stream: bool, gateway: scripted.Gateway, ids_of: Ids) -> None:
    gateway.worker.script = [TokenDelta("r", ids_of(" upon")), TokenDelta("r", [*ids_of(" a time"), gateway.eos], STOP)]
    answer = complete(gateway, stream=stream)
    assert texts(answer) == {0: (" upon a time", "stop")}
    head = answer.events[0] if stream else answer.json
    assert (head["object"], head["model"], head["id"][:5]) == ("text_completion", "tiny", "cmpl-")
    (request,) = gateway.worker.requests
    assert request.token_ids == ids_of("Once")
    assert request.sampling.max_tokens == 16


def test_an_openai_client(gateway: scripted.Gateway, ids_of: Ids) -> None:
    gateway.worker.script = [TokenDelta("r", ids_of(" upon")), TokenDelta("r", ids_of(" a"), LENGTH)]
    with gateway.client() as client:
        whole = client.completions.create(model="tiny", prompt="Once", max_tokens=3)
        streamed = list(
            client.completions.create(model="tiny", prompt="Once", stream=True, stream_options={"include_usage": True})
        )
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (" upon a", "length")
    assert "".join(choice.text for chunk in streamed for choice in chunk.choices) == " upon a"
    assert streamed[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(ids_of(" upon")) + len(ids_of(" a"))
    assert all(chunk.usage is None for chunk in streamed[:-1])


@pytest.mark.parametrize("prompt", ["say <|im_end|>", "<think>", "<|image_pad|>"])
def test_typed_special_tokens_stay_text(prompt: str, gateway: scripted.Gateway) -> None:  # F2
    gateway.answer_two_tokens()
    assert complete(gateway, prompt).status == 200
    special = gateway.application.model_registry.get("tiny").tokenizer.special_tokens.values()
    assert not set(special) & set(gateway.worker.requests[0].token_ids)


def test_token_ids_are_used_unchanged(gateway: scripted.Gateway) -> None:
    gateway.answer_two_tokens()
    start = gateway.application.model_registry.get("tiny").tokenizer.special_tokens["<|im_start|>"]
    assert complete(gateway, [start, 5, 6]).status == 200
    assert gateway.worker.requests[0].token_ids == [start, 5, 6]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [([5, 10**6], "prompt"), ([[5], [6, 10**6]], "prompt[1]"), (["a", ""], "prompt[1]"), ([[]], "prompt[0]")],
)
def test_prompts_that_the_model_cannot_read(prompt: Any, param: str, gateway: scripted.Gateway) -> None:
    answer = complete(gateway, prompt)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
    assert not gateway.worker.requests


def test_placeholders_of_images_are_refused(gateway: scripted.Gateway) -> None:
    placeholder = gateway.application.model_registry.get("tiny").placeholder_token_id
    answer = complete(gateway, [[5], [5, placeholder]])
    assert (answer.status, answer.json["error"]["param"]) == (400, "prompt[1]")
    assert "images" in answer.json["error"]["message"]
    assert not gateway.worker.requests


@pytest.mark.parametrize("prompt", [["a", "b " * 5000], [[5], [5] * 5000]])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_does_not_fit(stream: bool, prompt: Any, gateway: scripted.Gateway) -> None:
    answer = complete(gateway, prompt, stream=stream)
    assert (answer.status, answer.json["error"]["code"]) == (400, "context_length_exceeded")
    assert answer.json["error"]["param"] == "prompt[1]"


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_that_do_not_fit(stream: bool, gateway: scripted.Gateway) -> None:
    answer = complete(gateway, [[5], [5] * 100], stream=stream, max_tokens=scripted.MAX_MODEL_LEN - 50)
    assert (answer.status, answer.json["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_with_several_answers(stream: bool, gateway: scripted.Gateway, ids_of: Ids) -> None:
    gateway.worker.script = [
        TokenDelta("r", ids_of(" x"), index=1, num_cached_tokens=1),
        0.01,
        TokenDelta("r", ids_of(" y"), STOP, index=0, num_cached_tokens=1),
        TokenDelta("r", ids_of(" z"), LENGTH, index=1),
    ]
    answer = complete(gateway, ["a", "b c", "d"], n=2, **scripted.streamed(stream))
    assert texts(answer) == {index: (" x z", "length") if index % 2 else (" y", "stop") for index in range(6)}
    assert sorted(request.token_ids for request in gateway.worker.requests) == sorted(map(ids_of, ["a", "b c", "d"]))
    usage = answer.events[-2]["usage"] if stream else answer.json["usage"]
    assert usage["prompt_tokens"] == sum(len(ids_of(text)) for text in ("a", "b c", "d"))
    assert usage["completion_tokens"] == 3 * sum(len(ids_of(text)) for text in (" x", " y", " z"))
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3
    if stream:
        assert len({event["id"] for event in answer.events[:-1]}) == 1
        assert [event["usage"] for event in answer.events[:-2]] == [None] * (len(answer.events) - 2)
    lines = gateway.lines
    while not lines(answer.headers["x-request-id"]):
        time.sleep(0.01)
    (line,) = lines(answer.headers["x-request-id"])
    assert (line["prompt_tokens"], len(line["finish_reasons"])) == (usage["prompt_tokens"], 6)


def test_a_prompt_that_ends_early_waits_for_no_other(gateway: scripted.Gateway, ids_of: Ids) -> None:
    """Each prompt ends by its own stop string; its work ends then, not with the last prompt's."""
    gateway.worker.script = [TokenDelta("r", ids_of("one END two")), 30.0]
    answer = complete(gateway, ["a", "b"], stop=["END"])
    assert texts(answer) == {0: ("one ", "stop"), 1: ("one ", "stop")}
    assert gateway.worker.num_aborted == 2


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_one_prompt_ends_all(stream: bool, gateway: scripted.Gateway, ids_of: Ids) -> None:
    failure = Failure(WorkerFailed.code, "It broke.", None)
    gateway.worker.script = [TokenDelta("r", ids_of("one")), TokenDelta("r", [], failure=failure)]
    answer = complete(gateway, ["a", "b"], stream=stream)
    error = answer.events[-1]["error"] if stream else answer.json["error"]
    assert error["code"] == "worker_failed"
    assert answer.status == (200 if stream else WorkerFailed.status)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echo(stream: bool, as_ids: bool, gateway: scripted.Gateway, ids_of: Ids) -> None:
    gateway.worker.script = [TokenDelta("r", ids_of(" upon"), LENGTH)]
    answer = complete(gateway, ids_of("Once") if as_ids else "Once", echo=True, stream=stream)
    assert texts(answer) == {0: ("Once upon", "length")}


def logprobs_of(ids: list[int]) -> list[TokenLogprob]:
    return [
        TokenLogprob(-float(position), 1, (token_id, 7), (-float(position), -50.0))
        for position, token_id in enumerate(ids, 1)
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(stream: bool, gateway: scripted.Gateway, ids_of: Ids) -> None:
    ids = [*ids_of(" 你"), *ids_of("b")]
    gateway.worker.script = [TokenDelta("r", [*ids, gateway.eos], STOP, logprobs=logprobs_of([*ids, gateway.eos]))]
    answer = complete(gateway, logprobs=2, stream=stream)
    (choice,) = (answer.events[0] if stream else answer.json)["choices"]
    found = choice["logprobs"]
    assert gateway.worker.requests[0].sampling.num_logprobs == 2
    assert found["token_logprobs"] == [-float(position) for position in range(1, len(ids) + 2)]
    assert [len(top) for top in found["top_logprobs"]] == [2] * (len(ids) + 1)
    # A token within a character adds nothing; the one that ended the answer is not in the text.
    text = choice["text"]
    assert text == " 你b"
    assert found["text_offset"][0] == 0
    assert text[found["text_offset"][-2] :] == "b"
    assert found["text_offset"][-1] in (len(text), len(text) - 1)
    assert "token_ids" not in choice


def test_log_probabilities_of_the_prompt(gateway: scripted.Gateway, ids_of: Ids) -> None:
    prompt, ids = ids_of("Once upon"), ids_of(" a")
    assert len(prompt) > 1
    gateway.worker.script = [
        TokenDelta("r", ids, LENGTH, logprobs=logprobs_of(ids), prompt_logprobs=logprobs_of(prompt[1:]))
    ]
    (choice,) = complete(gateway, "Once upon", logprobs=1, echo=True, max_tokens=1).json["choices"]
    found = choice["logprobs"]
    assert choice["text"] == "Once upon a"
    assert "".join(found["tokens"]) == "Once upon a"
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:] == [-float(n) for n in (*range(1, len(prompt)), *range(1, len(ids) + 1))]
    pieces = zip(found["tokens"], found["text_offset"], strict=True)
    assert all(choice["text"].startswith(token, place) for token, place in pieces)
    assert all(token in top for token, top in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True))


@table("pause", [0.0, 0.2])
@table("prompt", ["Once upon", "a", ["Once upon", "b c d"], [[5, 6, 7], [8]]])
def test_a_stream_has_the_log_probabilities_of_the_prompt(
    prompt: Any, pause: float, gateway: scripted.Gateway, ids_of: Ids
) -> None:
    """In the first event of each choice, whichever choice has the first token; then it is as a whole answer."""
    ids = ids_of(" a b")
    several = [prompt] if isinstance(prompt, str) else prompt
    lengths = {len(ids_of(one) if isinstance(one, str) else one) for one in several}
    gateway.worker.script = [
        TokenDelta("r", ids[:1], index=1, logprobs=logprobs_of(ids[:1])),
        TokenDelta("r", ids[:1], logprobs=logprobs_of(ids[:1]), prompt_logprobs=logprobs_of([9] * (max(lengths) - 1))),
        pause,
        TokenDelta("r", ids[1:], LENGTH, index=1, logprobs=logprobs_of(ids[1:])),
        TokenDelta("r", ids[1:], LENGTH, logprobs=logprobs_of(ids[1:])),
    ]
    asked = {"logprobs": 1, "echo": True, "n": 2, "return_token_ids": True}
    whole = {choice["index"]: choice for choice in complete(gateway, prompt, **asked).json["choices"]}
    *events, done = complete(gateway, prompt, **asked, stream=True).events
    assert done == "[DONE]"
    for index, wanted in whole.items():
        first, *others = (choice for event in events for choice in event["choices"] if choice["index"] == index)
        assert first["prompt_token_ids"] == wanted["prompt_token_ids"]
        assert first["text"] in wanted["text"]
        assert first["logprobs"]["token_logprobs"][0] is None
        for name, values in wanted["logprobs"].items():
            assert [value for one in (first, *others) for value in one["logprobs"][name]] == values
        assert "".join(one["text"] for one in (first, *others)) == wanted["text"]
        assert others[-1]["finish_reason"] == "length"


def test_ids_of_prompt_and_answer(gateway: scripted.Gateway, ids_of: Ids) -> None:
    gateway.worker.script = [TokenDelta("r", ids_of(" a"), LENGTH)]
    (whole,) = complete(gateway, return_token_ids=True).json["choices"]
    first, last = (event["choices"][0] for event in complete(gateway, return_token_ids=True, stream=True).events[:-1])
    assert (whole["prompt_token_ids"], whole["token_ids"]) == (ids_of("Once"), ids_of(" a"))
    assert (first["prompt_token_ids"], last["token_ids"]) == (ids_of("Once"), ids_of(" a"))


def test_reasoning_is_text(gateway: scripted.Gateway, ids_of: Ids) -> None:
    tokenizer = gateway.application.model_registry.get("tiny").tokenizer
    start, end = tokenizer.token_id("<think>"), tokenizer.token_id("</think>")
    assert start is not None
    assert end is not None
    gateway.worker.script = [TokenDelta("r", [start, *ids_of("Hm"), end, *ids_of("Two")], LENGTH)]
    assert texts(complete(gateway)) == {0: ("<think>Hm</think>Two", "length")}


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"echo": True, "logprobs": 1}, "logprobs"), ({"prompt_logprobs": 1}, "prompt_logprobs")],
)
def test_errors_of_workers_name_the_clients_field(
    fields: dict[str, Any], param: str, gateway: scripted.Gateway
) -> None:
    gateway.worker.script = [UnsupportedParameter("`prompt_logprobs` is not served; leave it out.", "prompt_logprobs")]
    error = complete(gateway, **fields).json["error"]
    assert (error["param"], error["message"]) == (param, f"`{param}` is not served; leave it out.")


def test_an_unknown_model(gateway: scripted.Gateway) -> None:
    with gateway.client() as client, pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
