"""What Triton makes of Saccade's kernels for GPUs that need not be there: `python -m benchmarks.triton_kernels`.

Every kernel is launched by its own caller, with tensors of real models' shapes. So Triton specialises it as a launch
on a GPU would: by the alignment of pointers and numbers, by numbers that are 1, by constants. Then it compiles, and
nothing runs. TRITON_INTERPRET must not be set. `--json` prints rows for tests; `--few` takes one launch of each kernel.
"""

import argparse
import io
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from saccade.nn import gpu, gpu_draws, grouped_experts
from saccade.nn.backends.triton_attention import AttentionBackend, VisionAttentionBackend
from saccade.nn.context import ForwardContext, KvCache, PackedLayout, PagedLayout, Scoring
from saccade.nn.libraries import Unavailable, attempt
from saccade.nn.ops import GELU_TANH, SILU
from saccade.nn.rope import cos_sin_pairs

CAPABILITIES = (80, 90, 100)
KIB = 1 << 10
MOST_SHARED = MappingProxyType({80: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB})
"""Bytes that a block may use. Cards of 8.6 and 8.9 run what is compiled for 8.0, and have less than an A100."""
BLOCK_SIZE, NUM_TOKENS = 16, 2
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32


class Figures(NamedTuple):
    """Registers of a thread, bytes that a thread spills to memory, and shared bytes of a block."""

    registers: int
    spilled: int
    shared: int


@dataclass(frozen=True)
class Launch:
    """A call that launches one kernel; of each kernel, a quick test takes one that *is_typical*."""

    name: str
    call: Callable[[], object]
    is_typical: bool = False


class AbsentGpu:
    """Triton's driver for a GPU of *capability* that is not there: its number stands for the device."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        """Return what to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """Return the key of Triton's caches."""
        return int(self._target.arch)

    def get_current_stream(self, _: int) -> int:
        """Return the default stream."""
        return 0


@contextmanager
def compiling(capability: int) -> Iterator[list[Figures]]:
    """Let launches compile for *capability*, and run nothing; yield a list that fills with each one's figures."""
    launched: list[Figures] = []
    known: dict[str, Figures] = {}
    run = JITFunction.run

    def compile_only(function: Any, *args: Any, warmup: bool, **options: Any) -> None:
        log = io.StringIO()
        with redirect_stdout(log):
            kernel = run(function, *args, warmup=True, **options)
        # Launches that are specialised alike share a kernel, which is compiled once.
        if kernel.hash not in known:
            known[kernel.hash] = _figures(log.getvalue(), kernel.metadata.shared)
        launched.append(known[kernel.hash])

    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope(), triton.knobs.nvidia.scope():
        triton.knobs.cache.dir = folder
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.runtime.driver.set_active(AbsentGpu(capability))
        with patch.object(JITFunction, "run", compile_only):
            yield launched


def _figures(log: str, shared: int) -> Figures:
    """Return what the *log* of ptxas says. Raises Unavailable if it says nothing of registers."""
    used, spilled = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    if used is None or spilled is None:
        raise Unavailable(f"ptxas says nothing of registers: {log[-200:]}")
    return Figures(int(used[1]), int(spilled[1]), shared)


def packed(dtype: torch.dtype, num_heads: int, size: int) -> object:
    """Launch a tower's attention: queries and keys are rotated copies, values a part of a wider matrix."""
    q, k = torch.empty(2, NUM_TOKENS, num_heads, size, dtype=dtype)
    v = torch.empty(NUM_TOKENS, 3, num_heads, size, dtype=dtype)[:, 2]
    layout = PackedLayout(torch.zeros(2, dtype=torch.int32), NUM_TOKENS, (NUM_TOKENS,))
    return VisionAttentionBackend().packed((q, k, v), layout)


def decode(dtype: torch.dtype, heads: tuple[int, int, int], num_blocks: int, scoring: Scoring = Scoring()) -> object:  # noqa: B008
    """Launch decodes with query heads, key/value heads and channels; queries are a part of the rotated heads."""
    num_heads, num_kv_heads, size = heads
    q = torch.empty(NUM_TOKENS, num_heads + num_kv_heads, size, dtype=dtype)[:, :num_heads]
    cache = KvCache(*torch.empty(2, 2, BLOCK_SIZE, num_kv_heads, size, dtype=dtype))
    zeros, ones = torch.zeros(NUM_TOKENS, dtype=torch.int64), (1,) * NUM_TOKENS
    tables = torch.zeros(NUM_TOKENS, num_blocks, dtype=torch.int64)
    layout = PagedLayout(zeros, tables, zeros, ones, ones, NUM_TOKENS, BLOCK_SIZE, zeros)
    backend = AttentionBackend()
    context = ForwardContext(zeros.expand(3, -1), layout, [cache], backend, backend.plan(layout, dtype))
    return backend.attend(q, (q, q), cache, context, scoring)


def cached_heads(
    heads: tuple[int, int, int], num_pairs: int, weight: torch.dtype | None = None, form: torch.dtype = BFLOAT16
) -> object:
    """Launch the norm, if there is a *weight*, the rotation of *num_pairs* of channels, and the writes to the cache."""
    num_heads, num_kv_heads, size = heads
    qkv = torch.empty(NUM_TOKENS, num_heads + 2 * num_kv_heads, size, dtype=BFLOAT16)
    own = None if weight is None else torch.empty(num_heads + num_kv_heads, size, dtype=weight)
    cos, sin = torch.empty(2, NUM_TOKENS, 2 * num_pairs, dtype=BFLOAT16)
    cache = KvCache(*torch.empty(2, 2, BLOCK_SIZE, num_kv_heads, size, dtype=form))
    slots = torch.zeros(NUM_TOKENS, dtype=torch.int64)
    return gpu.cached_heads(qkv, num_kv_heads, own, 1e-6, (cos, sin), cache, slots)


def float_norm(size: int) -> object:
    """Launch the norm of rows of *size*."""
    return gpu.rms_norm(torch.empty(NUM_TOKENS, size, dtype=BFLOAT16), torch.empty(size), 1e-6)


def gated_norm(num_heads: int, size: int) -> object:
    """Launch the norm and gates after a delta rule."""
    x = torch.empty(NUM_TOKENS, num_heads, size, dtype=BFLOAT16)
    return gpu.gated_norm(x, x.flatten(1), torch.empty(size), 1e-6)


def conv(length: int, num_channels: int = 8192) -> object:
    """Launch the convolution of one sequence with *length* tokens."""
    x = torch.empty(length, num_channels, dtype=BFLOAT16)
    states = torch.empty(2, 3, num_channels, dtype=BFLOAT16)
    rows = torch.zeros(1, dtype=torch.int32)
    return gpu.causal_conv(x, torch.empty(4, num_channels), states, rows, (length,), SILU)


def launches() -> Iterator[Launch]:
    """Yield launches of every kernel."""
    for dtype, num_heads, size in (
        *((BFLOAT16, *heads) for heads in ((16, 72), (16, 64), (16, 80), (25, 128), (8, 256))),
        (FLOAT16, 16, 72),
        (FLOAT32, 16, 64),
    ):
        name = f"packed, {_named(dtype)}, {num_heads} heads of {size}"
        yield Launch(name, partial(packed, dtype, num_heads, size), (dtype, size) == (BFLOAT16, 64))
    for dtype, heads, num_blocks in (
        *((BFLOAT16, (32, 8, 128), num_blocks) for num_blocks in (1, 5, 64)),
        *((BFLOAT16, heads, 64) for heads in ((32, 4, 128), (32, 32, 128), (16, 2, 256), (32, 32, 96), (32, 8, 64))),
        (FLOAT16, (32, 8, 128), 64),
        (FLOAT32, (32, 8, 128), 64),
    ):
        name = f"decode, {_named(dtype)}, {heads[0]}/{heads[1]} heads of {heads[2]}, tables of {num_blocks}"
        yield Launch(name, partial(decode, dtype, heads, num_blocks), heads[1] == 4)
    name = "decode, bfloat16, 8/4 heads of 256, tables of 64"
    yield Launch(f"{name}, a window", partial(decode, BFLOAT16, (8, 4, 256), 64, Scoring(window=1024)))
    scoring = Scoring(window=4096, soft_cap=50.0)
    yield Launch(f"{name}, a window, a soft cap", partial(decode, BFLOAT16, (8, 4, 256), 64, scoring))
    for heads, num_pairs, weight in (
        ((32, 8, 128), 64, BFLOAT16),
        ((28, 4, 128), 64, None),
        ((16, 2, 256), 32, FLOAT32),
        ((32, 32, 96), 48, None),
        ((32, 8, 64), 32, None),
    ):
        norm = "no norm" if weight is None else f"norm in {_named(weight)}"
        name = f"heads, bfloat16, {heads[0]}/{heads[1]} heads of {heads[2]}, {num_pairs} pairs, {norm}"
        yield Launch(name, partial(cached_heads, heads, num_pairs, weight), weight is BFLOAT16)
    call = partial(cached_heads, (32, 8, 128), 64, BFLOAT16, torch.float8_e4m3fn)
    yield Launch("heads, bfloat16, 32/8 heads of 128, 64 pairs, norm in bfloat16, a cache in float8", call)
    for dtype in (BFLOAT16, FLOAT16):
        for activation, label in ((SILU, "SiLU"), (GELU_TANH, "GELU")):
            x = torch.empty(NUM_TOKENS, 2 * 12288, dtype=dtype)
            call = partial(gpu.gated_activation, x, activation)
            yield Launch(f"gated, {_named(dtype)}, {label}", call, (dtype, activation) == (BFLOAT16, SILU))
    for size in (2048, 5120):
        yield Launch(f"norm, bfloat16, rows of {size}", partial(float_norm, size), size == 2048)
    yield Launch("norm, bfloat16, 32 heads of 128, gates", partial(gated_norm, 32, 128))
    for heads, size in ((32, 72), (32, 128), (1, 64)):
        x, rotation = (
            torch.empty(NUM_TOKENS, heads, size, dtype=BFLOAT16),
            cos_sin_pairs(torch.empty(NUM_TOKENS, size // 2)),
        )
        yield Launch(f"pairs, bfloat16, {heads} heads of {size}", partial(gpu.rotary_pairs, x, rotation), size == 72)
    for num_experts in (128, 256):
        call = partial(gpu.softmax_top_k, torch.empty(NUM_TOKENS, num_experts, dtype=BFLOAT16), 8, True)
        yield Launch(f"choice, bfloat16, 8 of {num_experts} experts", call, num_experts == 128)
    places = torch.zeros(NUM_TOKENS, 8, dtype=torch.int32)
    ids, results = places.long(), torch.empty(places.numel(), 2048, dtype=BFLOAT16)
    yield Launch("places, 8 of 128 experts", partial(grouped_experts.places_of, ids, 128), True)
    yield Launch("rows, bfloat16, 8 of 2048", partial(grouped_experts.rows_at, places, results[:NUM_TOKENS]), True)
    yield Launch("sum, bfloat16, 8 of 2048", partial(grouped_experts.sum_at, places, results, places.float()), True)
    logits, greedy = torch.empty(NUM_TOKENS, 151936), torch.zeros(NUM_TOKENS, dtype=torch.int64)
    yield Launch("draw, 151936 tokens", partial(gpu_draws.draw, logits, greedy, np.ones((5, NUM_TOKENS))), True)
    for length in (1, 2, 16, 40):
        yield Launch(f"conv, bfloat16, {length} token{'s' * (length > 1)}", partial(conv, length), length == 1)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


HEADING = """\
# What Triton makes of the kernels, without a GPU

Registers of a thread / bytes that it spills / KiB that a block shares, by Triton {version} and its ptxas. Each kernel
is launched by its own caller with tensors of a real model's shapes. So Triton specialises it as on a GPU: by alignment,
by numbers that are 1, by constants. Nothing ran. `tests/nn/test_triton_compiles.py` compiles all again and compares.

Command: python -m benchmarks.triton_kernels > benchmarks/results/triton-kernels.md
"""

Rows = Mapping[str, Figures | str]
"""The figures of each launch by its name, or why there are none."""


def rows(capability: int, chosen: Sequence[Launch]) -> Rows:
    """Compile *chosen* for *capability*."""
    found: dict[str, Figures | str] = {}
    with compiling(capability) as launched:
        for launch in chosen:
            try:
                with attempt():
                    launch.call()
                found[launch.name] = launched.pop()
            except Unavailable as error:
                found[launch.name] = f"not compiled: {error.reason}"
    return found


def cell(one: Figures | str) -> str:
    """Return what the page says of a launch."""
    if isinstance(one, str):
        return one
    return f"{one.registers} / {one.spilled} / {one.shared / KIB:.1f}"


def page(of_capabilities: Mapping[int, Rows]) -> Iterator[str]:
    """Yield the lines of benchmarks/results/triton-kernels.md."""
    yield HEADING.format(version=triton.__version__)
    yield f"| launch | {' | '.join(f'sm_{capability}' for capability in of_capabilities)} |"
    yield f"|---|{'---|' * len(of_capabilities)}"
    names = list(next(iter(of_capabilities.values())))
    for name in names:
        yield f"| {name} | {' | '.join(cell(found[name]) for found in of_capabilities.values())} |"


def main() -> None:
    """Print the page, or rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("capabilities", nargs="*", type=int, default=CAPABILITIES)
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if triton.knobs.runtime.interpret:
        sys.exit("TRITON_INTERPRET is set: Triton then interprets kernels, and compiles none.")
    chosen = [launch for launch in launches() if launch.is_typical or not options.few]
    found = {capability: rows(capability, chosen) for capability in options.capabilities}
    print(json.dumps([triton.__version__, found]) if options.json else "\n".join(page(found)))


if __name__ == "__main__":
    main()
