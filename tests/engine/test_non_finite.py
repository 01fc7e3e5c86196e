"""NaN and infinity end their request with one error; beside it and after it every answer is right. F25"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engines
import msgspec
import pytest
from conformance_sample import Seeds
from engines import Answer
from faults_of_layers import LayerFault

from saccade.engine.loop import Engine
from saccade.errors import NonFiniteOutput
from saccade.protocol.request import EngineRequest, Grammar

WIDE = (1, 6, 16)
BAD = 499
"""The token that ends bad prompts; no other prompt has it."""

LOOKUP = '{"method": "ngram", "num_speculative_tokens": 3}'
MTP = '{"method": "mtp", "num_speculative_tokens": 2}'
VALUES = (float("nan"), float("inf"), float("-inf"))

PLACES = {
    "qwen3_vl": (
        "language_model.embed_tokens",
        "language_model.layers.0.self_attn.qkv_proj",
        "language_model.layers.1",
        "language_model.layers.3.mlp.gate_up_proj",
        "language_model.norm",
        "lm_head",
        "visual.blocks.0.mlp.linear_fc1",
        "visual.merger.linear_fc2",
        "visual.deepstack_merger_list.1.linear_fc2",
    ),
    "qwen3_5_moe": (
        "language_model.layers.0.linear_attn.in_proj_qkv",
        "language_model.layers.2.linear_attn.in_proj_z",
        "language_model.layers.0.mlp.experts",
        "language_model.layers.1.mlp.shared_expert.gate_up_proj",
        "lm_head",
        "visual.merger",
    ),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "one step at a time": {},
    "chunks, a step ahead": {"max_num_batched_tokens": 24, "async_scheduling": True},
    "proposals": {"speculative_config": LOOKUP},
}
SCHEMA = Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}')
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.8, "top_p": 0.9, "seed": 1, "repetition_penalty": 1.2},
    "scored": {"num_logprobs": 2, "num_prompt_logprobs": 1},
    "schema": {"grammar": SCHEMA},
    "three samples": {"temperature": 1.0, "seed": 2},
}


def bad(folder: Path, way: str, at: int = -1) -> EngineRequest:
    """A request with BAD as token number *at* of its prompt, of 75 tokens with an image."""
    asked = engines.request(folder, [20, (WIDE, 1), 31], "bad", max_tokens=4, **WAYS[way])
    token_ids = list(asked.token_ids)
    token_ids[at] = BAD
    return msgspec.structs.replace(asked, token_ids=token_ids, num_samples=3 if way == "three samples" else 1)


def others(folder: Path) -> list[EngineRequest]:
    """Requests that run beside: one begins as the bad one does, and shows the same image."""
    alike = engines.request(folder, [20, (WIDE, 1), 6], "alike", max_tokens=4)
    return [alike, engines.request(folder, [17], "text", 5, num_logprobs=1, max_tokens=4)]


def told(answers: dict[str, Answer]) -> dict[str, list[int]]:
    return {name: answer.token_ids for name, answer in answers.items()}


def failures(answers: dict[str, Answer]) -> list[str]:
    return [answer.failure.code for answer in answers.values() if answer.failure is not None]


Right = Callable[[EngineRequest], dict[str, list[int]]]


@pytest.fixture(scope="module", params=PLACES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, network_folder: Callable[[str], Path]) -> Path:
    return network_folder(family)


@pytest.fixture(scope="module")
def right(folder: Path) -> Right:
    """The answers to a request by an engine without a fault."""
    engine = engines.engine(folder)
    known: dict[bytes, dict[str, list[int]]] = {}

    def answers(asked: EngineRequest) -> dict[str, list[int]]:
        if (key := msgspec.msgpack.encode(asked)) not in known:
            known[key] = told(engines.drain(engine, asked).answers)
        return known[key]

    return answers


def rows(family: str, whole: bool) -> Iterator[tuple[str, float, str]]:
    """Every place with every value, or with one of them in turn; and one of the ways in turn."""
    ways = itertools.cycle(WAYS)
    for number, place in enumerate(PLACES[family]):
        for value in VALUES if whole else (VALUES[number % 3],):
            yield place, value, next(ways)


@pytest.mark.ci
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_such_values_end_their_request_alone(
    settings: dict[str, Any], family: str, folder: Path, right: Right, subtests: pytest.Subtests
) -> None:
    engine = engines.engine(folder, state_snapshot_blocks=1, **settings)
    for place, value, way in rows(family, whole=not settings):
        with subtests.test(f"{place} {value} {way}"):
            asked = bad(folder, way, -1 if place == "lm_head" or not settings else 46)
            check_fault(engine, LayerFault(engine, place, value, BAD), asked, others(folder), right)


@pytest.mark.conformance
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_such_values_end_their_request_alone_in_every_way(
    settings: dict[str, Any], family: str, folder: Path, right: Right, subtests: pytest.Subtests, share: Seeds
) -> None:
    """Not near the beginning: PyTorch's CPU attention makes a number of a query that is none, in less than 16 rows."""
    engine = engines.engine(folder, state_snapshot_blocks=1, **settings)
    table = list(itertools.product(PLACES[family], VALUES, WAYS, (-1, 46, 18)))
    for number in share(range(len(table))):
        place, value, way, at = table[number]
        if place != "lm_head" or at == -1:
            with subtests.test(f"{place} {value} {way} {at}"):
                fault = LayerFault(engine, place, value, BAD)
                check_fault(engine, fault, bad(folder, way, at), others(folder), right)


def check_fault(
    engine: Engine, fault: LayerFault, asked: EngineRequest, beside: list[EngineRequest], right: Right
) -> None:
    """One request ends with an error; those beside it, and all of them afterwards, are right."""
    engine.scheduler.reset_caches(prefix=True, media=True)
    num_before = engine.load().non_finite_requests_total
    if fault.place.startswith("visual"):
        beside = [one for one in beside if not one.media]
    else:
        # What is in the caches when the fault happens is used by both.
        engines.drain(engine, beside[0])
    with fault.happening():
        answers = engines.drain(engine, asked, *beside).answers
    assert failures(answers) == [NonFiniteOutput.code]
    assert engine.load().non_finite_requests_total == num_before + 1
    for one in beside:
        assert {one.request_id: answers[one.request_id].token_ids} == right(one)
    assert engines.is_idle(engine)
    for one in (asked, asked, *beside):
        assert told(engines.drain(engine, one).answers) == right(one)
    assert engines.is_idle(engine)
