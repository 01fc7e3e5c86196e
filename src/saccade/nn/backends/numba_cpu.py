"""On a CPU, kernels of our own for what torch does in many small passes; anything else as the plain twin does it.

A decode row's keys and values are read where they lie instead of being gathered first; a norm, a turn of queries and
keys, and a gate are one pass each. Torch's threads share rows, where they are worth it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from saccade.nn.backends import torch_sdpa
from saccade.nn.context import ForwardContext, KvCache, PagedLayout, Turn
from saccade.nn.kernels import rows
from saccade.nn.kernels.paged_attention import attend, room_bytes
from saccade.nn.kernels.team import float_bits
from saccade.nn.kernels.words import WORDS

PART_BYTES = 1 << 18
"""Keys and values that are worth a thread."""

PART_VALUES = 1 << 14
"""Values of a pass over rows that are."""


class Part(NamedTuple):
    """Decode rows from *begin* to *end*, and *num_heads* of their key/value heads from *head* on."""

    begin: int
    end: int
    head: int
    num_heads: int


@dataclass(frozen=True, slots=True)
class Decodes:
    """The step's decode rows: block tables int64 [S, M], context lengths int64 [S], and who does what.

    Of *parts* int64 [P, 4], as Part has them, all have *part_heads* heads.
    """

    tables: torch.Tensor
    lengths: torch.Tensor
    parts: npt.NDArray[np.int64]
    part_heads: int
    num_threads: int


class Backend(torch_sdpa.Backend):
    """nn.context.Backend for bfloat16 and float32 on a CPU, heads of a multiple of four channels.

    All tensors of a call are of one dtype; weights, biases and turns lie without gaps, for kernels see addresses alone.
    """

    def __init__(self, num_threads: int = 1) -> None:
        """*num_threads* is the most that a step may have."""
        super().__init__()
        self._num_threads = num_threads
        self._keys = torch.empty(0)

    def use_caches(self, kv_caches: Sequence[KvCache]) -> None:
        """They come with every step; all have the shape of the first."""
        self._keys = kv_caches[0].keys

    def plan_decodes(self, layout: PagedLayout, dtype: torch.dtype) -> Decodes:
        """Share them out, once for all layers."""
        tables, lengths = layout.block_tables[: layout.num_decodes], layout.context_lengths[: layout.num_decodes]
        num_kv_heads, head_dim = self._keys.shape[2:]
        token_bytes = 2 * num_kv_heads * head_dim * dtype.itemsize
        num_threads = torch.get_num_threads()
        parts = split(lengths.numpy(), num_threads, num_kv_heads, token_bytes)
        return Decodes(tables, lengths, np.array(parts, np.int64), parts[0].num_heads, num_threads)

    def decode(self, q_SQD: torch.Tensor, layer: int, context: ForwardContext) -> torch.Tensor:
        """Attend where keys and values lie."""
        decodes: Decodes = context.plan.decodes
        keys, values = context.kv_caches[layer]
        num_blocks, block_size, num_kv_heads, head_dim = keys.shape
        num_rows, num_heads, _ = q_SQD.shape
        shape = (num_heads // num_kv_heads, block_size, head_dim // 2)
        if self._num_threads > 1:
            # So that this one is compiled when the engine warms up, not when it is first needed.
            attend(WORDS[q_SQD.dtype], 1, *shape)
        q_SQD = q_SQD.contiguous()
        output = torch.empty_like(q_SQD)
        arguments = (
            q_SQD.data_ptr(), num_rows, output.data_ptr(),
            keys.data_ptr(), values.data_ptr(), num_blocks, num_kv_heads,
            decodes.tables.data_ptr(), decodes.tables.shape[1], decodes.lengths.data_ptr(),
            float_bits(head_dim**-0.5), decodes.parts.ctypes.data, len(decodes.parts),
        )  # fmt: skip
        kernel = attend(WORDS[q_SQD.dtype], decodes.part_heads, *shape)
        num_tokens = decodes.tables.shape[1] * block_size
        room = room_bytes(decodes.part_heads * shape[0], head_dim // 2, num_tokens)
        kernel(arguments, min(decodes.num_threads, len(decodes.parts)), room)
        return output.flatten(1)

    def rms_norm(self, x_NE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        """In one pass."""
        x_NE = x_NE.contiguous()
        output = torch.empty_like(x_NE)
        num_rows, width = x_NE.shape
        arguments = (x_NE.data_ptr(), num_rows, width // 2, weight_E.data_ptr(), float_bits(eps), output.data_ptr())
        rows.rms_norm(WORDS[x_NE.dtype])(arguments, _num_threads(output))
        return output

    def layer_norm(self, x_NE: torch.Tensor, weight_E: torch.Tensor, bias_E: torch.Tensor, eps: float) -> torch.Tensor:
        """In one pass."""
        x_NE = x_NE.contiguous()
        output = torch.empty_like(x_NE)
        num_rows, width = x_NE.shape
        arguments = (
            x_NE.data_ptr(), num_rows, width // 2, weight_E.data_ptr(), bias_E.data_ptr(), float_bits(eps),
            output.data_ptr(),
        )  # fmt: skip
        rows.layer_norm(WORDS[x_NE.dtype])(arguments, _num_threads(output))
        return output

    def normalise(
        self, pixels_NI: torch.Tensor, mean_C: torch.Tensor, std_C: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """In one pass."""
        pixels_NI = pixels_NI.contiguous()
        output = torch.empty(pixels_NI.shape, dtype=dtype)
        num_rows, num_values = pixels_NI.shape
        num_channels = len(mean_C)
        arguments = (
            pixels_NI.data_ptr(), num_rows, num_channels, num_values // num_channels // 2,
            mean_C.data_ptr(), std_C.data_ptr(), output.data_ptr(),
        )  # fmt: skip
        rows.normalise(WORDS[dtype])(arguments, _num_threads(output))
        return output

    def norm_rotate(
        self, x_NHD: torch.Tensor, weight_MD: torch.Tensor, eps: float, turn: Turn, num_kv_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In one pass."""
        x_NHD = x_NHD.contiguous()
        num_rows, num_heads, head_dim = x_NHD.shape
        num_q_heads = weight_MD.shape[0] - num_kv_heads
        q_NQD = x_NHD.new_empty(num_rows, num_q_heads, head_dim)
        k_NKD = x_NHD.new_empty(num_rows, num_kv_heads, head_dim)
        cos, sin = turn
        arguments = (
            x_NHD.data_ptr(), num_rows, num_heads, head_dim // 2, weight_MD.data_ptr(), float_bits(eps),
            cos.data_ptr(), sin.data_ptr(), q_NQD.data_ptr(), num_q_heads, k_NKD.data_ptr(), num_kv_heads,
        )  # fmt: skip
        rows.norm_rotate(WORDS[x_NHD.dtype])(arguments, _num_threads(x_NHD))
        return q_NQD, k_NKD

    def rotate_pairs(
        self, x_NHD: torch.Tensor, turn_N1C: torch.Tensor, num_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In one pass."""
        x_NHD = x_NHD.contiguous()
        num_rows, all_heads, head_dim = x_NHD.shape
        q_NQD, k_NQD = (x_NHD.new_empty(num_rows, num_heads, head_dim) for _ in range(2))
        arguments = (
            x_NHD.data_ptr(), num_rows, all_heads, head_dim // 2, turn_N1C.data_ptr(),
            q_NQD.data_ptr(), k_NQD.data_ptr(), num_heads,
        )  # fmt: skip
        rows.rotate_pairs(WORDS[x_NHD.dtype])(arguments, _num_threads(x_NHD))
        return q_NQD, k_NQD

    def gate(self, x_NI: torch.Tensor) -> torch.Tensor:
        """In one pass."""
        x_NI = x_NI.contiguous()
        num_rows, width = x_NI.shape[0], x_NI.shape[1] // 2
        output = x_NI.new_empty(num_rows, width)
        rows.gate(WORDS[x_NI.dtype])((x_NI.data_ptr(), num_rows, width // 2, output.data_ptr()), _num_threads(x_NI))
        return output


def _num_threads(x: torch.Tensor) -> int:
    """Return how many threads a pass over *x* is worth."""
    return min(torch.get_num_threads(), x.numel() // PART_VALUES)


def split(lengths_S: npt.NDArray[np.int64], num_threads: int, num_kv_heads: int, token_bytes: int) -> list[Part]:
    """Share decode rows out to threads: rows with about as many tokens each, heads where there are fewer rows."""
    num_rows, num_tokens = len(lengths_S), int(lengths_S.sum())
    count = min(num_threads, num_tokens * token_bytes // PART_BYTES)
    if count <= 1:
        return [Part(0, num_rows, 0, num_kv_heads)]
    if num_rows < count:
        return [Part(0, num_rows, head, 1) for head in range(num_kv_heads)]
    middles = lengths_S.cumsum() - lengths_S / 2
    shares = [num_tokens * part / count for part in range(1, count)]
    borders = [0, *np.searchsorted(middles, shares).tolist(), num_rows]
    return [Part(begin, end, 0, num_kv_heads) for begin, end in pairwise(borders) if begin < end]
