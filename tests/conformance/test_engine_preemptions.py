"""Sequences whose state is taken away are answered as their oracles do, whatever the chunks."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import engines
import pytest
import torch
from oracle_checks import PROMPTS, RARE, check
from references.networks import Oracle

from saccade.engine.loop import Engine

CHUNK_SIZES = (*range(1, 21), 31, 32, 33, 48, 63, 64)


@pytest.mark.conformance
def test_preempted_requests_equal_the_reference(folder: Path, oracle: Oracle) -> None:  # B5, [eng] 4: again and again
    asked = [engines.request(folder, [seed, ((96, 64), seed)], str(seed), seed, max_tokens=24) for seed in (1, 2, 3)]
    subject = engines.engine(
        folder,
        # Of every eleven steps, after which all state is lost, the prompts may take about three.
        max_num_batched_tokens=max(8, sum(len(one.token_ids) for one in asked) // 3),
        encoder_cache_bytes=0,
        enable_prefix_caching=False,
    )
    logits = engines.record_logits(subject)
    preempted = []

    def preempt() -> None:
        if subject.load().steps_total % 11 == 0:
            # Prompts that take longer to compute than the time between preemptions would never end otherwise.
            for sequence in [one for one in subject.scheduler.running if preempted.count(one.request_id) < 4]:
                subject.scheduler.preempt(sequence)
                preempted.append(sequence.request_id)

    answers = engines.drain(subject, *asked, each_step=preempt).answers
    for one in asked:
        assert preempted.count(one.request_id) >= 2
        check(oracle, one, answers[one.request_id].token_ids, logits[one.request_id])


def preempting(subject: Engine) -> Callable[[], None]:
    """What to do behind each step of a request: take all state away once in the prompt and once in the answer."""
    due = [0, 2]  # tokens of the answer

    def preempt() -> None:
        for sequence in list(subject.scheduler.running):
            if due and sequence.num_generated_tokens >= due[0]:
                due.pop(0)
                subject.scheduler.preempt(sequence)

    return preempt


@pytest.mark.aspect("chunks")
@pytest.mark.conformance
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["text", "one image", "two images"])
def test_chunks_and_preemption_change_no_token(
    folder: Path, oracle: Oracle, name: str, checkpoint_name: str
) -> None:  # B5, [eng] 4, 24
    subject = engines.engine(folder, max_num_seqs=1, enable_prefix_caching=False, encoder_cache_bytes=0)
    logits = engines.record_logits(subject)
    asked = engines.request(folder, PROMPTS[name], max_tokens=5)
    expected = engines.drain(subject, asked).answers["a"].token_ids
    whole = torch.stack(logits["a"])
    check(oracle, asked, expected, logits["a"])
    chunks = (1, 7, 15, 16, 17, 64) if checkpoint_name in RARE else CHUNK_SIZES
    for chunk in chunks:
        subject.scheduler.budgets = replace(subject.scheduler.budgets, max_num_batched_tokens=chunk)
        for each_step in (lambda: None, preempting(subject)):
            logits["a"].clear()
            answer = engines.drain(subject, asked, each_step=each_step).answers["a"]
            assert answer.token_ids == expected, chunk
            torch.testing.assert_close(torch.stack(logits["a"]), whole, atol=oracle.atol, rtol=0)
    assert subject.load().preemptions_total == len(chunks) * 2
