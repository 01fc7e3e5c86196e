"""The mask of allowed ids: one for each row, for all its steps, gone when the row's sequence is."""

from pathlib import Path
from typing import Any

import engines
import msgspec
import pytest
import torch

from saccade.engine.executor.masks import AllowedTokens
from saccade.protocol.request import EngineRequest

CPU = torch.device("cpu")
ALLOWED = tuple(range(20, 60))


def several(folder: Path, number: int, **params: Any) -> EngineRequest:
    asked = engines.request(
        folder, [40], **{"allowed_token_ids": ALLOWED, "temperature": 1.3, "seed": 5, "max_tokens": 24, **params}
    )
    return msgspec.structs.replace(asked, num_samples=number)


def test_masked_rows_keep_allowed_tokens_only() -> None:
    subject = AllowedTokens(5, CPU)
    for row, allowed in ((7, (0, 3)), (2, (4, 4, 0)), (3, (0, 3))):
        subject.start(row, allowed)
    logits = torch.zeros(4, 5)
    subject.apply(logits, [7, 1, 2, 3])
    assert [line.isfinite().nonzero().flatten().tolist() for line in logits] == [
        [0, 3],
        [0, 1, 2, 3, 4],
        [0, 4],
        [0, 3],
    ]
    assert len(subject) == 3
    for row in (7, 1, 2):
        subject.end(row)
    subject.start(2, (1,))
    assert len(subject) == 2
    logits = torch.zeros(2, 5)
    subject.apply(logits, [7, 2])
    assert [line.isfinite().sum().item() for line in logits] == [5, 1]


def test_samples_draw_allowed_tokens(tiny_qwen3_vl: Path) -> None:
    subject = engines.engine(tiny_qwen3_vl)
    answers = engines.drain(subject, several(tiny_qwen3_vl, 4)).answers.values()
    assert len(answers) == 4
    assert all(set(answer.token_ids) <= set(ALLOWED) and len(answer.token_ids) == 24 for answer in answers)


def test_preemption_keeps_the_mask(tiny_qwen3_vl: Path) -> None:
    subject = engines.engine(tiny_qwen3_vl)

    def preempt() -> None:
        if subject.load().steps_total % 8 == 0:
            for sequence in list(subject.scheduler.running):
                subject.scheduler.preempt(sequence)

    asked = several(tiny_qwen3_vl, 2)
    interrupted = engines.drain(subject, asked, each_step=preempt).answers
    assert subject.load().preemptions_total > 0
    undisturbed = engines.drain(engines.engine(tiny_qwen3_vl), asked).answers
    assert {name: a.token_ids for name, a in interrupted.items()} == {n: a.token_ids for n, a in undisturbed.items()}


@pytest.mark.parametrize("end", ["abort", "hangup"])
def test_a_mask_goes_with_its_request(end: str, tiny_qwen3_vl: Path) -> None:
    subject = engines.engine(tiny_qwen3_vl)
    subject.requests.submit(3, several(tiny_qwen3_vl, 2))
    while not len(engines.local(subject).runner.allowed):
        subject.step()
    if end == "abort":
        subject.requests.abort(3, "a")
    else:
        subject.requests.hangup(3)
    engines.drain(subject, engines.request(tiny_qwen3_vl, [4], "other", max_tokens=1))
    assert len(engines.local(subject).runner.allowed) == 0
