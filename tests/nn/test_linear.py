"""The packed linear against the plain one."""

import pytest
import torch
from torch import nn

from saccade.nn.linear import Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [1, 8, 300])
def test_packing_changes_no_bit(num_rows: int, bias: bool, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(num_rows)
    linear = Linear(96, (64, 160), bias).to(dtype)
    for parameter in linear.parameters():
        nn.init.normal_(parameter, generator=random)
    x = torch.randn(num_rows, 96, generator=random).to(dtype)
    with torch.inference_mode():
        plain = linear(x)
        linear.pack()
        assert torch.equal(linear(x), plain)


def test_only_bfloat16_is_packed_and_its_plain_weight_is_dropped() -> None:
    full, half = Linear(64, 64), Linear(64, 64).bfloat16()
    full.pack()
    half.pack()
    assert full.packed is None
    assert (half.packed is None) == (half.weight.numel() > 0)
