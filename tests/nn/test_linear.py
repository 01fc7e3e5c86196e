"""Linear layers in each backend's layout, against the plain one."""

import pytest
import torch
from torch import nn

from saccade.nn.activation import ACTIVATIONS, IDENTITY
from saccade.nn.backends import KERNELS, PLAIN, TILES, load_backend
from saccade.nn.kernels import tiles
from saccade.nn.linear import Linear

BOTH = [torch.float32, torch.bfloat16]
needs_tiles = pytest.mark.skipif(not tiles.available(), reason="this processor has no AMX")
EVERY = [PLAIN, KERNELS, pytest.param(TILES, marks=needs_tiles)]


def made(in_features: int, partitions: int | tuple[int, ...], dtype: torch.dtype, bias: bool = True) -> Linear:
    """A layer with weights; results are about as large as inputs."""
    random = torch.Generator().manual_seed(1)
    linear = Linear(in_features, partitions, bias)
    for parameter in linear.parameters():
        parameter.data = (torch.randn(parameter.shape, generator=random) * in_features**-0.5).to(dtype)
    return linear


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [1, 8, 300])
def test_packing_changes_no_bit(num_rows: int, bias: bool, dtype: torch.dtype) -> None:
    """What oneDNN lays out, it multiplies as before."""
    linear = made(96, (64, 160), dtype, bias)
    x = torch.randn(num_rows, 96, generator=torch.Generator().manual_seed(num_rows)).to(dtype)
    with torch.inference_mode():
        plain = linear(x)
        linear.pack(load_backend(PLAIN))
        assert torch.equal(linear(x), plain)


@pytest.mark.parametrize("name", EVERY)
def test_only_bfloat16_is_packed_and_its_plain_weight_is_dropped(name: str) -> None:
    full, half = made(64, 64, torch.float32), made(64, 64, torch.bfloat16)
    if name != TILES:
        full.pack(load_backend(name))
    half.pack(load_backend(name))
    assert full.product is None
    assert (half.product is None) == (half.weight.numel() > 0)


@needs_tiles
def test_widths_that_are_no_whole_tiles_are_left_to_onednn() -> None:
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    for widths in ((48, 64), (32, 40)):
        linear = made(*widths, torch.bfloat16)
        plain = linear(x[:, : widths[0]])
        linear.pack(load_backend(TILES))
        with torch.inference_mode():
            assert torch.equal(linear(x[:, : widths[0]]), plain)


@pytest.mark.parametrize("num_rows", [1, 16, 17, 40, 64])
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("activation", ["none", *sorted(ACTIVATIONS)])
@pytest.mark.parametrize("name", EVERY)
def test_activations_and_residuals_are_those_of_float32(
    name: str, activation: str, dtype: torch.dtype, num_rows: int
) -> None:
    if (name, dtype) == (TILES, torch.float32):
        return
    random = torch.Generator().manual_seed(2)
    linear = made(96, 160, dtype)
    x, residual = (4 * torch.randn(num_rows, size, generator=random).to(dtype) for size in (96, 160))
    product = nn.functional.linear(x.float(), linear.weight.float(), linear.bias.float())
    linear.pack(load_backend(name))
    tolerance = {} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-7}
    function = ACTIVATIONS.get(activation, IDENTITY)
    with torch.inference_mode():
        activated, added = linear(x, function), linear.add_to(residual, x)
    torch.testing.assert_close(activated.float(), function.function(product), **tolerance)
    torch.testing.assert_close(added.float(), residual.float() + product, **tolerance)


@needs_tiles
@pytest.mark.parametrize("num_rows", [75, 300])
@pytest.mark.parametrize("bias", [True, False])
def test_a_row_does_not_depend_on_the_others(bias: bool, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on how many there are, nor on the threads that share rows or outputs; NaN stays in its row."""
    linear = made(64, 96, torch.bfloat16, bias)
    linear.pack(load_backend(TILES, 3))
    x = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = torch.get_num_threads()
    alone = torch.cat([linear(row) for row in x.split(1)])
    x[20] = float("nan")
    outputs = []
    for num_threads in (1, 3):
        monkeypatch.setattr("saccade.nn.backends.amx.PART_PRODUCTS", 1)
        torch.set_num_threads(num_threads)
        outputs.append(linear(x))
    torch.set_num_threads(before)
    for output in outputs:
        assert output[20].isnan().all()
        output[20] = alone[20]
        torch.testing.assert_close(output, alone, rtol=0, atol=0)
