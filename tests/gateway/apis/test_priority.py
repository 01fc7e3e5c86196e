"""`priority` of a request: how far it goes, its bounds, and what happens without --scheduling-policy priority."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import scripted
from msgspec import UNSET
from tables import table
from test_others_fields import CHATS, COMPLETIONS, MESSAGES, RESPONSES, ask

from saccade.gateway.apis.chat_endpoint import NO_PRIORITIES
from saccade.gateway.config import GatewayConfig
from saccade.protocol.request import MAX_PRIORITY

SERVED: Final = (CHATS, COMPLETIONS, RESPONSES)


@pytest.fixture(scope="module")
def prioritised(tiny_qwen3_vl: Path) -> Iterator[scripted.Gateway]:
    with scripted.running(tiny_qwen3_vl, GatewayConfig(scheduling_policy="priority")) as gateway:
        gateway.answer_two_tokens()
        yield gateway


@table("path", SERVED)
@table("priority", [-MAX_PRIORITY, -1, 7, MAX_PRIORITY, 0, None])
def test_worker_gets_the_priority(path: str, priority: int | None, prioritised: scripted.Gateway) -> None:
    answer = ask(prioritised, path, priority=priority)
    assert (answer.status, answer.headers.get("x-saccade-warning")) == (200, None)
    assert prioritised.worker.requests[-1].priority == (priority or UNSET)


@table("path", SERVED)
@table("priority", [MAX_PRIORITY + 1, -MAX_PRIORITY - 1, 10**30, 0.5, "1", True, [1]])
def test_other_values_are_refused(path: str, priority: Any, prioritised: scripted.Gateway) -> None:
    answer = ask(prioritised, path, priority=priority)
    assert (answer.status, answer.json["error"]["param"]) == (400, "priority")


@table("path", SERVED)
def test_without_the_policy_a_warning_says_that_it_has_no_effect(path: str, gateway: scripted.Gateway) -> None:  # F22
    for priority, warning in ((-3, NO_PRIORITIES), (0, None), (None, None)):
        answer = ask(gateway, path, priority=priority)
        assert (answer.status, answer.headers.get("x-saccade-warning")) == (200, warning)
        assert gateway.worker.requests[-1].priority is UNSET


def test_an_api_without_the_field_does_not_know_it(prioritised: scripted.Gateway) -> None:
    answer = ask(prioritised, MESSAGES, priority=1)
    assert answer.headers["x-saccade-warning"] == "unknown parameters ignored: priority"
    assert prioritised.worker.requests[-1].priority is UNSET


def test_several_tenants_order_their_own_requests_at_the_gateway_alone(tiny_qwen3_vl: Path) -> None:  # F11
    config = GatewayConfig(scheduling_policy="priority", api_keys=("one", "two"))
    with scripted.running(tiny_qwen3_vl, config) as gateway:
        gateway.answer_two_tokens()
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "priority": -9}
        answer = gateway.ask("POST", f"/v1/{CHATS}", body, Authorization="Bearer one")
        assert (answer.status, answer.headers.get("x-saccade-warning")) == (200, None)
        assert gateway.worker.requests[-1].priority is UNSET
