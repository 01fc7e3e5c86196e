"""/invocations answers as the API that the body belongs to."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scripted
from tables import table
from waiting import wait_until

from saccade.gateway.config import GatewayConfig

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "seed": 1}
COMPLETION = {"model": "tiny", "prompt": "hi", "max_tokens": 5, "seed": 1}
PATH = "/invocations"
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def keyed(tiny_qwen3_vl: Path) -> Iterator[scripted.Gateway]:
    with scripted.running(tiny_qwen3_vl, GatewayConfig(api_keys=("secret",), strict_parameters=True)) as made:
        made.answer_two_tokens()
        yield made


def without_ids(value: Any) -> Any:
    """An answer, or its events, without what differs from answer to answer."""
    if isinstance(value, list):
        return [without_ids(one) for one in value]
    return (
        {name: one for name, one in value.items() if name not in ("id", "created")}
        if isinstance(value, dict)
        else value
    )


@table("path, body", [(CHATS, CHAT), (COMPLETIONS, COMPLETION)])
@table(
    "more",
    [
        {},
        {"stream": True},
        {"prompt": None},
        {"messages": None},
        {"n": 2},
        {"unknown": 1},
        {"temperature": 9},
        {"functions": [{}]},
        {"model": "none"},
    ],
)
def test_answers_are_those_of_the_other_api(
    gateway: scripted.Gateway, path: str, body: dict[str, Any], more: dict[str, Any]
) -> None:
    sent = {name: value for name, value in more.items() if name not in body or value is not None}
    answers = [gateway.ask("POST", asked, body | sent) for asked in (path, PATH, PATH + "/")]
    seen = [
        (one.status, one.headers.get("x-saccade-warning"), without_ids(one.events if "stream" in sent else one.json))
        for one in answers
    ]
    assert seen[0] == seen[1] == seen[2]
    routes = [gateway.line(one.headers["x-request-id"])["route"] for one in answers]
    assert routes == [path] * 3


def test_metrics_count_the_other_api(gateway: scripted.Gateway) -> None:
    def counted(route: str) -> float:
        return gateway.metric("saccade_http_requests_total", route=route, status="200")

    before = [counted(route) for route in (CHATS, COMPLETIONS, PATH)]
    assert gateway.ask("POST", PATH, CHAT).status == 200
    assert gateway.ask("POST", PATH, COMPLETION).status == 200
    # A request is counted after its answer has been sent.
    wait_until(lambda: sum(counted(route) for route in (CHATS, COMPLETIONS, PATH)) == sum(before) + 2)
    assert [counted(route) for route in (CHATS, COMPLETIONS, PATH)] == [before[0] + 1, before[1] + 1, before[2]]


OTHERS: dict[str, tuple[Any, str, str | None, str]] = {
    "both": (CHAT | COMPLETION, "invalid_value", "prompt", "but not both"),
    "neither": ({"model": "tiny"}, "invalid_value", "messages", "neither `messages` nor `prompt`"),
    "nulls": ({"messages": None, "prompt": None}, "invalid_value", "messages", "neither `messages` nor `prompt`"),
    "embeddings": ({"input": "hi"}, "unsupported_parameter", "input", "or this body to /v1/responses"),
    "scores": ({"text_1": "a", "text_2": "b"}, "unsupported_parameter", "text_1", "`text_1` is not served"),
    "ranks": ({"query": "a", "documents": []}, "unsupported_parameter", "query", "`query` is not served"),
    "an array": ([], "invalid_value", None, "must be an object"),
    "no JSON": (b"{", "invalid_value", None, "not valid JSON"),
    "nothing": (b"", "invalid_value", None, "is empty"),
}


@table("name", OTHERS)
def test_other_bodies_are_refused_by_name(gateway: scripted.Gateway, name: str) -> None:
    body, code, param, complaint = OTHERS[name]
    answer = gateway.ask("POST", PATH, body)
    error = answer.json["error"]
    assert (answer.status, error["code"], error["param"]) == (400, code, param)
    assert complaint in error["message"]
    assert gateway.line(answer.headers["x-request-id"])["route"] == PATH


def test_keys_and_strictness_are_those_of_the_other_api(keyed: scripted.Gateway) -> None:
    assert keyed.ask("POST", PATH, CHAT).status == 401
    assert keyed.ask("POST", PATH, CHAT, Authorization="Bearer secret").status == 200
    assert keyed.ask("POST", PATH, CHAT | {"unknown": 1}, Authorization="Bearer secret").status == 400
    assert keyed.ask("POST", PATH, CHAT, Authorization="Bearer secret", Content_Type="text/plain").status == 415
