"""The engine's logits and greedy ids against transformers, for the same tokens and patches, float32. A10, [eng] 24"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import engines
import pytest
import torch

from saccade.cli.bundled import bundled
from saccade.engine.loop import Engine
from saccade.protocol.request import EngineRequest

ATOL = 1e-4
PROMPTS: dict[str, list[Any]] = {
    "text": [37],
    "one picture": [5, ((1, 8, 12), 1), 9],
    "two pictures": [3, ((1, 10, 6), 2), 6, ((1, 4, 20), 3), 8],
    "picture first and last": [((1, 4, 4), 4), 7, ((1, 6, 6), 5)],
    "picture twice": [2, ((1, 6, 10), 6), 3, ((1, 6, 10), 6), 4],
}
CHUNKS = [7, 16, 64, 2048]


@pytest.fixture(scope="module", params=["random", "bundled"])
def checkpoint(request: pytest.FixtureRequest, tiny_qwen3_vl: Path) -> Path:
    """A checkpoint with random weights, untied, and the trained one that ships, tied."""
    return tiny_qwen3_vl if request.param == "random" else bundled("model")


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> engines.Oracle:
    return engines.Oracle(checkpoint)


def check(oracle: engines.Oracle, asked: EngineRequest, token_ids: list[int], rows: list[torch.Tensor]) -> None:
    """Every logit that may be sampled equals the reference's, and every id is the reference's greedy choice."""
    assert len(token_ids) == asked.sampling.max_tokens == len(rows)
    placeholders = torch.tensor([oracle.placeholder, oracle.model.config.video_token_id])
    both = (torch.stack(rows), oracle.logits(asked, token_ids))
    ours, reference = (logits.index_fill(1, placeholders, float("-inf")) for logits in both)
    torch.testing.assert_close(ours, reference, atol=ATOL, rtol=0)
    assert reference.argmax(-1).tolist() == token_ids


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", PROMPTS)
def test_chunks_fresh_and_cached(checkpoint: Path, oracle: engines.Oracle, name: str, chunk: int) -> None:
    subject = engines.engine(checkpoint, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 8))
    logits = engines.record_logits(subject)
    for request_id in ("fresh", "cached"):
        asked = engines.request(checkpoint, PROMPTS[name], request_id, max_tokens=12)
        answer = engines.drain(subject, asked).answers[request_id]
        check(oracle, asked, answer.token_ids, logits[request_id])
    assert answer.num_cached_tokens == 16 * ((len(asked.token_ids) - 1) // 16)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_batch_of_eight(checkpoint: Path, oracle: engines.Oracle, chunk: int) -> None:
    subject = engines.engine(checkpoint, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 8))
    logits = engines.record_logits(subject)
    asked = [
        engines.request(checkpoint, list(PROMPTS.values())[number % 5], str(number), number, max_tokens=12)
        for number in range(8)
    ]
    answers = engines.drain(subject, *asked).answers
    for one in asked:
        check(oracle, one, answers[one.request_id].token_ids, logits[one.request_id])


def test_retracted(checkpoint: Path, oracle: engines.Oracle) -> None:  # B5, [eng] 4: again and again
    subject = engines.engine(
        checkpoint,
        max_num_batched_tokens=8,
        encoder_cache_bytes=0,
        enable_prefix_caching=False,
    )
    logits = engines.record_logits(subject)
    asked = [
        engines.request(checkpoint, [seed, ((1, 4, 6), seed)], str(seed), seed, max_tokens=24) for seed in (1, 2, 3)
    ]
    retracted = []

    def retract() -> None:
        if subject.load().steps_total % 11 == 0:
            for sequence in list(subject.scheduler.running):
                subject.scheduler.retract(sequence)
                retracted.append(sequence.request_id)

    answers = engines.drain(subject, *asked, each_step=retract).answers
    for one in asked:
        assert retracted.count(one.request_id) >= 2
        check(oracle, one, answers[one.request_id].token_ids, logits[one.request_id])


@pytest.mark.conformance
@pytest.mark.parametrize("name", PROMPTS)
def test_every_chunk_size(checkpoint: Path, oracle: engines.Oracle, name: str) -> None:  # [eng] 24
    asked = engines.request(checkpoint, PROMPTS[name], max_tokens=4)
    for chunk in range(1, len(asked.token_ids) + 1):
        subject = engines.engine(checkpoint, max_num_batched_tokens=chunk, max_num_seqs=1)
        logits = engines.record_logits(subject)
        answer = engines.drain(subject, asked).answers["a"]
        check(oracle, asked, answer.token_ids, logits["a"])
        assert subject.load().encoded_items_total == len({item.content_hash for item in asked.media})


def retracting(subject: Engine) -> Callable[[], None]:
    """What to do behind each step of a request: take all state away once in the prompt and once in the answer."""
    due = [0, 2]  # tokens of the answer

    def retract() -> None:
        for sequence in list(subject.scheduler.running):
            if due and sequence.num_generated_tokens >= due[0]:
                due.pop(0)
                subject.scheduler.retract(sequence)

    return retract


@pytest.mark.conformance
@pytest.mark.parametrize("name", ["text", "one picture", "two pictures"])
def test_chunks_and_retraction_change_no_token(
    checkpoint: Path, oracle: engines.Oracle, name: str
) -> None:  # B5, [eng] 4, 24
    subject = engines.engine(checkpoint, max_num_seqs=1, enable_prefix_caching=False, encoder_cache_bytes=0)
    logits = engines.record_logits(subject)
    asked = engines.request(checkpoint, PROMPTS[name], max_tokens=5)
    expected = engines.drain(subject, asked).answers["a"].token_ids
    whole = torch.stack(logits["a"])
    check(oracle, asked, expected, logits["a"])
    for chunk in range(1, 65):
        subject.scheduler.budgets = replace(subject.scheduler.budgets, max_num_batched_tokens=chunk)
        for each_step in (lambda: None, retracting(subject)):
            logits["a"].clear()
            answer = engines.drain(subject, asked, each_step=each_step).answers["a"]
            assert answer.token_ids == expected, chunk
            torch.testing.assert_close(torch.stack(logits["a"]), whole, atol=ATOL, rtol=0)
    assert subject.load().preemptions_total == 64 * 2
