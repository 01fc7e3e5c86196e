"""Allowed ids: of each row, for all its steps, gone when the row's sequence is."""

from pathlib import Path
from typing import Any

import engines
import msgspec
import pytest
import torch

from saccade.engine.core.step import RowStart
from saccade.engine.executor.batch import RowBuffers
from saccade.engine.executor.logits_processors import RowChanges, add_biases, forbid_stops, keep_allowed
from saccade.protocol.request import EngineRequest, SamplingParams

CPU = torch.device("cpu")
ALLOWED = tuple(range(20, 60))


def several(folder: Path, number: int, **params: Any) -> EngineRequest:
    asked = engines.request(
        folder, [40], **{"allowed_token_ids": ALLOWED, "temperature": 1.3, "seed": 5, "max_tokens": 24, **params}
    )
    return msgspec.structs.replace(asked, num_samples=number)


def start(rows: RowBuffers, allowed: dict[int, tuple[int, ...] | None]) -> None:
    params = {row: SamplingParams(max_tokens=1, allowed_token_ids=ids) for row, ids in allowed.items()}
    rows.start_rows(RowStart(row, row, sampling, 0) for row, sampling in params.items())


def test_rows_keep_allowed_tokens_only() -> None:
    subject = RowBuffers(8, CPU)
    start(subject, {7: (0, 3), 1: None, 2: (4, 4, 0), 3: (0, 3)})
    logits = torch.zeros(4, 5)
    keep_allowed(logits, [7, 1, 2, 3], subject.changes.allowed_ids)
    assert [line.isfinite().nonzero().flatten().tolist() for line in logits] == [
        [0, 3],
        [0, 1, 2, 3, 4],
        [0, 4],
        [0, 3],
    ]
    assert subject.changes.allowed_ids.keys() == {7, 2, 3}
    subject.end_rows((7, 1, 2))
    start(subject, {2: (1,)})
    assert subject.changes.allowed_ids.keys() == {2, 3}
    logits = torch.zeros(2, 5)
    keep_allowed(logits, [7, 2], subject.changes.allowed_ids)
    assert [line.isfinite().sum().item() for line in logits] == [5, 1]


def test_biases_are_made_once_a_row_and_added_to_each_of_its_draws() -> None:
    subject = RowBuffers(8, CPU)
    biases = {7: {0: 1.5, 4: -100.0}, 1: {}, 2: {3: 0.1}}
    params = {row: SamplingParams(max_tokens=1, logit_bias=bias) for row, bias in biases.items()}
    subject.start_rows(RowStart(row, row, sampling, 0) for row, sampling in params.items())
    expected = torch.randn(5, 5)
    logits = expected.clone()
    rows = [7, 1, 2, 7, 3]
    for index, row in enumerate(rows):
        for token_id, bias in biases.get(row, {}).items():
            expected[index, token_id] += torch.tensor(bias)
    for bias in biases.values():
        bias.clear()  # a step that read them would find none
    add_biases(logits, rows, subject.changes.biases)
    assert torch.equal(logits, expected)
    subject.end_rows((7, 2))
    assert not subject.changes.biases
    add_biases(logits, rows, subject.changes.biases)
    assert torch.equal(logits, expected)


def test_stop_ids_are_forbidden_for_short_answers_only() -> None:
    changes = RowChanges(CPU)
    changes.start_row(4, SamplingParams(max_tokens=1, min_tokens=1, stop_token_ids=(1, 3, 9, -1)))
    changes.start_row(5, SamplingParams(max_tokens=1, min_tokens=1))
    changes.start_row(6, SamplingParams(max_tokens=1, stop_token_ids=(0,)))
    logits = torch.zeros(4, 5)
    forbid_stops(logits, [4, 5, 6, 4], [0, 1, 2], changes.stop_ids)
    assert logits.isinf().nonzero().tolist() == [[0, 1], [0, 3]]
    changes.end_row(4)
    assert changes.stop_ids.keys() == {5}


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
    while not engines.local(subject).runner.rows.changes.allowed_ids:
        subject.step()
    if end == "abort":
        subject.requests.abort(3, "a")
    else:
        subject.requests.hangup(3)
    engines.drain(subject, engines.request(tiny_qwen3_vl, [4], "other", max_tokens=1))
    assert not engines.local(subject).runner.rows.changes.allowed_ids
