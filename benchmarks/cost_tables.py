"""Bytes per token of a latent cache, and the cost of experts: `python -m benchmarks.cost_tables`.

The latent cache is that of Kimi-K2.5's release, from its configuration, and of the tests' tiny checkpoint. Of experts
one layer is measured, float32, random weights: its router, the choice and the experts.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.measured import ROOT, commit, machine
from saccade import models
from saccade.engine.executor import memory
from saccade.engine.executor.caches import Caches, CacheSizes
from saccade.models.files import parse_json, read_model_files
from saccade.nn import ops
from saccade.nn.experts import Experts
from saccade.nn.ops import softmax_top_k

sys.path += [str(ROOT / "tests"), *map(str, (ROOT / "tests" / "support").iterdir())]

from checkpoints import kimi_k25
from conformance.test_release_headers import CONFIG

DTYPE = torch.bfloat16
BLOCK, NUM_BLOCKS = 16, 4

NUM_EXPERTS, TOP_K = (8, 32, 128), 4
HIDDEN, INTERMEDIATE = 1024, 256
NUM_STEPS, NUM_WARM = 60, 5
PROCESSOR_CACHE_BYTES = 1 << 28


def cache_rows() -> Iterator[tuple[str, int, float, float, int]]:
    """For each network: the formula's bytes per token, the block manager's, the tensors', and those of plain keys."""
    with tempfile.TemporaryDirectory() as place:
        tiny = parse_json(read_model_files(kimi_k25.write_network(Path(place) / "tiny")), "config.json")
    for name, config in (("the release", CONFIG), ("tiny", tiny)):
        yield name, *bytes_per_token(config)


def bytes_per_token(config: Mapping[str, Any]) -> tuple[int, float, float, int]:
    """Return the four numbers of cache_rows."""
    text: Mapping[str, Any] = config["text_config"]
    layers, heads = text["num_hidden_layers"], text["num_attention_heads"]
    formula = layers * (text["kv_lora_rank"] + text["qk_rope_head_dim"]) * DTYPE.itemsize
    widths = text["qk_nope_head_dim"] + text["qk_rope_head_dim"] + text["v_head_dim"]
    specs = models.load_spec("kimi_k25", config).kv_specs
    caches = Caches(specs, CacheSizes(NUM_BLOCKS, BLOCK, 1, 0), DTYPE, torch.device("cpu"))
    allocated = sum(tensor.nbytes for cache in caches.layers for tensor in cache if isinstance(tensor, torch.Tensor))
    counted = memory.block_bytes(specs, BLOCK, DTYPE) / BLOCK
    return formula, counted, allocated / (NUM_BLOCKS * BLOCK), layers * heads * widths * DTYPE.itemsize


class Layer:
    """A router and the experts that it chooses from."""

    def __init__(self, num_experts: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.gate_EH = torch.randn(num_experts, HIDDEN, generator=draw) * HIDDEN**-0.5
        self.experts = Experts(num_experts, HIDDEN, INTERMEDIATE)
        for parameter in self.experts.parameters():
            parameter.data = torch.randn(parameter.shape, generator=draw) * parameter.shape[-1] ** -0.5

    def choose(self, x_NH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids [N, K] and weights [N, K] of each token's experts."""
        return softmax_top_k(functional.linear(x_NH, self.gate_EH), TOP_K, True)

    def __call__(self, x_NH: torch.Tensor) -> torch.Tensor:
        return self.experts(x_NH, *self.choose(x_NH))


def rows_multiplied(step: Callable[[], object]) -> int:
    """Return the number of rows in all products with experts' matrices while *step* runs."""
    rows = 0

    def counting(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        nonlocal rows
        rows += len(x)
        return functional.linear(x, *others)

    plain = ops.functional
    ops.functional = type("Counting", (), {"linear": staticmethod(counting), "silu": functional.silu})
    try:
        step()
    finally:
        ops.functional = plain
    return rows


def experts_row(layer: Layer, num_tokens: int, same: bool) -> tuple[float, float, float]:
    """Return means of the active experts and of the rows multiplied, and the median of milliseconds, of a step.

    Tokens are random, or with *same* all alike. The processor's cache is overwritten before each step, as the other
    layers of a model would.
    """
    draw = torch.Generator().manual_seed(1)
    other = torch.zeros(PROCESSOR_CACHE_BYTES, dtype=torch.uint8)
    active, rows, seconds = list[int](), list[int](), list[float]()
    for number in range(NUM_WARM + NUM_STEPS):
        x_NH = torch.randn(1 if same else num_tokens, HIDDEN, generator=draw).expand(num_tokens, -1).contiguous()
        other.add_(1)
        began = time.thread_time()
        layer(x_NH)
        if number >= NUM_WARM:
            seconds.append(time.thread_time() - began)
            active.append(len(layer.choose(x_NH)[0].unique()))
            rows.append(rows_multiplied(lambda x_NH=x_NH: layer(x_NH)))  # type: ignore[misc]
    return statistics.mean(active), statistics.mean(rows), 1000 * statistics.median(seconds)


@torch.inference_mode()
def main() -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    print(f"Machine: {machine()}; 1 thread  \nCommit: {commit()}\n")
    print("| Kimi-K2.5, bfloat16 | formula | block manager | tensors | keys and values of all heads |")
    print("|---|---|---|---|---|")
    for name, *numbers in cache_rows():
        print("|", " | ".join([name, *(f"{number:,.0f}" for number in numbers)]), "|")
    print("\n| tokens | experts | active | rows multiplied | ms | ms per active expert |\n|---|---|---|---|---|---|")
    layers = {num_experts: Layer(num_experts) for num_experts in NUM_EXPERTS}
    for num_tokens, same in ((1, False), (64, True), (64, False)):
        for num_experts, layer in layers.items():
            active, rows, elapsed = experts_row(layer, num_tokens, same)
            kind = f"{num_tokens}, all alike" if same else f"{num_tokens}"
            print(f"| {kind} | {num_experts} | {active:.1f} | {rows:.0f} | {elapsed:.2f} | {elapsed / active:.2f} |")


if __name__ == "__main__":
    main()
