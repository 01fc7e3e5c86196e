"""What keys and values of 8 bits would save of a step on this CPU, by PyTorch's own operators.

    python -m benchmarks.engine.kv_8bit [--rows 1 4 16] [--contexts 1000 4000 16000]

Attention of one token in each row, for the 2B release's shape, over contexts in scattered blocks. Prints the
milliseconds of all layers in each form, in turn, and its error beside float32. Several layers are measured, so that no
form finds its cache in the processor's. Forms:

- *engine*: as the engine attends, without and with `--kv-cache-dtype fp8`.
- *in parts*: PyTorch's function for some tokens at a time, so that their copies stay in the processor's cache. The
  bits of float8 are moved to those of bfloat16, which is faster than PyTorch's cast. int8 has a scale for each token
  and head.
- *by head*: the copy of the context has one head after the other, for `torch.matmul`.
- *heads apart*: the cache has one head after the other, too. int8 goes through `_weight_int8pack_mm`, for which
  the values of 16 tokens lie side by side.
- *without blocks*: as before, but without a copy. The engine has blocks, so this is a bound.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from benchmarks.engine.profile_steps import bandwidth
from benchmarks.engine.shape_2b import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS
from benchmarks.measured import commit, machine
from saccade.engine.executor.malloc import keep_freed_memory
from saccade.nn.backends.torch_sdpa import AttentionBackend
from saccade.nn.context import SCALED, ForwardContext, KvCache, PagedLayout

BLOCK = 16
"""Tokens of a block: the int8 values of a channel are then one complex128, which PyTorch can gather."""

MOST_BYTES = 1 << 29
"""Of keys and values in bfloat16, in all layers that are measured."""

PART_BYTES = 1 << 22
LARGEST = 127
SCALE = HEAD_DIM**-0.5
Pair = tuple[torch.Tensor, torch.Tensor]
Attend = Callable[[int], torch.Tensor]
"""Returns the attention [S, Q * D] of a layer."""


@dataclass(frozen=True)
class Step:
    """A step of *rows* decodes over *length* tokens each; *tables* int64 [S, M] are their blocks, *slots* [S, L]."""

    rows: int
    length: int
    tables: torch.Tensor
    slots: torch.Tensor
    context: ForwardContext
    q_SKGD: torch.Tensor

    @classmethod
    def of(cls, rows: int, length: int) -> "Step":
        """Return a step whose blocks are scattered."""
        num_blocks = -(-length // BLOCK)
        tables = torch.randperm(rows * num_blocks).view(rows, num_blocks)
        index = torch.arange(length)
        slots = tables[:, index // BLOCK] * BLOCK + index % BLOCK
        lengths = (length,) * rows
        layout = PagedLayout(
            slots[:, -1].clone(), tables, torch.tensor(lengths), (1,) * rows, lengths, rows, BLOCK, torch.arange(rows)
        )
        backend = AttentionBackend()
        plan = backend.plan(layout, torch.bfloat16)
        context = ForwardContext(torch.zeros(3, rows, dtype=torch.int64), layout, (), backend, plan)
        q_SKGD = torch.randn(rows, NUM_KV_HEADS, NUM_HEADS // NUM_KV_HEADS, HEAD_DIM).bfloat16()
        return cls(rows, length, tables, slots, context, q_SKGD)

    def by_engine(self, cache: KvCache) -> torch.Tensor:
        """Attend as the engine does."""
        own = torch.empty(0), torch.empty(0)
        return self.context.backend.attend(self.q_SKGD.flatten(1, 2), own, cache, self.context, SCALED)

    def in_parts(self, read: Callable[[torch.Tensor], Pair], q_SKGD: torch.Tensor) -> torch.Tensor:
        """Attend to some tokens at a time; *read* returns keys and values [n, K, D] at slots int64 [n]."""
        size = max(1, PART_BYTES // (2 * self.rows * NUM_KV_HEADS * HEAD_DIM))
        parts = []
        for slots in self.slots.split(size, 1):
            k, v = (part.unflatten(0, (self.rows, -1)).transpose(1, 2) for part in read(slots.flatten()))
            parts.append(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_SKGD, k, v))
        shares = torch.stack([sums for _, sums in parts]).softmax(0).unsqueeze(-1)
        return (torch.stack([output for output, _ in parts]) * shares).sum(0).bfloat16().flatten(1)

    def by_matmul(self, k_KSLD: torch.Tensor, v_KSLD: torch.Tensor) -> torch.Tensor:
        """Attend by two products in bfloat16."""
        scores = torch.matmul(self.q_SKGD.transpose(0, 1), k_KSLD.transpose(-1, -2)).float()
        outputs_KSGD = torch.matmul(scores.mul_(SCALE).softmax(-1).bfloat16(), v_KSLD)
        return outputs_KSGD.transpose(0, 1).flatten(1)

    def by_int8(self, k: torch.Tensor, v: list[torch.Tensor], scales: Pair) -> torch.Tensor:
        """Attend to keys int8 [K, S, T, D] and values int8 [K, D, T] of each row, with scales [K, S, T], T in blocks.

        PyTorch's kernel reads beyond the end of rows that are not a multiple of 16 long.
        """
        multiply, of_keys, of_values = torch.ops.aten._weight_int8pack_mm, *scales
        places = [(row, head) for row in range(self.rows) for head in range(NUM_KV_HEADS)]
        scores = torch.stack(
            [multiply(self.q_SKGD[row, head], k[head, row], of_keys[head, row]) for row, head in places]
        )
        scores[..., self.length :] = float("-inf")
        weights = (scores.float() * SCALE).softmax(-1).bfloat16()
        weights *= of_values.transpose(0, 1).reshape(len(places), 1, -1)
        ones = torch.ones(HEAD_DIM, dtype=torch.bfloat16)
        outputs = [multiply(one, v[row][head], ones) for one, (row, head) in zip(weights, places, strict=True)]
        return torch.stack(outputs).view(self.rows, -1)


def rounded(values: torch.Tensor) -> Pair:
    """Return int8 values [..., D], and their scales bfloat16 [..., 1]."""
    scales = (values.float().abs().amax(-1, keepdim=True) / LARGEST).bfloat16()
    return (values.float() / scales.float()).round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scales


def moved_bits(codes: torch.Tensor) -> torch.Tensor:
    """Return the bytes of float8_e4m3fn in bfloat16, divided by 2^120."""
    return codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(4).bitwise_and_(-0x7810).view(torch.bfloat16)


def make_forms(step: Step, num_layers: int) -> tuple[Mapping[str, Attend], torch.Tensor]:
    """Return each form, and the exact attention of layer 0."""
    num_slots = step.tables.numel() * BLOCK
    shape = (num_layers, num_slots, NUM_KV_HEADS, HEAD_DIM)
    plain = [torch.randn(shape[1:]).bfloat16().expand(shape).clone() for _ in "kv"]
    float8 = [tensor.to(torch.float8_e4m3fn) for tensor in plain]
    codes, scales = zip(*(rounded(tensor) for tensor in plain), strict=True)
    heads = [tensor.transpose(1, 2).contiguous() for tensor in plain]
    head_codes = codes[0].transpose(1, 2).contiguous()
    head_scales = [tensor.squeeze(-1).transpose(1, 2).contiguous() for tensor in scales]
    turned = codes[1].unflatten(1, (-1, BLOCK)).permute(0, 1, 3, 4, 2).contiguous().view(torch.complex128).squeeze(-1)
    k, v = (tensor[0][step.slots].transpose(1, 2).float() for tensor in plain)
    exact = functional.scaled_dot_product_attention(step.q_SKGD.float(), k, v).flatten(1)
    every_slot = (step.tables.unsqueeze(-1) * BLOCK + torch.arange(BLOCK)).flatten()
    rows_of_heads = (step.slots * NUM_KV_HEADS + torch.arange(NUM_KV_HEADS).view(-1, 1, 1)).flatten()
    places = NUM_KV_HEADS, step.rows, -1

    def engine(of_both: list[torch.Tensor], layer: int) -> torch.Tensor:
        keys, values = (tensor[layer].unflatten(0, (-1, BLOCK)) for tensor in of_both)
        return step.by_engine(KvCache(keys, values))

    def float8_in_parts(layer: int) -> torch.Tensor:
        def read(slots: torch.Tensor) -> Pair:
            k, v = (moved_bits(tensor[layer].view(torch.uint8).index_select(0, slots)) for tensor in float8)
            return k, v.mul_(2.0**120)

        return step.in_parts(read, step.q_SKGD * 2.0**120)

    def int8_in_parts(layer: int) -> torch.Tensor:
        def read(slots: torch.Tensor) -> Pair:
            k, v = (
                one[layer].index_select(0, slots).bfloat16().mul_(scale[layer].index_select(0, slots))
                for one, scale in zip(codes, scales, strict=True)
            )
            return k, v

        return step.in_parts(read, step.q_SKGD)

    def by_head(layer: int) -> torch.Tensor:
        k, v = (tensor[layer].flatten(0, 1).index_select(0, rows_of_heads).unflatten(0, places) for tensor in plain)
        return step.by_matmul(k, v)

    def heads_apart(layer: int) -> torch.Tensor:
        slots = step.slots.flatten()
        k, v = (tensor[layer].index_select(1, slots).unflatten(1, (step.rows, -1)) for tensor in heads)
        return step.by_matmul(k, v)

    def int8_apart(layer: int) -> torch.Tensor:
        k = head_codes[layer].index_select(1, every_slot).unflatten(1, (step.rows, -1))
        by_channel = turned[layer].permute(1, 2, 0)
        v = [by_channel.index_select(2, table).view(torch.int8) for table in step.tables]
        of_keys, of_values = (
            one[layer].index_select(1, every_slot).unflatten(1, (step.rows, -1)) for one in head_scales
        )
        return step.by_int8(k, v, (of_keys, of_values))

    # What the forms before read, in the order of the contexts.
    whole = [tensor[:, :, step.slots] for tensor in heads]
    whole_codes, whole_scales = (
        [part[:, :, every_slot].unflatten(2, (step.rows, -1)) for part in parts]
        for parts in ([head_codes], head_scales)
    )
    whole_turned = [
        turned.permute(0, 2, 3, 1).index_select(3, table).view(torch.int8).contiguous() for table in step.tables
    ]

    def int8_whole(layer: int) -> torch.Tensor:
        v = [one[layer] for one in whole_turned]
        return step.by_int8(whole_codes[0][layer], v, (whole_scales[0][layer], whole_scales[1][layer]))

    forms: Mapping[str, Attend] = {
        "bfloat16, engine": partial(engine, plain),
        "float8, engine": partial(engine, float8),
        "float8, in parts": float8_in_parts,
        "int8, in parts": int8_in_parts,
        "bfloat16, by head": by_head,
        "bfloat16, heads apart": heads_apart,
        "int8, heads apart": int8_apart,
        "bfloat16, without blocks": lambda layer: step.by_matmul(whole[0][layer], whole[1][layer]),
        "int8, without blocks": int8_whole,
    }
    return forms, exact


def main() -> None:
    """Measure each number of rows and length of contexts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 4, 16))
    parser.add_argument("--contexts", type=int, nargs="+", default=(1000, 4000, 16000))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    keep_freed_memory()
    print(f"{machine()}, {arguments.threads} threads; torch {torch.__version__}; commit {commit()}")
    for length in arguments.contexts:
        for rows in arguments.rows:
            step = Step.of(rows, length)
            layer_bytes = 4 * rows * length * NUM_KV_HEADS * HEAD_DIM
            num_layers = max(1, min(NUM_LAYERS, MOST_BYTES // layer_bytes))
            forms, exact = make_forms(step, num_layers)
            times: dict[str, list[float]] = {name: [] for name in forms}
            for turn in range(1 + arguments.rounds):
                for name, attend in forms.items():
                    began = time.perf_counter()
                    for layer in range(num_layers):
                        attend(layer)
                    if turn:
                        times[name].append((time.perf_counter() - began) * NUM_LAYERS / num_layers)
            rate = bandwidth()
            of_bytes = layer_bytes * NUM_LAYERS
            at_rate = f"{1e3 * of_bytes / rate:.1f} ms at {rate / 1e9:.1f} GB/s"
            print(f"{rows} x {length:,}: {of_bytes / 1e6:,.0f} MB in bfloat16, {at_rate}")
            for name, attend in forms.items():
                error = (attend(0).float().view_as(exact) - exact).abs().mean() / exact.abs().mean()
                print(f"  {name}: {1e3 * statistics.median(times[name]):.1f} ms, error {error:.4f}", flush=True)
            del forms


if __name__ == "__main__":
    main()
