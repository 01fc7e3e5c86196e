"""The time between two tokens of an answer, by an engine whose clock is the modelled cost of its steps."""

from collections import deque
from pathlib import Path
from typing import Any

import engines
import msgspec
import pytest
from tables import table

from saccade.engine.core.step import SamplingInput, StepInput, StepOutput
from saccade.engine.loop import Engine
from saccade.protocol.request import Grammar

pytestmark = pytest.mark.ci

WIDE = (1, 6, 16)
SECONDS = 0.5
OF_STEP, OF_TOKEN, OF_PATCH_LAYER = 0.1, 0.01, 0.002
"""A prompt of 200 tokens would take 2 s, a layer of WIDE 0.19 s."""


class Clock:
    """Goes on with each step by its modelled cost, and notes the cost of each step with decodes."""

    def __init__(self, subject: Engine) -> None:
        self.now = 0.0
        self.steps: list[float] = []
        self._launched: deque[tuple[float, float]] = deque()
        self._layers = engines.module(subject).spec.num_encoder_layers + 1  # and the projector
        self._grids: dict[int, tuple[int, int]] = {}
        self._launch, self._collect = subject.executor.launch, subject.executor.collect_output
        subject.clock = lambda: self.now  # type: ignore[assignment]
        subject.executor.launch, subject.executor.collect_output = self.launch, self.collect  # type: ignore[method-assign]

    def launch(self, step: StepInput, sampling: SamplingInput) -> None:
        decodes = [chunk for chunk in step.chunks if chunk.num_tokens == 1 + chunk.num_proposed]
        tokens = sum(chunk.num_tokens for chunk in step.chunks) - sum(chunk.num_tokens for chunk in decodes)
        self._grids |= {one.output_id: (one.grid[1] * one.grid[2], self._layers) for one in step.images}
        sliced = {one.output_id: one.num_layers for one in step.slices}
        patch_layers = 0
        for output_id in {*sliced, *(one.output_id for one in step.images)}:
            patches, left = self._grids[output_id]
            layers = sliced.get(output_id) or left
            self._grids[output_id] = patches, left - layers
            patch_layers += patches * layers
        encode_seconds = OF_PATCH_LAYER * patch_layers
        seconds = OF_STEP + OF_TOKEN * tokens + encode_seconds
        self._launched.append((seconds, encode_seconds))
        if decodes:
            self.steps.append(seconds)
        self._launch(step, sampling)

    def collect(self) -> StepOutput:
        seconds, encode_seconds = self._launched.popleft()
        self.now += seconds
        return msgspec.structs.replace(self._collect(), encode_seconds=encode_seconds)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_prompts_and_images_leave_answers_their_time(tiny_qwen3_vl: Path, is_ahead: bool) -> None:
    parts: list[list[Any]] = [[200], [5, (WIDE, 1), 90, (WIDE, 2), 9], [150]]
    expected = engines.drain(
        engines.engine(tiny_qwen3_vl),
        *(engines.request(tiny_qwen3_vl, one, str(i), i, max_tokens=4) for i, one in enumerate(parts)),
    )
    subject = engines.engine(tiny_qwen3_vl, max_inter_token_latency=SECONDS, async_scheduling=is_ahead)
    clock = Clock(subject)
    subject.requests.submit(0, engines.request(tiny_qwen3_vl, [40], "decoding", 9, max_tokens=120))
    for _ in range(4):
        subject.step()
    found = engines.drain(
        subject, *(engines.request(tiny_qwen3_vl, one, str(i), i, max_tokens=4) for i, one in enumerate(parts))
    )
    for name, answer in expected.answers.items():
        assert found.answers[name].token_ids == answer.token_ids
    # The first layer of an image comes before its cost is known.
    assert max(clock.steps) <= 1.5 * SECONDS
    assert engines.is_idle(subject)


def longest_gap(subject: Engine, clock: Clock, names: set[str]) -> float:
    """Run until the answers of *names* have ended, and return the longest time between two tokens of one of them."""
    last: dict[str, float] = {}
    longest = 0.0
    while names:
        for delta in (
            delta for frame in subject.step().values() for delta in frame.deltas if delta.request_id in names
        ):
            longest = max(longest, clock.now - last.get(delta.request_id, clock.now))
            last[delta.request_id] = clock.now
            if delta.finish_reason is not None:
                names = names - {delta.request_id}
    return longest


@table(
    ("is_ahead", "grammar", "num_steps"),
    [
        (False, None, 1),
        (True, None, 1),
        (False, Grammar("regex", "[a-z]{60}"), 1),
        (True, Grammar("regex", "[a-z]{60}"), 2),  # its mask waits for the step in flight, so it has every second step
    ],
)
def test_an_answer_that_just_began_has_its_time_too(
    tiny_qwen3_vl: Path, is_ahead: bool, grammar: Grammar | None, num_steps: int
) -> None:
    subject = engines.engine(tiny_qwen3_vl, max_inter_token_latency=SECONDS, async_scheduling=is_ahead)
    clock = Clock(subject)
    engines.drain(subject, engines.request(tiny_qwen3_vl, [40], "first", 9, max_tokens=3))
    subject.requests.submit(0, engines.request(tiny_qwen3_vl, [9], "answer", 1, max_tokens=30, grammar=grammar))
    while not subject.scheduler.running:
        subject.step()
    subject.requests.submit(0, engines.request(tiny_qwen3_vl, [200, (WIDE, 1), 9], "image", 2, max_tokens=1))
    assert longest_gap(subject, clock, {"answer"}) <= 1.5 * SECONDS * num_steps


def test_eight_images_at_once_leave_an_answer_its_time(tiny_qwen3_vl: Path) -> None:
    """One of them is cached, and proposals are verified beside the slices of the others."""
    images = [
        engines.request(tiny_qwen3_vl, [5, (WIDE, number % 7), 9], f"image {number}", number, max_tokens=3)
        for number in range(8)
    ]
    expected = engines.drain(engines.engine(tiny_qwen3_vl, max_num_seqs=10), *images)
    ngram = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1}'
    subject = engines.engine(tiny_qwen3_vl, max_num_seqs=10, max_inter_token_latency=SECONDS, speculative_config=ngram)
    clock = Clock(subject)
    engines.drain(subject, images[7])  # the cache has the image of "image 0" then
    clock.steps.clear()
    subject.requests.submit(0, engines.request(tiny_qwen3_vl, [40], "answer", 9, max_tokens=200))
    for _ in range(4):
        subject.step()
    found = engines.drain(subject, *images)
    for name, answer in expected.answers.items():
        assert found.answers[name].token_ids == answer.token_ids
    assert max(clock.steps) <= 1.5 * SECONDS
    assert subject.load().encoded_items_total == 7
    assert engines.is_idle(subject)
