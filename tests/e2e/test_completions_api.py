"""Completions with the openai SDK, against `saccade serve`."""

import json
from typing import Any

import httpx2
import pytest
from chats import openai_messages
from server import Server

PROMPTS = ["Once upon a time", "Two", "你好，世界", "def f(x):\n    return"]


def test_ids_of_a_chat_are_answered_as_the_chat(tiny_server: Server) -> None:
    messages = openai_messages("What is it?")
    body = {"model": tiny_server.name, "messages": messages}
    token_ids = httpx2.post(f"{tiny_server.url}/tokenize", json=body, headers={"authorization": "Bearer one"}).json()[
        "tokens"
    ]
    with tiny_server.client() as client:
        fields: Any = {"model": tiny_server.name, "max_tokens": 20, "temperature": 0}
        chat = client.chat.completions.create(messages=messages, **fields)
        completion = client.completions.create(prompt=token_ids, **fields)
    assert completion.choices[0].text == chat.choices[0].message.content
    assert completion.choices[0].finish_reason == chat.choices[0].finish_reason
    assert completion.usage is not None
    assert chat.usage is not None
    assert completion.usage.prompt_tokens == chat.usage.prompt_tokens


def test_prompts_are_answered_alone_together_and_in_streams(tiny_server: Server) -> None:
    fields: Any = {"model": tiny_server.name, "max_tokens": 12, "temperature": 0}
    with tiny_server.client() as client:
        alone = [client.completions.create(prompt=prompt, **fields).choices[0].text for prompt in PROMPTS]
        # More prompts than the engine runs at a time.
        together = client.completions.create(prompt=PROMPTS * 8, **fields)
        streamed = [""] * len(PROMPTS)
        for chunk in client.completions.create(prompt=PROMPTS, stream=True, **fields):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
    assert [choice.text for choice in together.choices] == alone * 8
    assert streamed == alone


def test_a_prompt_and_its_answer_are_scored_alike(tiny_server: Server) -> None:
    """What `echo` says of a text's tokens is what was said when they were drawn, as evaluations need it."""
    fields: Any = {"model": tiny_server.name, "temperature": 0, "logprobs": 2}
    # The random model also draws ids that its tokenizer does not have, which a prompt cannot have.
    drawing: Any = {"return_token_ids": True, "allowed_token_ids": list(range(256))}
    with tiny_server.client() as client:
        drawn = client.completions.create(prompt=PROMPTS[0], max_tokens=8, extra_body=drawing, **fields).choices[0]
        extra: Any = drawn.model_extra
        whole = extra["prompt_token_ids"] + extra["token_ids"]
        scored = client.completions.create(prompt=whole, max_tokens=1, echo=True, **fields).choices[0]
    assert drawn.logprobs is not None
    assert scored.logprobs is not None
    assert scored.text.startswith(PROMPTS[0] + drawn.text)
    first = len(extra["prompt_token_ids"])
    assert scored.logprobs.tokens is not None
    assert scored.logprobs.token_logprobs is not None
    assert scored.logprobs.tokens[first:-1] == drawn.logprobs.tokens
    assert scored.logprobs.token_logprobs[first:-1] == pytest.approx(drawn.logprobs.token_logprobs, abs=1e-3)
    assert scored.logprobs.token_logprobs[0] is None
    assert scored.logprobs.top_logprobs is not None
    assert drawn.logprobs.top_logprobs is not None
    assert [sorted(top) for top in scored.logprobs.top_logprobs[first:-1]] == [
        sorted(top) for top in drawn.logprobs.top_logprobs
    ]


def test_a_schema_holds_every_answer(tiny_server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    with tiny_server.client() as client:
        completion = client.completions.create(
            model=tiny_server.name, prompt=PROMPTS[:2], n=2, max_tokens=100, extra_body={"guided_json": schema}
        )
    assert len(completion.choices) == 4
    assert all(json.loads(choice.text)["a"] in (1, 2) for choice in completion.choices)
