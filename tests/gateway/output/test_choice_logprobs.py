"""Log probabilities: no token's entry is lost or doubled, and text and bytes are the token's own."""

import math
from pathlib import Path
from typing import Any

import pytest
import scripted
from chats import openai_messages

from saccade.gateway.output.logprobs import choice_logprobs, prompt_logprobs
from saccade.protocol.output import FinishReason, TokenDelta, TokenLogprob
from saccade.tokenization.tokenizer_json import JsonTokenizer

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.fixture
def tokenizer(tiny_qwen3_vl: Path) -> JsonTokenizer:
    return JsonTokenizer((tiny_qwen3_vl / "tokenizer.json").read_bytes(), {})


def logprob(number: int, *top_ids: int) -> TokenLogprob:
    return TokenLogprob(-number / 8, number, list(top_ids), [-rank / 8 for rank in range(len(top_ids))])


def delta(ids: list[int], reason: FinishReason | None = None, index: int = 0, first: int = 0) -> TokenDelta:
    """Tokens whose log probabilities tell them apart: those of -first/8, -(first + 1)/8 and so on."""
    logprobs = [logprob(number, 300, 301) for number in range(first, first + len(ids))]
    return TokenDelta("r", ids, reason, index=index, logprobs=logprobs)


def entries(answer: scripted.Answer, index: int = 0) -> list[Any]:
    """All entries of a choice, streamed or not."""
    if answer.headers["content-type"] == "application/json":
        return list(answer.json["choices"][index]["logprobs"]["content"])
    chunks = [choice for event in answer.events if event != "[DONE]" for choice in event["choices"]]
    own = [choice["logprobs"] for choice in chunks if choice["index"] == index]
    assert own[0] is None  # the role's
    return [entry for logprobs in own[1:] for entry in (logprobs or {"content": []})["content"]]


def test_entry(tokenizer: JsonTokenizer) -> None:
    emoji = tokenizer.encode_text("\U0001f9ff")
    assert len(emoji) > 1
    end = tokenizer.special_tokens["<|im_end|>"]
    given = [TokenLogprob(-0.5, 1, [emoji[0], end], [-0.5, -math.inf]), TokenLogprob(-math.inf, 9)]
    head, last = choice_logprobs(tokenizer, [emoji[0], end], given).content
    raw = tokenizer.bytes_of[emoji[0]]
    assert (head.bytes, head.token, head.logprob) == (list(raw), raw.decode(errors="replace"), -0.5)
    assert "\ufffd" in head.token
    assert [(top.token, top.logprob) for top in head.top_logprobs] == [(head.token, -0.5), ("<|im_end|>", -9999.0)]
    assert (last.token, bytes(last.bytes), last.logprob, last.top_logprobs) == (
        "<|im_end|>",
        b"<|im_end|>",
        -9999.0,
        [],
    )


@pytest.mark.parametrize("stream", [True, False])
def test_every_token_has_its_entry_once(stream: bool, gateway: scripted.Gateway, tokenizer: JsonTokenizer) -> None:
    # Characters over several tokens, a token without text, the end of the answer: chunks are fewer than tokens.
    ids = [*tokenizer.encode_text("a\U0001f9ff\u4f60"), tokenizer.special_tokens["<|vision_end|>"], gateway.eos]
    last = len(ids) - 1
    gateway.worker.script = [*(delta([ids[i]], first=i) for i in range(last)), delta([ids[last]], STOP, first=last)]
    answer = gateway.chat(stream=stream, logprobs=True, top_logprobs=2)
    found = entries(answer)
    assert [entry["logprob"] for entry in found] == [-number / 8 for number in range(len(ids))]
    assert [bytes(entry["bytes"]) for entry in found] == [tokenizer.bytes_of[token_id] for token_id in ids]
    assert all([top["logprob"] for top in entry["top_logprobs"]] == [0.0, -0.125] for entry in found)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_entries_end_with_the_token_that_completes_a_stop_string(
    stream: bool, whole: bool, gateway: scripted.Gateway, tokenizer: JsonTokenizer
) -> None:
    ids = tokenizer.encode_text("ab<stop>")
    more = tokenizer.encode_text("never")
    steps = (
        [delta([*ids, *more])] if whole else [delta([token_id], first=i) for i, token_id in enumerate([*ids, *more])]
    )
    gateway.worker.script = [*steps, 30.0]
    answer = gateway.chat(logprobs=True, stop="<stop>", **scripted.streamed(stream))
    assert [entry["logprob"] for entry in entries(answer)] == [-number / 8 for number in range(len(ids))]
    assert (answer.events[-2] if stream else answer.json)["usage"]["completion_tokens"] == len(ids)


def test_delayed_text_has_its_entries(gateway: scripted.Gateway, tokenizer: JsonTokenizer) -> None:
    ids = tokenizer.encode_text("a<sto!")
    gateway.worker.script = [*(delta([token_id], first=i) for i, token_id in enumerate(ids)), delta([], LENGTH)]
    *chunks, last = gateway.chat(stream=True, logprobs=True, stop="<stop>").events[1:-1]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == choice["delta"]["content"]
    assert last["choices"][0] == {
        "delta": {},
        "finish_reason": "length",
        "index": 0,
        "logprobs": {"content": [], "refusal": None},
    }


@pytest.mark.parametrize("stream", [True, False])
def test_samples_have_their_own(stream: bool, gateway: scripted.Gateway) -> None:
    gateway.worker.script = [
        delta([300], index=1, first=10),
        delta([301], index=0, first=20),
        delta([302, 303], LENGTH, index=1, first=11),
        delta([304], LENGTH, index=0, first=21),
    ]
    answer = gateway.chat(stream=stream, logprobs=True, n=2)
    assert [entry["logprob"] * -8 for entry in entries(answer, 0)] == [20, 21]
    assert [entry["logprob"] * -8 for entry in entries(answer, 1)] == [10, 11, 12]


def test_log_probabilities_are_null_if_not_requested(gateway: scripted.Gateway) -> None:
    gateway.worker.script = [TokenDelta("r", [300], LENGTH)]
    assert gateway.chat(logprobs=False).json["choices"][0]["logprobs"] is None
    assert {choice["logprobs"] for event in gateway.chat(stream=True).events[:-1] for choice in event["choices"]} == {
        None
    }
    assert "prompt_logprobs" not in gateway.chat().json


def test_prompt(gateway: scripted.Gateway, tokenizer: JsonTokenizer) -> None:
    prompt = gateway.ask("POST", "/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json["tokens"]
    given = [logprob(3, 7, 300), *[logprob(1, token_id, 7) for token_id in prompt[2:]]]
    gateway.worker.script = [TokenDelta("r", [300], LENGTH, prompt_logprobs=given)]
    first, second, *others = gateway.chat(prompt_logprobs=2).json["prompt_logprobs"]
    assert first is None
    assert second == {
        str(prompt[1]): {"logprob": -0.375, "rank": 3, "decoded_token": tokenizer.decode([prompt[1]])},
        "7": {"logprob": 0.0, "rank": 1, "decoded_token": tokenizer.decode([7])},
        "300": {"logprob": -0.125, "rank": 2, "decoded_token": tokenizer.decode([300])},
    }
    assert [list(place) for place in others] == [[str(token_id), "7"] for token_id in prompt[2:]]


def test_prompt_of_one_token(tokenizer: JsonTokenizer) -> None:
    assert prompt_logprobs(tokenizer, [5], []) == [None]
    ((_, place),) = [prompt_logprobs(tokenizer, [5, 6], [TokenLogprob(-math.inf, 4)])]
    assert place is not None
    assert place["6"].logprob == -9999.0


def test_openai_sdk(gateway: scripted.Gateway, tokenizer: JsonTokenizer) -> None:
    ids = tokenizer.encode_text("a\U0001f9ff")
    gateway.worker.script = [
        *(delta([token_id], first=i) for i, token_id in enumerate(ids)),
        delta([gateway.eos], STOP),
    ]
    asked: Any = {"model": "tiny", "messages": openai_messages("hi"), "logprobs": True, "top_logprobs": 2}
    whole = gateway.client().chat.completions.create(**asked).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in whole.content[:-1]).decode() == "a\U0001f9ff"
    with gateway.client().chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0].logprobs
    assert streamed is not None
    assert streamed.content == whole.content
