"""What a request asks for is prepared once for all its choices: the event loop does no more for n than for each of n."""

from collections.abc import Callable
from typing import Any

import pytest
from instructions import counting_instructions
from tables import table
from written_answers import TOOLS

from saccade.gateway.chat import Chat
from saccade.gateway.chat_request import ChatRequest
from saccade.gateway.field_schemas import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from saccade.gateway.output.answer import Answer
from saccade.gateway.output.choice import choices_of
from saccade.gateway.output.sampling import token_rules
from saccade.gateway.served_models.served_model import ServedModel
from saccade.gateway.tenants.account import EVERYBODY, Account
from saccade.protocol.media import ImageLayout, Span
from saccade.protocol.output import TokenDelta
from saccade.protocol.request import MAX_NUM_SAMPLES
from saccade.telemetry import Metrics
from saccade.tokenization.detokenizer import Detokenizer, TextRules

EACH = 2000
"""The most instructions for one choice, whatever the request has: about 50 us."""

LAYOUT = ImageLayout(resized_height=32, resized_width=32, grid=(1, 2, 2), num_tokens=1, pixel_shape=(4, 768))
MANY_TOOLS = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "name": f"tool-{number}"}} for number in range(1000)]
EARLIER = [{"role": "assistant", "content": "", "tool_calls": [{}] * MAX_CALLS}] * MAX_MESSAGES
LARGEST: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "stop strings": (
        {"stop": ["a" * (MAX_STOP_CHARACTERS - 1) + chr(98 + index) for index in range(MAX_STOP_STRINGS)]},
        {},
    ),
    "tokens that end it": ({"stop_token_ids": list(range(MAX_STOP_TOKEN_IDS))}, {}),
    "tools": ({}, {"tools": MANY_TOOLS}),
    "tools of a grammar": ({"tool_choice": "required"}, {"tools": MANY_TOOLS}),
    "one tool, without pieces": ({"parallel_tool_calls": False}, {"tools": TOOLS}),
    "tools that are allowed": (
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": f"tool-{n}"}} for n in range(1000)],
                },
            }
        },
        {"tools": MANY_TOOLS},
    ),
    "earlier calls": ({}, {"tools": TOOLS, "messages": EARLIER}),
    "records of tokens": ({"logprobs": True, "top_logprobs": 20, "return_token_ids": True}, {}),
    "everything": (
        {
            "stop": ["b" * MAX_STOP_CHARACTERS] * MAX_STOP_STRINGS,
            "stop_token_ids": list(range(MAX_STOP_TOKEN_IDS)),
            "logprobs": True,
        },
        {"tools": MANY_TOOLS, "messages": EARLIER},
    ),
}
"""Fields of the request, and of its chat, that are as large as they may be."""


def chat_of(fields: dict[str, Any]) -> Chat:
    return Chat(fields.get("messages", []), 0, [], True, {}, tuple(fields.get("tools", ())))


@table("fields, of_chat", LARGEST.values(), LARGEST)
@pytest.mark.ci
def test_choices_share_what_their_request_asks_for(
    fields: dict[str, Any], of_chat: dict[str, Any], models: Callable[[str], ServedModel]
) -> None:
    model, chat = models("hermes"), chat_of(of_chat)
    numbers = {}
    for n in (1, MAX_NUM_SAMPLES):
        with counting_instructions() as count:
            made = choices_of(ChatRequest(messages=[], n=n, **fields), chat, model)
        numbers[n] = count()
        assert len(made) == n
    assert numbers[MAX_NUM_SAMPLES] - numbers[1] < EACH * MAX_NUM_SAMPLES


def test_stop_strings_are_prepared_as_far_as_an_answer_matches_them(models: Callable[[str], ServedModel]) -> None:
    tokenizer = models("hermes").tokenizer
    rules = TextRules(tuple(LARGEST["stop strings"][0]["stop"]))
    shared = rules.stop_strings
    answers = [Detokenizer(tokenizer, rules) for _ in range(2)]
    assert [one.num_prepared for one in shared] == [0] * MAX_STOP_STRINGS
    for answer in answers:
        assert answer.push_tokens(tokenizer.encode_text("aaac")) == "aaac"
        assert [one.num_prepared for one in shared] == [3] * MAX_STOP_STRINGS


@pytest.mark.parametrize("num_images", [0, 200])
def test_usage_with_every_chunk_looks_at_the_choice_of_the_chunk(
    num_images: int, models: Callable[[str], ServedModel]
) -> None:
    model = models("hermes")
    request = ChatRequest(messages=[], n=MAX_NUM_SAMPLES)
    images = [(LAYOUT, (Span(0, 1),))] * num_images
    account = Account(EVERYBODY)
    answer = Answer(request, chat_of({}), model, [1, 2], images, metrics=Metrics(), account=account, begun_at=0.0)
    numbers = []
    for _ in range(2):
        with counting_instructions() as count:
            for index in range(MAX_NUM_SAMPLES):
                answer.take_delta(TokenDelta("r", [1], index=index))
                usage = answer.usage
        numbers.append(count())
    assert usage.completion_tokens == 2 * MAX_NUM_SAMPLES
    assert numbers[-1] < EACH * MAX_NUM_SAMPLES


def test_rules_of_tokens_are_made_once_for_all_prompts(models: Callable[[str], ServedModel]) -> None:
    model = models("hermes")
    rules = token_rules(ChatRequest(messages=[], allowed_token_ids=[3, 1, 3], logit_bias={"1": 2.0}), model)
    assert (rules.allowed_token_ids, rules.logit_bias) == ((3, 1), {1: 2.0})
