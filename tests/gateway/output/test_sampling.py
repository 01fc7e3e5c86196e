"""What a request says of sampling and of text reaches the engine, or the detokenizer, as it was said."""

from pathlib import Path

import pytest
import scripted
from tables import table

from saccade.gateway.config import GatewayConfig
from saccade.gateway.tenants.account import request_salt
from saccade.gateway.tenants.api_keys import ApiKeyStore
from saccade.protocol.request import SamplingParams, ThinkingBudget


def sent(gateway: scripted.Gateway, **fields: object) -> SamplingParams:
    answer = gateway.chat(**fields)
    assert answer.status == 200, answer.body
    return gateway.worker.requests[-1].sampling


@table(
    ("field", "given", "name", "expected"),
    [
        ("min_p", 0.25, "min_p", 0.25),
        ("presence_penalty", -2, "presence_penalty", -2.0),
        ("frequency_penalty", 1.5, "frequency_penalty", 1.5),
        ("repetition_penalty", 1.2, "repetition_penalty", 1.2),
        ("logit_bias", {"5": -100, "553": 0.5}, "logit_bias", {5: -100.0, 553: 0.5}),
        ("allowed_token_ids", [9, 5, 9], "allowed_token_ids", (9, 5)),
        ("min_tokens", 3, "min_tokens", 3),
        ("prompt_logprobs", 0, "num_prompt_logprobs", 0),
        ("prompt_logprobs", 20, "num_prompt_logprobs", 20),
        ("logprobs", True, "num_logprobs", 0),
        ("logprobs", False, "num_logprobs", None),
        ("top_logprobs", 0, "num_logprobs", None),
    ],
)
def test_parameter_reaches_the_worker(
    field: str, given: object, name: str, expected: object, gateway: scripted.Gateway
) -> None:
    plain = sent(gateway)
    assert getattr(sent(gateway, **{field: given}), name) == expected
    assert sent(gateway, **{field: None}) == plain


def test_omitted_parameters_change_nothing(gateway: scripted.Gateway) -> None:
    params = sent(gateway)
    neutral = SamplingParams(max_tokens=params.max_tokens, temperature=0.0, stop_token_ids=params.stop_token_ids)
    assert params == neutral
    assert gateway.worker.requests[-1].num_samples == 1


def test_stop_token_ids_stand_beside_the_models_own(gateway: scripted.Gateway) -> None:
    own = sent(gateway).stop_token_ids
    assert sent(gateway, stop_token_ids=[9, own[0], 9]).stop_token_ids == (*own, 9)
    assert sent(gateway, stop_token_ids=[9], ignore_eos=True).stop_token_ids == (9,)


def test_top_logprobs(gateway: scripted.Gateway) -> None:
    assert sent(gateway, logprobs=True, top_logprobs=20).num_logprobs == 20


def test_a_thinking_budget_goes_with_the_models_tags(gateway: scripted.Gateway) -> None:  # F13
    served = gateway.application.model_registry.get("tiny")
    assert served.reasoning is not None
    start_id, end_id = served.reasoning.start_id, served.reasoning.end_id
    assert sent(gateway, thinking_token_budget=7).thinking_budget == ThinkingBudget(7, end_id, start_id)
    assert sent(gateway, thinking_token_budget=0).thinking_budget == ThinkingBudget(0, end_id, start_id)
    assert sent(gateway, thinking_token_budget=None).thinking_budget is None
    allowed = [5, end_id]
    assert sent(gateway, thinking_token_budget=7, allowed_token_ids=allowed).thinking_budget is not None


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"thinking_token_budget": -2}, "thinking_token_budget", "invalid_value"),
        ({"thinking_token_budget": "many"}, "thinking_token_budget", "invalid_value"),
        ({"thinking_token_budget": 1, "allowed_token_ids": [5]}, "allowed_token_ids", "invalid_value"),
        ({"thinking_budget": 1}, "thinking_budget", "unsupported_parameter"),
    ],
)
def test_refused_thinking_budgets(
    fields: dict[str, object], param: str, code: str, gateway: scripted.Gateway
) -> None:  # F13
    answer = gateway.chat(**fields)
    assert (answer.status, answer.json["error"]["param"], answer.json["error"]["code"]) == (400, param, code)


def test_workers_that_end_no_reasoning_refuse_budgets(gateway: scripted.Gateway) -> None:  # F13
    with gateway.describing(takes_thinking_budgets=False):
        answer = gateway.chat(thinking_token_budget=1)
    assert (answer.status, answer.json["error"]["param"]) == (400, "thinking_token_budget")
    assert answer.json["error"]["code"] == "unsupported_parameter"


def test_a_model_without_tags_of_reasoning_has_no_budget(tiny_qwen3_vl: Path) -> None:  # F13
    with scripted.running(tiny_qwen3_vl, GatewayConfig(reasoning_parser="none")) as gateway:
        gateway.answer_two_tokens()
        answer = gateway.chat(thinking_token_budget=1)
        assert (answer.status, answer.json["error"]["code"]) == (400, "unsupported_parameter")
        assert gateway.chat().status == 200


def test_cache_salt_separates_within_a_tenant_and_never_joins_two(gateway: scripted.Gateway) -> None:
    for cache_salt in (None, "a", "b", "a"):
        assert gateway.chat(cache_salt=cache_salt).status == 200
    none, one, other, again = (request.salt for request in gateway.worker.requests)
    assert none == b""
    assert one == again
    assert len({none, one, other}) == 3
    store = ApiKeyStore(("first", "second"))
    tenants = [store.account(key).tenant.salt for key in (b"first", b"second")]
    # What one tenant sends is neither the other's salt nor what the other gets for the same words.
    sent_by = [
        {request_salt(tenant, text) for text in (None, "a", "b", *(t.hex() for t in tenants))} for tenant in tenants
    ]
    assert [len(salts) for salts in sent_by] == [5, 5]
    assert not sent_by[0] & sent_by[1]
