"""Weights that several threads prepare at the same time."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from saccade.nn.cores import map_on_cores
from saccade.nn.layers import Linear, use_operations
from saccade.nn.ops import PlainLinear, resolve

CPU = torch.device("cpu")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_each_thread_has_a_weight_of_its_own() -> None:
    """They run at the same time, results are in order, and the caller's number of threads stays."""
    together = threading.Barrier(2, timeout=60)

    def work(number: int) -> tuple[int, int]:
        together.wait()
        return number, torch.get_num_threads()

    assert list(map_on_cores(work, range(6), CPU)) == [(number, 1) for number in range(6)]
    assert torch.get_num_threads() == 2
    here = {threading.current_thread()}
    assert set(map_on_cores(lambda _: threading.current_thread(), [0, 1], torch.device("meta"))) == here


@pytest.mark.usefixtures("two_threads")
def test_layers_are_packed_at_the_same_time() -> None:
    """They compute what they compute if they are packed one after the other."""
    together, packers = threading.Barrier(2, timeout=60), set[threading.Thread]()

    def pack(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> PlainLinear:
        together.wait()
        packers.add(threading.current_thread())
        return PlainLinear(weight_OI, bias_O)

    network = nn.ModuleList(Linear(32, 16) for _ in range(4)).requires_grad_(False)
    for parameter in network.parameters():
        parameter.normal_()
    x_NI = torch.randn(3, 32)
    expected = [functional.linear(x_NI, layer.weight, layer.bias) for layer in network]
    assert use_operations(network, replace(resolve("cpu", torch.float32), pack_linear=pack)) == []
    assert len(packers) == 2
    assert all(torch.equal(layer(x_NI), one) for layer, one in zip(network, expected, strict=True))
