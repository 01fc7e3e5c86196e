"""A step is launched before the last one is collected: equal answers, and no step waits for the host's work."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import msgspec
import pytest
import shadow

from saccade.engine.core.request_validation import RequestValidator
from saccade.engine.loop import Engine
from saccade.protocol.request import EngineRequest, Grammar, SamplingParams, ThinkingBudget

pytestmark = pytest.mark.ci

WIDE = (1, 6, 16)


def asked(folder: Path) -> list[EngineRequest]:
    """Requests with all that may depend on the last token."""
    kinds: list[tuple[list[Any], dict[str, Any]]] = [
        ([5, (WIDE, 1), 9], {"temperature": 1.0, "seed": 1}),
        ([30], {"repetition_penalty": 1.3, "presence_penalty": 0.5}),
        ([40], {"frequency_penalty": 0.7, "temperature": 1.0, "seed": 2, "min_tokens": 5}),
        ([11], {"num_logprobs": 2, "num_prompt_logprobs": 1}),
        ([70, (WIDE, 2), 3], {"logit_bias": {3: 2.0}, "top_k": 9, "temperature": 0.8, "seed": 3}),
        ([17], {"max_tokens": 1}),
        ([9], {"thinking_budget": ThinkingBudget(4, end_id=7)}),
        (
            [12],
            {
                "grammar": Grammar("json_schema", '{"type": "string", "pattern": "^[a-c]{2,5}$"}'),
                "temperature": 1.0,
                "seed": 4,
            },
        ),
    ]
    requests = [
        engines.request(folder, parts, str(index), index, **{"max_tokens": 12, **sampling})
        for index, (parts, sampling) in enumerate(kinds)
    ]
    requests[0] = msgspec.structs.replace(requests[0], num_samples=3)
    return requests


def answers(folder: Path, *, is_ahead: bool, **settings: Any) -> dict[str, Any]:
    """Return the answers of an engine whose pool preempts, and whose stop ids end some of them early."""
    subject = engines.engine(folder, async_scheduling=is_ahead, max_num_batched_tokens=32, **settings)
    found = engines.drain(subject, *asked(folder)).answers
    stopping = [
        msgspec.structs.replace(
            one,
            request_id=f"stop {one.request_id}",
            sampling=msgspec.structs.replace(one.sampling, stop_token_ids=tuple(found[one.request_id].token_ids[3:4])),
        )
        for one in asked(folder)
    ]
    found |= engines.drain(subject, *stopping).answers
    assert engines.is_idle(subject)
    scored = {name: [round(one.logprob, 3) for one in (*a.logprobs, *a.prompt_logprobs)] for name, a in found.items()}
    return {name: (a.token_ids, a.finish_reason, scored[name]) for name, a in found.items()}


def test_answers_equal_those_of_one_step_at_a_time(tiny_qwen3_vl: Path) -> None:
    plain = answers(tiny_qwen3_vl, is_ahead=False)
    assert len(plain) == 20
    assert answers(tiny_qwen3_vl, is_ahead=True) == plain
    tokens = {name: answer[0] for name, answer in plain.items()}
    preempted = answers(tiny_qwen3_vl, is_ahead=True, num_blocks=14, max_model_len=150)
    assert {name: answer[0] for name, answer in preempted.items()} == tokens


def test_recurrent_states_equal_those_of_one_step_at_a_time(network_folder: Callable[[str], Path]) -> None:
    """Checkpoints are saved at boundaries that an answer reaches: their keys need tokens that are being drawn."""
    folder = network_folder("qwen3_5")
    settings: dict[str, Any] = {"state_snapshot_blocks": 1, "num_state_snapshots": 8, "num_blocks": 64}
    prompts = [engines.request(folder, [length], str(length), max_tokens=40) for length in (5, 16, 30, 47)]
    found = []
    for is_ahead in (False, True):
        subject = engines.poison(engines.engine(folder, async_scheduling=is_ahead, **settings))
        first = engines.drain(subject, *prompts).answers
        longer = [
            msgspec.structs.replace(
                one, request_id=f"{one.request_id} on", token_ids=one.token_ids + first[one.request_id].token_ids
            )
            for one in prompts
        ]
        second = engines.drain(subject, *longer).answers
        found.append({name: (a.token_ids, a.num_cached_tokens) for name, a in (first | second).items()})
    assert found[0] == found[1]
    assert all(cached for name, (_, cached) in found[0].items() if name.endswith("on"))


def test_the_host_works_while_a_step_is_in_flight() -> None:
    """A stand-in executor counts the steps that its device need not wait for."""
    rng = random.Random(1)
    executor = shadow.ShadowExecutor(rng, is_recurrent=False)
    validator = RequestValidator(shadow.SPEC, b"f" * 32, 200)  # type: ignore[arg-type]
    scheduler = shadow.scheduler(rng, is_recurrent=False, max_num_seqs=8, num_blocks=400, num_tokens=64)
    subject = Engine(executor, scheduler, validator, SimpleNamespace(role="both"), steps_ahead=1)  # type: ignore[arg-type]
    for number in range(8):
        sampling = SamplingParams(max_tokens=100, temperature=0)
        request = EngineRequest(request_id=str(number), token_ids=[1, 2, number], sampling=sampling)
        subject.requests.submit(0, request)
    outcome = engines.drain(subject)
    assert {len(answer.token_ids) for answer in outcome.answers.values()} == {100}
    # Only the first step has none before it, and the last tokens have none after it.
    assert (outcome.steps, executor.num_launched_ahead) == (101, 99)
