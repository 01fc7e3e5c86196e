"""The sampler: what may be drawn, how often, and that a draw depends on (seed, index) alone."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from saccade.engine.sampler import Sampler, uniforms
from saccade.protocol.request import SamplingParams

CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.5, -1.0, 9.0])
FORBIDDEN = 5


def row(seed: int = 0, index: int = 0, **params: Any) -> Any:
    return SimpleNamespace(
        seed=seed,
        num_generated_tokens=index,
        sampling=SamplingParams(**{"max_tokens": 1, "temperature": 1.0, **params}),
    )


def draw(rows: list[Any], logits: torch.Tensor = LOGITS) -> list[int]:
    return Sampler((FORBIDDEN,), CPU)(logits.repeat(len(rows), 1), rows)


@pytest.mark.parametrize(
    ("params", "possible"),
    [
        ({"temperature": 0}, {0}),
        ({"temperature": 1e-40}, {0}),
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 3}, {0, 1, 2, 3}),  # equal logits stay together
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.01}, {0}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.85}, {0, 1, 2, 3}),
        ({"top_p": 0.6, "top_k": 1}, {0}),
        ({"top_p": 0.7, "top_k": 2}, {0}),  # 0 alone has 0.73 of what top_k leaves
    ],
)
def test_possible_tokens(params: dict[str, Any], possible: set[int]) -> None:
    assert set(draw([row(seed, **params) for seed in range(400)])) == possible


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_shares_follow_the_softmax(temperature: float) -> None:
    drawn = draw([row(seed=3, index=index, temperature=temperature) for index in range(20000)])
    shares = np.bincount(drawn, minlength=6) / len(drawn)
    expected = (LOGITS[:5] / temperature).softmax(-1).numpy()
    assert np.abs(shares[:5] - expected).max() < 0.015


def test_a_draw_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(0))
    kinds: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 50, "top_p": 0.9}, {"temperature": 0}]
    rows = [row(seed=index * 7, index=index, **kinds[index % 5]) for index in range(40)]
    sampler = Sampler((FORBIDDEN,), CPU)
    together = sampler(logits.clone(), rows)
    alone = [sampler(logits[index : index + 1].clone(), [rows[index]])[0] for index in range(40)]
    assert together == alone
    assert len(set(together)) > 20


def test_uniforms_are_spread_and_fixed() -> None:
    numbers = uniforms([2**64 - 1] * 5000, range(5000))
    assert 0 <= numbers.min() <= numbers.max() < 1
    assert np.abs(np.histogram(numbers, 10, (0, 1))[0] - 500).max() < 100
    assert uniforms([1, 2], [3, 3]).tolist() != uniforms([2, 1], [3, 3]).tolist()
    # Seeds are a promise to clients: these numbers must not change between releases.
    assert uniforms([42, 42], [0, 1]).tolist() == [0.34329192209867343, 0.9504380907279257]
