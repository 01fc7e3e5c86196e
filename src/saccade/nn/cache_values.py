"""Values in a paged cache: in the network's dtype, or divided by a scale and stored as float8 (e4m3).

Shapes: S slots of the cache, N tokens; "..." stands for the dimensions of one token's values.
"""

from typing import NamedTuple

import torch


class CacheValues(NamedTuple):
    """One tensor of a layer's cache, [S, ...], and the *scale* of float8 values."""

    slots: torch.Tensor
    scale: float = 1.0

    def write(self, slots_N: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Write *values* [N, ...] to slots int64 [N], and return them as a read would return them.

        So attention has the same result whether it reads a token from the cache or not.
        """
        if self.slots.dtype == values.dtype:
            self.slots.index_copy_(0, slots_N, values)
            return values
        # Torch casts what is too large for float8 to NaN.
        largest = torch.finfo(self.slots.dtype).max
        rounded = (values.float() / self.scale).clamp_(-largest, largest).to(self.slots.dtype)
        _bytes(self.slots).index_copy_(0, slots_N, _bytes(rounded))
        return self._restored(rounded, values.dtype)

    def read(self, slots_N: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the values [N, ...] at slots int64 [N], in the network's *dtype*."""
        if self.slots.dtype == dtype:
            return self.slots.index_select(0, slots_N)
        rounded = _bytes(self.slots).index_select(0, slots_N).view(self.slots.dtype)
        return self._restored(rounded, dtype)

    def _restored(self, rounded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (rounded.float() * self.scale).to(dtype)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """Return float8 values as bytes, which torch can gather and scatter on every device."""
    return values.view(torch.uint8)
