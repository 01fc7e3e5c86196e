"""Several samples, log probabilities and the rest of the parameters, asked with the openai SDK. # B9"""

from typing import Any

import pytest
from chats import openai_messages, random_image
from server import Server

MESSAGES = openai_messages(random_image(96, 96, 50), "Describe the image.")


def ask(server: Server, **options: Any) -> Any:
    return server.client().chat.completions.create(
        model=server.model, messages=MESSAGES, **{"max_tokens": 8, "extra_body": {"ignore_eos": True}} | options
    )


def test_samples_of_an_image_share_its_prompt(tiny_server: Server) -> None:
    names = ("saccade_encoded_items_total", "vllm:prompt_tokens_total")
    encoded = tiny_server.settled(names[0])
    asked: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 7, "logprobs": True, "top_logprobs": 2}
    whole = ask(tiny_server, **asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in whole.choices}) > 1
    assert whole.usage.completion_tokens == 3 * 8
    assert tiny_server.settled(names[0]) == encoded + 1
    assert tiny_server.metric("saccade_slots_in_use") == 0
    for choice in whole.choices:
        assert len(choice.logprobs.content) == 8
        for entry in choice.logprobs.content:
            assert entry.logprob <= entry.top_logprobs[0].logprob <= 0
            assert len(entry.top_logprobs) == 2
    chunks = list(ask(tiny_server, stream=True, **asked))
    for choice in whole.choices:
        own = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.delta.content or "" for c in own) == choice.message.content
        streamed = [entry for c in own if c.logprobs for entry in c.logprobs.content]
        assert [entry.token for entry in streamed] == [entry.token for entry in choice.logprobs.content]


def test_times_of_samples_are_measured(tiny_server: Server) -> None:  # F10
    names = [f"vllm:request_{stage}_time_seconds_count" for stage in ("queue", "prefill", "decode")]
    ask(tiny_server)  # a histogram with a label is there after its first use only
    before = [tiny_server.metric(name) for name in names]
    ask(tiny_server, n=2)
    assert [tiny_server.metric(name) - count for name, count in zip(names, before, strict=True)] == [2.0] * 3


def test_a_stop_string_ends_one_sample(tiny_server: Server) -> None:
    asked: dict[str, Any] = {"n": 2, "temperature": 1.0, "seed": 11, "max_tokens": 16}
    first, second = ask(tiny_server, **asked).choices
    stop = next(c for c in first.message.content[2:] if c not in second.message.content)
    stopped = ask(tiny_server, **asked, stop=stop).choices
    assert stopped[0].message.content == first.message.content[: first.message.content.index(stop)]
    assert (stopped[0].finish_reason, stopped[1].finish_reason) == ("stop", "length")
    assert stopped[1].message.content == second.message.content


def test_greedy_tokens_are_the_likeliest_and_echo_their_ids(tiny_server: Server) -> None:
    extra = {"ignore_eos": True, "return_token_ids": True, "prompt_logprobs": 1}
    answer = ask(tiny_server, temperature=0, logprobs=True, top_logprobs=1, extra_body=extra)
    content = answer.choices[0].logprobs.content
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content)
    assert len(answer.choices[0].token_ids) == len(content) == 8
    assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens == len(answer.prompt_logprobs)
    assert answer.prompt_logprobs[0] is None
    for token_id, place in zip(answer.prompt_token_ids[1:], answer.prompt_logprobs[1:], strict=True):
        assert place[str(token_id)]["logprob"] <= max(entry["logprob"] for entry in place.values()) <= 0


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids"])
def test_forced_token_is_drawn(name: str, tiny_server: Server) -> None:
    token_id = tiny_server.client().post("/../tokenize", body={"prompt": "a"}, cast_to=object)["tokens"][0]
    value: Any = {str(token_id): 100} if name == "logit_bias" else [token_id]
    answer = ask(tiny_server, temperature=0, extra_body={name: value, "ignore_eos": True})
    assert answer.choices[0].message.content == "a" * 8


def test_min_tokens_and_stop_token_ids(tiny_server: Server) -> None:
    extra = {"ignore_eos": True, "return_token_ids": True}
    token_ids = ask(tiny_server, temperature=0, extra_body=extra).choices[0].token_ids
    stop = token_ids[0]
    ended = ask(tiny_server, temperature=0, extra_body=extra | {"stop_token_ids": [stop]}).choices[0]
    assert (ended.token_ids, ended.finish_reason, ended.message.content) == ([stop], "stop", "")
    later = ask(tiny_server, temperature=0, extra_body=extra | {"stop_token_ids": [stop], "min_tokens": 5}).choices[0]
    assert len(later.token_ids) >= 5
    assert stop not in later.token_ids[:5]


def test_cache_salt_keeps_a_prompt_to_itself(tiny_server: Server) -> None:
    for salt, hit in (("mine", False), ("mine", True), ("theirs", False)):
        usage = ask(tiny_server, max_tokens=1, extra_body={"cache_salt": salt}).usage
        assert (usage.prompt_tokens_details.cached_tokens > 0) == hit
