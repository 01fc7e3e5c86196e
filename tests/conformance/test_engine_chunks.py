"""Answers do not depend on how a prompt is cut into chunks, nor on retractions: the oracles', whatever happens."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import engines
import pytest
import torch
from oracle_checks import PROMPTS, check
from references.networks import Oracle

from saccade.engine.loop import Engine


def chunk_sizes(num_tokens: int) -> list[int]:
    """Every size, or of a long prompt, whose pictures take hundreds of tokens, those around blocks and its end."""
    if num_tokens <= 160:
        return list(range(1, num_tokens + 1))
    return [1, 2, 3, 7, 15, 16, 17, 31, 64, 100, num_tokens // 2, num_tokens - 1, num_tokens]


@pytest.mark.aspect("chunks")
@pytest.mark.conformance
@pytest.mark.parametrize("name", PROMPTS)
def test_every_chunk_size(folder: Path, oracle: Oracle, name: str) -> None:  # [eng] 24
    asked = engines.request(folder, PROMPTS[name], max_tokens=4)
    for chunk in chunk_sizes(len(asked.token_ids)):
        subject = engines.engine(folder, max_num_batched_tokens=chunk, max_num_seqs=1)
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


@pytest.mark.aspect("chunks")
@pytest.mark.conformance
@pytest.mark.parametrize("name", ["text", "one picture", "two pictures"])
def test_chunks_and_retraction_change_no_token(folder: Path, oracle: Oracle, name: str) -> None:  # B5, [eng] 4, 24
    subject = engines.engine(folder, max_num_seqs=1, enable_prefix_caching=False, encoder_cache_bytes=0)
    logits = engines.record_logits(subject)
    asked = engines.request(folder, PROMPTS[name], max_tokens=5)
    expected = engines.drain(subject, asked).answers["a"].token_ids
    whole = torch.stack(logits["a"])
    check(oracle, asked, expected, logits["a"])
    for chunk in range(1, 65):
        subject.scheduler.budgets = replace(subject.scheduler.budgets, max_num_batched_tokens=chunk)
        for each_step in (lambda: None, retracting(subject)):
            logits["a"].clear()
            answer = engines.drain(subject, asked, each_step=each_step).answers["a"]
            assert answer.token_ids == expected, chunk
            torch.testing.assert_close(torch.stack(logits["a"]), whole, atol=oracle.atol, rtol=0)
    assert subject.load().preemptions_total == 64 * 2
