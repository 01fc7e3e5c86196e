"""Fields that clients of OpenAI, vLLM and SGLang send: what is obeyed, what is ignored with a word, what is refused."""

from typing import Any, Final

import scripted
from tables import table

from saccade.gateway.apis.messages.reader import EFFORT

CHATS, COMPLETIONS, MESSAGES, RESPONSES = "chat/completions", "completions", "messages", "responses"
BODIES: Final[dict[str, dict[str, Any]]] = {
    CHATS: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
    MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    f"{MESSAGES}/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    RESPONSES: {"input": "hi"},
}
SWITCH: Final = "has no effect: this model's chat template does not turn reasoning on and off"
NO_VERBOSITY: Final = "has no effect: chat templates know no verbosity"
BAD_FORMAT: Final = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"not": {}}}}}


def ask(gateway: scripted.Gateway, path: str, **fields: Any) -> scripted.Answer:
    return gateway.ask("POST", f"/v1/{path}", {"model": "tiny", **BODIES[path], **fields})


@table(
    "path, fields, warning",
    [
        (CHATS, {"thinking_token_budget": -1}, None),
        (COMPLETIONS, {"thinking_token_budget": -1}, None),
        (CHATS, {"prediction": {"type": "content", "content": "hello"}}, None),
        (CHATS, {"verbosity": "medium", "reasoning_effort": "none"}, None),
        (CHATS, {"reasoning_effort": "high"}, f"`reasoning_effort` {SWITCH}"),
        (CHATS, {"verbosity": "low"}, f"`verbosity` {NO_VERBOSITY}"),
        (
            CHATS,
            {"reasoning_effort": "low", "verbosity": "high", "rid": "a"},
            f"unknown parameters ignored: rid; `reasoning_effort` {SWITCH}; `verbosity` {NO_VERBOSITY}",
        ),
        (COMPLETIONS, {"reasoning_effort": "low"}, "unknown parameters ignored: reasoning_effort"),
        (COMPLETIONS, {"verbosity": "low"}, "unknown parameters ignored: verbosity"),
        (RESPONSES, {"reasoning": {"effort": "minimal"}}, f"`reasoning.effort` {SWITCH}"),
        (RESPONSES, {"text": {"verbosity": "low"}}, f"`text.verbosity` {NO_VERBOSITY}"),
        (
            RESPONSES,
            {"truncation": "auto", "reasoning": {"effort": "high"}},
            f"`truncation` has no effect: a conversation that does not fit is refused; `reasoning.effort` {SWITCH}",
        ),
        (MESSAGES, {"output_config": {"effort": "high"}}, EFFORT),
    ],
)
def test_what_changes_no_answer_is_ignored(
    path: str, fields: dict[str, Any], warning: str | None, gateway: scripted.Gateway
) -> None:
    answer = ask(gateway, path, **fields)
    assert answer.status == 200, answer.body
    assert answer.headers.get("x-saccade-warning") == warning
    assert gateway.worker.requests[-1].sampling.thinking_budget is None


@table("path", [CHATS, COMPLETIONS, MESSAGES, RESPONSES])
def test_no_share_of_the_tokens_is_the_likeliest_one(path: str, gateway: scripted.Gateway) -> None:
    others = {"logprobs": 1 if path == COMPLETIONS else True} if path in (CHATS, COMPLETIONS) else {}
    for fields in ({"top_p": 0, "temperature": 1.5}, {"top_p": 0.0}):
        answer = ask(gateway, path, **fields)
        assert answer.status == 200, answer.body
        found = gateway.worker.requests[-1].sampling
        ask(gateway, path, **others, temperature=0)
        greedy = gateway.worker.requests[-1].sampling
        assert (found.temperature, found.top_p) == (greedy.temperature, greedy.top_p) == (0, 1)


@table(
    "path, fields, param",
    [
        (CHATS, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHATS, {"stream": False, "stream_options": {"include_usage": False}}, "stream_options"),
        (CHATS, {"stream_options": {}}, "stream_options"),
        (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHATS, {"thinking_token_budget": -2}, "thinking_token_budget"),
        (CHATS, {"top_p": -0.1}, "top_p"),
        (CHATS, {"verbosity": "loud"}, "verbosity"),
        (CHATS, {"reasoning_effort": "loud"}, "reasoning_effort"),
        (RESPONSES, {"text": {"verbosity": "loud"}}, "text.verbosity"),
        (RESPONSES, {"reasoning": {"effort": "loud"}}, "reasoning.effort"),
        (CHATS, {"stop_regex": "a+"}, "stop_regex"),
        (COMPLETIONS, {"stop_regex": ["a+"]}, "stop_regex"),
        (MESSAGES, {"output_config": {"format": BAD_FORMAT}}, "output_config.format.schema.properties.a.not"),
        (f"{MESSAGES}/count_tokens", {"output_config": {"format": BAD_FORMAT}}, "output_config.format.schema.properties.a.not"),
    ],
)  # fmt: skip
def test_what_would_change_an_answer_is_refused(
    path: str, fields: dict[str, Any], param: str, gateway: scripted.Gateway
) -> None:
    answer = ask(gateway, path, **fields)
    assert answer.status == 400, answer.body
    assert f"`{param}`" in answer.json["error"]["message"]


def test_a_card_names_its_model(gateway: scripted.Gateway) -> None:
    [card] = gateway.ask("GET", "/v1/models").json["data"]
    assert (card["id"], card["root"]) == ("tiny", "tiny")
    assert gateway.ask("GET", "/v1/models/tiny").json == card
