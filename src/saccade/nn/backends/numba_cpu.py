"""On a CPU, kernels of our own for what torch does in many small passes; anything else as the plain twin does it.

A decode row's keys and values are read where they lie instead of being gathered first; a norm, a turn of queries and
keys, and a gate are one pass each. Kernels let go of the interpreter, so threads of ours can share their rows.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from saccade.nn.backends import torch_sdpa
from saccade.nn.context import ForwardContext, KvCache, PagedLayout, Turn
from saccade.nn.kernels import rows
from saccade.nn.kernels.paged_attention import attend
from saccade.nn.kernels.words import words

PART_BYTES = 1 << 20
"""Keys and values that are worth a thread: reading them takes several times as long as waking it."""

PART_VALUES = 1 << 19
"""Values of a pass over rows that are."""


P = TypeVar("P")


class Part(NamedTuple):
    """Some decode rows, and their key/value heads from *head* on, *num_heads* of them."""

    rows: slice
    head: int
    num_heads: int


@dataclass(frozen=True, slots=True)
class Decodes:
    """The step's decode rows: block tables int64 [S, M], context lengths int64 [S], threads that may work on them."""

    tables: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    num_threads: int


class Backend(torch_sdpa.Backend):
    """nn.context.Backend for bfloat16 and float32 on a CPU, heads of a multiple of four channels."""

    def __init__(self, num_threads: int = 1) -> None:
        """*num_threads* is the most that a step may have."""
        super().__init__()
        self._caches: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []
        self._split_by_heads = num_threads == 1
        self._pool = ThreadPoolExecutor(num_threads, "kernels")

    def use_caches(self, kv_caches: Sequence[KvCache]) -> None:
        """Look at them as words once, instead of in every step."""
        self._caches = [(words(cache.keys), words(cache.values)) for cache in kv_caches]

    def plan_decodes(self, layout: PagedLayout, dtype: torch.dtype) -> Decodes:
        """Hand over the tables as they are."""
        count = layout.num_decodes
        tables, lengths = layout.block_tables[:count].numpy(), layout.context_lengths[:count].numpy()
        return Decodes(tables, lengths, torch.get_num_threads())

    def decode(self, q_SQD: torch.Tensor, layer: int, context: ForwardContext) -> torch.Tensor:
        """Attend where keys and values lie, in as many parts as they are worth."""
        output = torch.empty_like(q_SQD, memory_format=torch.contiguous_format)
        q, out, (keys, values) = words(q_SQD.contiguous()), words(output), self._caches[layer]
        decodes: Decodes = context.plan.decodes
        _, block_size, num_kv_heads, width = keys.shape
        group, scale = q.shape[1] // num_kv_heads, np.float32(q_SQD.shape[2] ** -0.5)

        def run(part: Part) -> None:
            kernel, rows = attend(part.num_heads, group, block_size, width), part.rows
            kernel(q[rows], keys, values, decodes.tables[rows], decodes.lengths[rows], scale, part.head, out[rows])

        if not self._split_by_heads:
            # So that the kernel of one head is compiled when the engine warms up, not when it is first needed.
            run(Part(slice(0), 0, 1))
            self._split_by_heads = True
        self._share(run, split(decodes, num_kv_heads, 2 * keys[0, 0].nbytes))
        return output.flatten(1)

    def rms_norm(self, x_NE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        """In one pass."""
        output = torch.empty_like(x_NE)
        x, weight, out = words(x_NE), words(weight_E), words(output)
        self._share(lambda part: rows.rms_norm(x[part], weight, np.float32(eps), out[part]), _slices(x))
        return output

    def layer_norm(self, x_NE: torch.Tensor, weight_E: torch.Tensor, bias_E: torch.Tensor, eps: float) -> torch.Tensor:
        """In one pass."""
        output = torch.empty_like(x_NE)
        x, weight, bias, out = (words(tensor) for tensor in (x_NE, weight_E, bias_E, output))
        self._share(lambda part: rows.layer_norm(x[part], weight, bias, np.float32(eps), out[part]), _slices(x))
        return output

    def normalise(
        self, pixels_NI: torch.Tensor, mean_C: torch.Tensor, std_C: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """In one pass."""
        pixels_NCV = pixels_NI.view(pixels_NI.shape[0], len(mean_C), -1)
        output = torch.empty(pixels_NCV.shape, dtype=dtype)
        pixels, mean, std, out = pixels_NCV.numpy(), mean_C.numpy(), std_C.numpy(), words(output)
        self._share(lambda part: rows.normalise(pixels[part], mean, std, out[part]), _slices(out))
        return output.flatten(1)

    def norm_rotate(
        self, x_NHD: torch.Tensor, weight_MD: torch.Tensor, eps: float, turn: Turn, num_kv_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In one pass."""
        num_tokens, _, head_dim = x_NHD.shape
        q_NQD = x_NHD.new_empty(num_tokens, weight_MD.shape[0] - num_kv_heads, head_dim)
        k_NKD = x_NHD.new_empty(num_tokens, num_kv_heads, head_dim)
        x, weight, q, k = words(x_NHD), words(weight_MD), words(q_NQD), words(k_NKD)
        cos, sin = (words(tensor.squeeze(1)) for tensor in turn)

        def run(part: slice) -> None:
            rows.norm_rotate(x[part], weight, np.float32(eps), cos[part], sin[part], q[part], k[part])

        self._share(run, _slices(x))
        return q_NQD, k_NKD

    def rotate_pairs(
        self, x_NHD: torch.Tensor, turn_N1C: torch.Tensor, num_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In one pass."""
        num_tokens, _, head_dim = x_NHD.shape
        q_NQD, k_NQD = x_NHD.new_empty(2, num_tokens, num_heads, head_dim)
        x, q, k = words(x_NHD), words(q_NQD), words(k_NQD)
        cos, sin = (part.contiguous().numpy() for part in torch.view_as_real(turn_N1C.squeeze(1)).unbind(-1))
        self._share(lambda part: rows.rotate_pairs(x[part], cos[part], sin[part], q[part], k[part]), _slices(x))
        return q_NQD, k_NQD

    def gate(self, x_NI: torch.Tensor) -> torch.Tensor:
        """In one pass."""
        output = x_NI.new_empty(x_NI.shape[0], x_NI.shape[1] // 2)
        x, out = words(x_NI), words(output)
        self._share(lambda part: rows.gate(x[part], out[part]), _slices(x))
        return output

    def _share(self, run: Callable[[P], None], parts: list[P]) -> None:
        """Run all *parts*, the first on this thread."""
        others = [self._pool.submit(run, part) for part in parts[1:]]
        run(parts[0])
        for other in others:
            other.result()


def split(decodes: Decodes, num_kv_heads: int, token_bytes: int) -> list[Part]:
    """Share the work out to threads: rows with about as many tokens each, heads where there are fewer rows."""
    num_rows, num_tokens = len(decodes.lengths), int(decodes.lengths.sum())
    count = min(decodes.num_threads, num_tokens * token_bytes // PART_BYTES)
    if count <= 1:
        return [Part(slice(num_rows), 0, num_kv_heads)]
    if num_rows < count:
        return [Part(slice(num_rows), head, 1) for head in range(num_kv_heads)]
    middles = decodes.lengths.cumsum() - decodes.lengths / 2
    shares = [num_tokens * part / count for part in range(1, count)]
    borders = [0, *np.searchsorted(middles, shares).tolist(), num_rows]
    return [Part(slice(begin, end), 0, num_kv_heads) for begin, end in pairwise(borders) if begin < end]


def _slices(x: npt.NDArray[Any]) -> list[slice]:
    """Share rows out to torch's threads."""
    count = min(torch.get_num_threads(), 2 * x.size // PART_VALUES)
    return slices(len(x), count)


def slices(num_rows: int, count: int, multiple: int = 1) -> list[slice]:
    """Cut rows into *count* parts of about the same length, a *multiple* of so many."""
    if count <= 1:
        return [slice(num_rows)]
    size = -(-num_rows // (count * multiple)) * multiple
    return [slice(start, start + size) for start in range(0, num_rows, size)]
