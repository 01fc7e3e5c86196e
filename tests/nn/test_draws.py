"""The kernel that draws tokens, in Triton's interpreter, against plain PyTorch and against each row alone."""

from typing import Any

import numpy as np
import pytest
import torch
from launches import Launches
from tables import table

from saccade.nn import draws, gpu_draws

VOCABULARY, TILE = 200, 128


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_draws, "TILE", TILE)


def logits(num_rows: int) -> torch.Tensor:
    """Rounded, so that many are equal; some are negative, some zero of either sign, some forbidden."""
    drawn = 3 * torch.randn(num_rows, VOCABULARY, generator=torch.Generator().manual_seed(num_rows))
    rounded = (4 * drawn).round() / 4
    rounded[:, ::7] = float("-inf")
    return rounded


def settings(*rows: dict[str, float]) -> Any:
    plain = {"temperature": 1.0, "top_p": 1.0, "limit": VOCABULARY, "min_p": 0.0, "uniform": 0.5}
    return np.array([list({**plain, **row}.values()) for row in rows]).T.copy()


KINDS: list[dict[str, float]] = [
    {}, {"temperature": 0.0}, {"temperature": 0.3}, {"limit": 1}, {"limit": 20}, {"limit": 199}, {"top_p": 0.6},
    {"top_p": 1e-6}, {"top_p": 0.999}, {"min_p": 0.1}, {"min_p": 1.0}, {"limit": 40, "top_p": 0.8},
    {"limit": 12, "top_p": 0.9, "min_p": 0.02, "temperature": 1.7}, {"limit": 5, "min_p": 0.3},
]  # fmt: skip


@pytest.mark.ci
@table("uniforms", [(0.0, 0.37), (0.83, 0.9999)])
def test_draws_equal_the_plain_ones(uniforms: tuple[float, ...]) -> None:
    """With each cut and without; the plain draw is in float64."""
    own = settings(*({**kind, "uniform": uniform} for kind in KINDS for uniform in uniforms))
    x = logits(1).repeat(own.shape[1], 1)
    greedy = x.max(-1).indices
    found = gpu_draws.draw(x.clone(), greedy, own)
    assert found.tolist() == draws.draw(x.clone(), greedy, own).tolist()


@pytest.mark.ci
def test_a_row_s_draw_does_not_depend_on_the_others() -> None:
    own = settings(*({**kind, "uniform": index / len(KINDS)} for index, kind in enumerate(KINDS)))
    x = logits(len(KINDS))
    greedy = x.max(-1).indices
    together = gpu_draws.draw(x, greedy, own).tolist()
    alone = [gpu_draws.draw(x[row : row + 1], greedy[row : row + 1], own[:, row : row + 1].copy()) for row in range(6)]
    assert together[:6] == [one.item() for one in alone]


def test_equal_logits_are_cut_together() -> None:
    """The third of five equal logits is within top_k, so all five are; no other token is drawn."""
    x = torch.full((10, VOCABULARY), -1.0)
    x[:, 3:8] = 2.0
    own = settings(*({"limit": 3, "uniform": index / 10} for index in range(10)))
    found = gpu_draws.draw(x, torch.zeros(10, dtype=torch.int64), own).tolist()
    assert found == [3, 3, 4, 4, 5, 5, 6, 6, 7, 7]


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_row_without_possible_tokens_takes_the_greedy_one() -> None:
    x = torch.full((1, VOCABULARY), float("-inf"))
    assert gpu_draws.draw(x, torch.tensor([9]), settings({"top_p": 0.5, "limit": 3})).tolist() == [9]


def test_a_batch_is_drawn_in_one_launch() -> None:
    x, counter = logits(len(KINDS)), Launches()
    greedy, own = x.max(-1).indices, settings(*KINDS)
    with torch.no_grad(), counter:
        gpu_draws.draw(x, greedy, own)
    assert counter.names == ["draw_kernel"]


def test_a_cpu_and_a_gpu_without_triton_draw_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert draws.fastest(torch.device("cpu")) is draws.draw
    assert draws.fastest(torch.device("cuda")) is gpu_draws.draw
    monkeypatch.setitem(__import__("sys").modules, "saccade.nn.gpu_draws", None)
    assert draws.fastest(torch.device("cuda")) is draws.draw
