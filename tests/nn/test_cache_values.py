"""Values of a cache in the network's dtype, and in float8."""

import pytest
import torch
from tables import table

from saccade.nn.cache_values import CacheValues

SLOTS = torch.tensor([4, 0, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_network_s_own_dtype_is_kept(dtype: torch.dtype) -> None:
    cache, values = CacheValues(torch.zeros(5, 2, 3, dtype=dtype)), torch.randn(3, 2, 3).to(dtype)
    assert cache.write(SLOTS, values) is values
    assert torch.equal(cache.read(SLOTS, dtype), values)
    assert not cache.slots[[1, 3]].any()


@table("scale", [1.0, 0.125, 3.0])
@table("dtype", [torch.float32, torch.bfloat16])
def test_float8_is_rounded_once_and_read_back_equal(dtype: torch.dtype, scale: float) -> None:
    cache = CacheValues(torch.zeros(5, 2, 3, dtype=torch.float8_e4m3fn), scale)
    values = torch.randn(3, 2, 3).to(dtype)
    written = cache.write(SLOTS, values)
    assert written.dtype == dtype
    assert torch.equal(cache.read(SLOTS, dtype), written)
    torch.testing.assert_close(written, values, atol=2**-10 * scale, rtol=2**-4 + 2**-8)
    assert torch.equal(cache.read(torch.tensor([1, 3]), dtype), torch.zeros(2, 2, 3, dtype=dtype))


def test_large_values_saturate() -> None:
    """Torch's own cast makes NaN of them."""
    cache = CacheValues(torch.zeros(1, 4, dtype=torch.float8_e4m3fn), 2.0)
    written = cache.write(torch.tensor([0]), torch.tensor([[1e6, -1e6, 896.0, 895.0]]))
    assert written.tolist() == [[896.0, -896.0, 896.0, 896.0]]
