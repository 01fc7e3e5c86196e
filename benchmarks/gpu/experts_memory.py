"""Memory that experts take while they compute: a library's kernels take it anew at each call, and a graph keeps it.

The start measures a step that runs without graphs, so what graphs keep comes on top.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from benchmarks.gpu.checks import failure
from benchmarks.gpu.plan import NOT_RUN, Row
from benchmarks.gpu.scale import Scale
from saccade.engine.executor.graphs import CudaCapture
from saccade.nn.experts import Experts
from saccade.nn.libraries import Unavailable
from saccade.nn.ops import resolve

MIB = 1 << 20


class Shape(NamedTuple):
    """A layer of experts, each of *width*, of which a token takes *choices*; the most *tokens* of a step."""

    num_experts: int
    hidden: int
    width: int
    choices: int
    tokens: int


QWEN3_30B = Shape(128, 2048, 768, 8, 8192)
SMALL = Shape(4, 128, 128, 2, 16)


def experts_memory(scale: Scale) -> Iterator[Row]:
    """Yield the memory of calls and of a graph, for experts in the network's dtype and in FP8 blocks."""
    is_gpu = scale.device == "cuda"
    shape = QWEN3_30B if is_gpu else SMALL
    for form in (scale.dtype, "FP8 blocks"):
        label = f"{shape.num_experts} experts in {form}"
        try:
            layer = _layer(scale, shape, rounds=form != scale.dtype)
        except Unavailable as error:
            yield Row(label, NOT_RUN, error.reason)
            continue
        for count in (1, scale.most_rows, shape.tokens):
            call = _call(layer, shape, count)
            yield _measured(f"{label}, {count} tokens: memory of a call", call, _of_call, is_gpu)
        call = _call(layer, shape, scale.most_rows)
        yield _measured(f"{label}, {scale.most_rows} tokens: memory that a graph keeps", call, _of_graph, is_gpu)


def _layer(scale: Scale, shape: Shape, *, rounds: bool) -> Experts:
    """Return packed experts with random weights. Raises Unavailable if no kernel takes them."""
    dtype = getattr(torch, scale.dtype)
    with torch.device(scale.device):
        layer = Experts(shape.num_experts, shape.hidden, shape.width).to(dtype)
    for parameter in layer.parameters():
        parameter.data.normal_(std=shape.hidden**-0.5)
    layer.ops = resolve(scale.device, dtype)
    if rounds:
        layer.round_to_fp8()
        layer.pack()
    return layer


def _call(layer: Experts, shape: Shape, count: int) -> Callable[[], torch.Tensor]:
    device, dtype = layer.down_proj.device, layer.down_proj.dtype
    x = torch.randn(count, shape.hidden, device=device).to(dtype)
    weights, ids = torch.rand(count, shape.num_experts, device=device).topk(shape.choices, -1)
    return lambda: layer(x, ids, weights)


def _measured(
    label: str, call: Callable[[], torch.Tensor], measure: Callable[[Callable[[], torch.Tensor]], int], is_gpu: bool
) -> Row:
    try:
        with torch.inference_mode():
            call()  # what is compiled at the first call
            if not is_gpu:
                return Row(label, NOT_RUN, "this needs a GPU")
            return Row(label, f"{measure(call) / MIB:.0f} MiB")
    except Exception as error:
        return failure(label, error)


def _of_call(call: Callable[[], torch.Tensor]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def _of_graph(call: Callable[[], torch.Tensor]) -> int:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    captured = CudaCapture()(call)
    torch.cuda.empty_cache()
    kept = torch.cuda.memory_reserved() - before
    captured.replay()
    torch.cuda.synchronize()
    return kept
