"""The engine's logits and greedy ids against the oracles, for the same tokens and pixels, float32. A10, [eng] 24"""

from pathlib import Path
from typing import Any

import engines
import pytest
from oracle_checks import LONG, PROMPTS, check, check_fresh_and_cached
from references.networks import Oracle

CHUNKS = (7, 16, 64, 2048)
EVERYDAY = {("two images", 16)}
CASES = [
    pytest.param(name, chunk, marks=() if (name, chunk) in EVERYDAY else pytest.mark.conformance)
    for name in PROMPTS
    for chunk in CHUNKS
]


@pytest.mark.aspect("logits")
@pytest.mark.aspect("cache")
@pytest.mark.sampled(7)
@pytest.mark.parametrize(("name", "chunk"), CASES)
def test_fresh_and_cached_chunks_equal_the_reference(folder: Path, oracle: Oracle, name: str, chunk: int) -> None:
    check_fresh_and_cached(oracle, folder, PROMPTS[name], chunk)


@pytest.mark.aspect("logits")
@pytest.mark.parametrize(
    "chunk", [64, *(pytest.param(chunk, marks=pytest.mark.conformance) for chunk in (7, 16, 2048))]
)
def test_batch_of_eight_equals_the_reference(folder: Path, oracle: Oracle, chunk: int) -> None:
    subject = engines.engine(folder, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 8))
    logits = engines.record_logits(subject)
    asked = [
        engines.request(folder, list(PROMPTS.values())[number % 5], str(number), number, max_tokens=12)
        for number in range(8)
    ]
    answers = engines.drain(subject, *asked).answers
    for one in asked:
        check(oracle, one, answers[one.request_id].token_ids, logits[one.request_id])


@pytest.mark.aspect("logits")
@pytest.mark.conformance
@pytest.mark.parametrize("parts", LONG, ids=["text", "five images"])
def test_long_answers_equal_the_reference(folder: Path, oracle: Oracle, parts: list[Any]) -> None:
    subject = engines.engine(folder)
    logits = engines.record_logits(subject)
    asked = engines.request(folder, parts, max_tokens=64)
    check(oracle, asked, engines.drain(subject, asked).answers["a"].token_ids, logits["a"])
