"""Computations that pause after each layer."""

import torch

from saccade.nn.layerwise import Layerwise, advance, complete


def doubled(times: int) -> Layerwise:
    x = torch.ones(1)
    for _ in range(times):
        x = x + x
        yield
    return x


def test_it_goes_on_where_it_paused() -> None:
    one = doubled(5)
    assert advance(one, 2) is None
    assert advance(one, 3) is None
    last = advance(one, 1)
    assert last is not None
    assert last.item() == 32


def test_the_rest_runs_at_once() -> None:
    one = doubled(5)
    assert advance(one, 1) is None
    assert complete(one).item() == 32


def test_more_layers_than_there_are_end_it() -> None:
    last = advance(doubled(2), 9)
    assert last is not None
    assert last.item() == 4
