"""An image that is encoded beside decodes, some layers a step: equal features and answers, and nothing is left."""

from pathlib import Path
from typing import Any

import engines
import pytest
import torch

from saccade.engine.loop import Engine
from saccade.errors import InternalError
from saccade.protocol.request import EngineRequest

pytestmark = pytest.mark.ci

WIDE = (1, 6, 16)
ONE_LAYER = {"encode_budget_patches": 4}
"""A quarter of it, with decodes, is less than a layer of WIDE."""


def with_decode(folder: Path, **settings: Any) -> Engine:
    """An engine in which a sequence decodes for long."""
    subject = engines.engine(folder, **settings)
    subject.requests.submit(0, engines.request(folder, [9], "decoding", 5, max_tokens=60))
    for _ in range(3):
        subject.step()
    return subject


def with_image(folder: Path) -> EngineRequest:
    return engines.request(folder, [5, (WIDE, 1), 9], "image", 1, max_tokens=8)


def features(subject: Engine) -> torch.Tensor:
    [found] = engines.local(subject).runner.encoder_outputs.values()
    return found


@pytest.mark.parametrize("is_ahead", [False, True])
def test_features_and_answers_are_those_of_a_whole_image(tiny_qwen3_vl: Path, is_ahead: bool) -> None:
    whole, cut = (with_decode(tiny_qwen3_vl, async_scheduling=is_ahead, **settings) for settings in ({}, ONE_LAYER))
    spec = engines.module(cut).spec
    expected, found = (engines.drain(one, with_image(tiny_qwen3_vl)) for one in (whole, cut))
    assert found.steps >= expected.steps
    assert torch.equal(features(cut), features(whole))
    for name, answer in expected.answers.items():
        assert found.answers[name].token_ids == answer.token_ids
    assert cut.load().encoded_items_total == 1
    assert cut.load().encoded_patches_total == spec.encode_cost(WIDE)
    assert engines.is_idle(cut)


def test_decodes_go_on_while_an_image_is_encoded(tiny_qwen3_vl: Path) -> None:
    subject = with_decode(tiny_qwen3_vl, **ONE_LAYER)
    subject.requests.submit(0, with_image(tiny_qwen3_vl))
    for _ in range(engines.module(subject).spec.num_encoder_layers + 1):  # the projector comes alone
        assert subject.load().encoded_items_total == 0
        [frame] = subject.step().values()
        assert [delta.request_id for delta in frame.deltas] in (["decoding"], ["decoding", "image"])
    assert subject.load().encoded_items_total == 1


def test_an_aborted_image_leaves_nothing(tiny_qwen3_vl: Path) -> None:
    subject = with_decode(tiny_qwen3_vl, **ONE_LAYER)
    subject.requests.submit(0, with_image(tiny_qwen3_vl))
    subject.step()
    runner = engines.local(subject).runner
    assert runner.encoder.num_paused == 1
    for name in ("image", "decoding"):
        subject.requests.abort(0, name)
    while subject.has_work:
        subject.step()
    assert runner.encoder.num_paused == 0
    assert engines.is_idle(subject)


def test_a_step_that_fails_fails_who_waits_for_its_image(tiny_qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = with_decode(tiny_qwen3_vl, **ONE_LAYER)
    subject.requests.submit(0, with_image(tiny_qwen3_vl))
    subject.step()
    block = engines.module(subject).visual.blocks[1]

    def failing(*_: Any) -> None:
        raise ArithmeticError

    with monkeypatch.context() as patch:
        patch.setattr(block, "forward", failing)
        outcome = engines.drain(subject)
    for name in ("decoding", "image"):
        failure = outcome.answers[name].failure
        assert failure is not None
        assert failure.code == InternalError.code
    assert engines.local(subject).runner.encoder.num_paused == 0
    engines.drain(subject, with_image(tiny_qwen3_vl))
    assert engines.is_idle(subject)
