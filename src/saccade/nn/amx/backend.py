"""Attention of vision towers in bfloat16 on a CPU with AMX, shared among torch's OpenMP threads.

PyTorch's own attention multiplies with AMX as well, but passes over the scores several times between its two products.
OpenMP's threads spin while they wait and need no interpreter; a Python thread takes hundreds of microseconds to wake.
The entry point is GCC's for `#pragma omp parallel` (libgomp's manual, "Implementing PARALLEL construct"); the runtimes
of LLVM and Intel have it too.
"""

import ctypes
import os

import numpy as np
import torch

from saccade.nn.amx.kernel import ARGUMENTS, attention, workspace_bytes
from saccade.nn.backends import torch_sdpa
from saccade.nn.backends.workload import Workload, not_on_amx
from saccade.nn.context import Heads, PackedLayout

PART_SCORES = 1 << 18
"""The number of scores per additional thread."""

PARTS_PER_THREAD = 2
"""More than one, so that the other threads take work from a thread that is delayed."""


class OpenMP:
    """Runs a C function on several threads. A process forked later has none of these threads, and runs it on one."""

    def __init__(self) -> None:
        # Found through torch's library, so it is the runtime that torch itself is linked to; some builds have none.
        self._parallel = getattr(ctypes.CDLL(torch._C.__file__), "GOMP_parallel", None)
        self._process = os.getpid()

    def run(self, address: int, arguments: int, num_threads: int) -> None:
        """Make up to *num_threads* threads call void (*address)(arguments), each once, and wait for them."""
        if num_threads > 1 and self._parallel is not None and os.getpid() == self._process:
            self._parallel(ctypes.c_void_p(address), ctypes.c_void_p(arguments), num_threads, 0)
        else:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(arguments)


class VisionAttentionBackend:
    """Implements nn.context.VisionAttentionBackend with AMX. PyTorch computes heads of an odd width."""

    name = "amx"
    metadata = ("max_seqlen", "sequence_lengths")
    captures_packed = False

    @staticmethod
    def unavailable(workload: Workload) -> str | None:
        """Return why this backend cannot compute *workload*; None if it can."""
        return not_on_amx(workload)

    def __init__(self) -> None:
        self._kernel = attention()
        self._openmp = OpenMP()
        self._plain = torch_sdpa.VisionAttentionBackend()

    def packed(self, heads_NQD: Heads, layout: PackedLayout, scale: float | None = None) -> torch.Tensor:
        """Attend within each sequence."""
        head_dim = heads_NQD[0].shape[2]
        if head_dim % 2:
            return self._plain.packed(heads_NQD, layout, scale)
        # The kernel takes gaps of whole pairs between tokens, and none between heads.
        q_NQD, k_NQD, v_NQD = (
            x if x.stride()[1:] == (head_dim, 1) and x.stride(0) % 2 == 0 else x.contiguous() for x in heads_NQD
        )
        output_NQD = q_NQD.new_empty(q_NQD.shape)
        sequences = (tensor.split(layout.sequence_lengths) for tensor in (q_NQD, k_NQD, v_NQD, output_NQD))
        for q, k, v, output in zip(*sequences, strict=True):
            self._attend(q, k, v, output, head_dim**-0.5 if scale is None else scale)
        return output_NQD.flatten(1)

    def _attend(
        self, q_NQD: torch.Tensor, k_LQD: torch.Tensor, v_LQD: torch.Tensor, output_NQD: torch.Tensor, scale: float
    ) -> None:
        num_queries, num_heads, head_dim = q_NQD.shape
        length = len(k_LQD)
        num_threads = max(1, min(torch.get_num_threads(), num_heads * num_queries * length // PART_SCORES))
        # Each part of a head lays out the head's keys and values, so heads are split only if they are too few.
        num_parts = -(-PARTS_PER_THREAD * num_threads // num_heads) if num_threads > 1 else 1
        num_bytes = workspace_bytes(length, head_dim // 2)
        workspace = q_NQD.new_empty(num_threads * num_bytes + 64, dtype=torch.uint8)
        start = workspace.data_ptr() + -workspace.data_ptr() % 64
        tensors = (q_NQD, k_LQD, v_LQD, output_NQD)
        addresses, strides = (x.data_ptr() for x in tensors), (x.stride(0) // 2 for x in tensors[:3])
        sizes = (num_queries, length, num_heads, head_dim // 2, 0, num_parts, start, num_bytes)
        arguments = np.array((0, 0, *addresses, *strides, *sizes), np.int64)
        arguments.view(np.float64)[ARGUMENTS.index("scale")] = scale
        self._openmp.run(self._kernel.address, arguments.ctypes.data, num_threads)
