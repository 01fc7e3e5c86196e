"""Every text of a request reaches the model, in each API, whatever the model's chat template writes of turns. F13"""

from pathlib import Path
from typing import Any

import scripted
from tables import table

from saccade.gateway.config import GatewayConfig
from saccade.gateway.prompt.turns import MOVED

CHATS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
Turns = list[dict[str, Any]]
SYSTEM: Turns
DEVELOPER: Turns
USER: Turns
ANSWER: Turns
SYSTEM, DEVELOPER, USER, ANSWER = (
    [{"role": role, "content": text}]
    for role, text in (("system", "one"), ("developer", "two"), ("user", "hi"), ("assistant", "yes"))
)
LATE: Turns = [{"role": "system", "content": [{"type": "text", "text": "three"}, {"type": "text", "text": "four"}]}]
INPUT: Turns = [
    {"role": "developer", "content": [{"type": "input_text", "text": "three"}, {"type": "input_text", "text": "four"}]}
]
BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1a2b3;"}
BLOCKS = [BILLING, {"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


def prompt_of(gateway: scripted.Gateway, path: str, **body: Any) -> tuple[str, str | None]:
    """Return the prompt that reaches the worker, and the warning."""
    gateway.answer_two_tokens()
    most = "max_output_tokens" if path == RESPONSES else "max_tokens"
    answer = gateway.ask("POST", path, {"model": "tiny", most: 9, **body})
    assert answer.status == 200, answer.body
    prompt = gateway.tokenizer.decode(gateway.worker.requests[-1].token_ids)
    return prompt, answer.headers.get("x-saccade-warning")


@table(
    "path, body, expected, warning",
    [
        (CHATS, {"messages": SYSTEM + DEVELOPER + USER}, ["one\n\ntwo", "hi"], None),
        (CHATS, {"messages": SYSTEM + USER + LATE}, ["one", "hi\n\nthreefour"], MOVED),
        (CHATS, {"messages": SYSTEM + USER + ANSWER + LATE + USER}, ["one", "hi", "yes", "threefour\n\nhi"], MOVED),
        (CHATS, {"messages": USER + ANSWER + DEVELOPER}, ["hi", "yes", "two"], MOVED),
        (MESSAGES, {"system": BLOCKS, "messages": USER}, ["onetwo", "hi"], None),
        (MESSAGES, {"system": BLOCKS, "messages": USER + LATE}, ["onetwo", "hi\n\nthreefour"], MOVED),
        (
            MESSAGES,
            {"system": "one", "messages": USER + ANSWER + LATE + USER},
            ["one", "hi", "yes", "threefour\n\nhi"],
            MOVED,
        ),
        (RESPONSES, {"instructions": "one", "input": INPUT + USER}, ["one\n\nthreefour", "hi"], None),
        (RESPONSES, {"instructions": "one", "input": USER + INPUT}, ["one", "hi\n\nthreefour"], MOVED),
    ],
)
def test_system_turns_are_in_the_prompt(
    path: str, body: dict[str, Any], expected: list[str], warning: str | None, gateway: scripted.Gateway
) -> None:
    prompt, warned = prompt_of(gateway, path, **body)
    said = [turn.partition("\n")[2] for turn in prompt.split("<|im_start|>")[1:-1]]
    assert [turn.removesuffix("<|im_end|>\n") for turn in said] == expected
    assert warned == warning
    assert "billing" not in prompt


def test_counting_and_tokenising_see_the_same_turns(gateway: scripted.Gateway) -> None:
    body = {"model": "tiny", "messages": SYSTEM + USER + LATE}
    prompt, _ = prompt_of(gateway, CHATS, **body)
    answer = gateway.ask("POST", "/tokenize", body)
    assert gateway.tokenizer.decode(answer.json["tokens"]) == prompt
    counted = gateway.ask("POST", "/v1/messages/count_tokens", body)
    assert counted.json["input_tokens"] == len(answer.json["tokens"])


def test_new_instructions_follow_those_of_an_earlier_response(gateway: scripted.Gateway) -> None:
    gateway.answer_two_tokens()
    first = gateway.ask("POST", RESPONSES, {"model": "tiny", "instructions": "one", "input": USER})
    body = {"instructions": "two", "previous_response_id": first.json["id"], "input": INPUT}
    prompt, warned = prompt_of(gateway, RESPONSES, **body)
    assert prompt.startswith("<|im_start|>system\ntwo<|im_end|>")
    assert ("one" in prompt, "user\nthreefour<|im_end|>" in prompt, warned) == (False, True, MOVED)


CUTS = "{% for m in messages %}{{ m.role }}: {{ m.content[:3] }}\n{% endfor %}"


def test_a_text_that_a_template_cuts_is_refused_by_its_place(tiny_qwen3_vl: Path) -> None:
    with scripted.running(tiny_qwen3_vl, GatewayConfig(trusts_request_templates=True)) as trusting:
        trusting.answer_two_tokens()
        body = {"model": "tiny", "messages": USER + ANSWER + USER, "chat_template": CUTS}
        assert trusting.ask("POST", CHATS, body).status == 200
        body["messages"] = USER + ANSWER + [{"role": "user", "content": "hello"}]
        refused = trusting.ask("POST", CHATS, body)
    assert (refused.status, refused.json["error"]["param"]) == (400, "messages[2].content")
    assert "leaves this text out" in refused.json["error"]["message"]
