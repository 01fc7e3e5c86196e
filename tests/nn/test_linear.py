"""The packed linear against the plain one."""

import pytest
import torch
from torch import nn

from saccade.nn.linear import ACTIVATIONS, Linear


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_and_residuals_are_those_of_float32(name: str, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(1)
    linear = Linear(96, 160)
    for parameter in linear.parameters():
        parameter.data = (torch.randn(parameter.shape, generator=random) / 8).to(dtype)
    x, residual = (torch.randn(40, size, generator=random).to(dtype) for size in (96, 160))
    product = nn.functional.linear(x.float(), linear.weight.float(), linear.bias.float())
    linear.pack()
    tolerance = {} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-7}
    with torch.inference_mode():
        activated, added = linear(x, ACTIVATIONS[name]), linear.add_to(residual, x)
    torch.testing.assert_close(activated.float(), ACTIVATIONS[name].function(product), **tolerance)
    torch.testing.assert_close(added.float(), residual.float() + product, **tolerance)
