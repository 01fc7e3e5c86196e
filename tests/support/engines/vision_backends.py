"""Vision attention backends that watch what a tower passes to them. For tests of every family's tower."""

from typing import Any

import numpy as np
import torch

from saccade.nn.backends import torch_sdpa
from saccade.nn.context import Heads, PackedLayout

FIELDS = ("cu_seqlens", "max_seqlen", "sequence_lengths")
"""What the known backends read of a layout: FlashAttention the first two, cuDNN all of them."""


class RecordingBackend(torch_sdpa.VisionAttentionBackend):
    """Attends as torch_sdpa does, requires all FIELDS, and keeps the layout of each call."""

    name = "recording"
    metadata = FIELDS

    def __init__(self) -> None:
        self.layouts: list[PackedLayout] = []

    def packed(self, heads: Heads, layout: PackedLayout, scale: float | None = None) -> torch.Tensor:
        check(layout, len(heads[0]))
        self.layouts.append(layout)
        return super().packed(heads, layout, scale)


def check(layout: PackedLayout, num_patches: int) -> None:
    """The three fields describe the same sequences, which are all *num_patches*; two of them are on the host."""
    lengths = layout.sequence_lengths
    assert isinstance(lengths, tuple)
    assert {type(value) for value in (layout.max_seqlen, *lengths)} == {int}
    assert (min(lengths) > 0, max(lengths), sum(lengths)) == (True, layout.max_seqlen, num_patches)
    assert (layout.cu_seqlens.dtype, layout.cu_seqlens.ndim) == (torch.int32, 1)
    assert np.array_equal(layout.cu_seqlens.numpy(), np.cumsum([0, *lengths]))


class BordersBackend:
    """Attends by the borders that are on the device alone, as a call in a CUDA graph must."""

    name = "borders"
    metadata = FIELDS
    captures_packed = True

    def packed(self, heads: Heads, layout: PackedLayout, scale: float | None = None) -> torch.Tensor:
        q, k, v = heads
        assert (int(layout.cu_seqlens[-1]), int(layout.cu_seqlens.diff().min()) >= 0) == (len(q), True)
        sequence = torch.searchsorted(layout.cu_seqlens[1:], torch.arange(len(q), dtype=torch.int32), right=True)
        same = sequence.unsqueeze(1) == sequence
        heads = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        attended = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=same, scale=scale)
        return attended.squeeze(0).transpose(0, 1).flatten(1)


class UnusedBackend(RecordingBackend):
    """Fails as soon as a tower launches it."""

    def packed(self, *_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError("launched")
