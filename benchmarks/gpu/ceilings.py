"""What the card reaches at most: without these figures no time can be judged."""

import time
from collections.abc import Iterator

import torch

from benchmarks.gpu.device_time import device_seconds
from benchmarks.gpu.plan import Row
from benchmarks.gpu.scale import Scale

OUTPUTS, INPUTS = 24576, 4096
"""The gates and ups of a layer of Qwen3-VL-8B, its largest matrix."""

LAUNCHES = 1000


def ceilings(scale: Scale) -> Iterator[Row]:
    """Measure copies, large products, matrices read for a few tokens, and launches."""
    device, dtype = torch.device(scale.device), getattr(torch, scale.dtype)
    is_gpu = device.type == "cuda"
    yield _copies(device, scale.repeats)
    side = 8192 if is_gpu else 128
    one, other = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    seconds = device_seconds(lambda: one @ other, scale.repeats)
    yield Row(f"product of {side} x {side}", f"{2 * side**3 / seconds / 1e12:.0f} TFLOP/s")
    shape = (OUTPUTS, INPUTS) if is_gpu else (64, 64)
    # Several, so that none is read from the cache of the last product.
    weights = [torch.randn(shape, device=device, dtype=dtype) for _ in range(3)]
    for tokens in (1, 8, 64, 256):
        rows = torch.randn(tokens, shape[1], device=device, dtype=dtype)
        seconds = device_seconds(lambda: [rows @ weight.t() for weight in weights], scale.repeats)  # noqa: B023
        rate = len(weights) * weights[0].nbytes / seconds / 1e12
        yield Row(f"{tokens} tokens times {shape[0]} x {shape[1]}", f"{rate:.2f} TB/s of weights")
    if is_gpu:
        yield from _launches(device, scale.repeats)


def _copies(device: torch.device, repeats: int) -> Row:
    size = 1 << (31 if device.type == "cuda" else 20)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device).random_() for _ in range(2))
    seconds = device_seconds(lambda: target.copy_(source), repeats)
    return Row("copy, bytes read and written", f"{2 * size / seconds / 1e12:.2f} TB/s")


def _launches(device: torch.device, repeats: int) -> Iterator[Row]:
    tiny = torch.zeros(32, device=device)
    began = time.perf_counter()
    for _ in range(LAUNCHES):
        tiny.add_(1)
    yield Row("launch of a kernel", f"{(time.perf_counter() - began) / LAUNCHES * 1e6:.1f} us of the host")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            tiny.add_(1)
    seconds = device_seconds(graph.replay, repeats)
    yield Row("a kernel in a graph", f"{seconds / LAUNCHES * 1e6:.2f} us of the device")
