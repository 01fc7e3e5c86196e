"""How many kernels a layer starts for decodes on a GPU: a number for each kind of layer."""

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import published_delta
import pytest
import torch
from launches import Launches
from torch import nn

from saccade.models.backbones.decoder import DecoderLayer
from saccade.models.backbones.grouped_query_text import GroupedQueryDecoder
from saccade.models.backbones.hybrid_text import HybridDecoder
from saccade.models.backbones.text_config import (
    HYBRID,
    HYBRID_EXPERTS,
    QWEN3,
    QWEN3_MOE,
    HybridConfig,
    TextConfig,
)
from saccade.nn.backends import load_backend
from saccade.nn.context import ForwardContext, KvCache, PagedLayout, RecurrentState
from saccade.nn.layers import finish, use_operations
from saccade.nn.ops import FASTER, OF_STATES, Operations, resolve
from saccade.nn.rope import cos_sin

BF16 = torch.bfloat16
ROWS, BLOCK = 2, 4
DENSE = {
    "vocab_size": 8, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "rope_theta": 1e4,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
STATES = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 2, "attn_output_gate": True,
}  # fmt: skip
HYBRID_MOE = {**DENSE, **STATES, **EXPERTS, "shared_expert_intermediate_size": 32}


def grouped_query(style: Any, **keys: Any) -> nn.Module:
    return GroupedQueryDecoder(TextConfig.read_decoder({**DENSE, **keys}, style))


def hybrid(style: Any, text: Mapping[str, Any]) -> nn.Module:
    return HybridDecoder(HybridConfig.read_decoder(text, style))


Layer = tuple[Callable[[], Any], int, int]
LAYERS: Mapping[str, Layer] = MappingProxyType(
    {
        "Qwen3": (lambda: grouped_query(QWEN3), 0, 9),
        "Qwen3, a cache in FP8": (lambda: grouped_query(QWEN3), 0, 9),
        "Qwen3 with experts": (lambda: grouped_query(QWEN3_MOE, **EXPERTS), 0, 17),
        "Qwen3.5, delta net": (lambda: hybrid(HYBRID, {**DENSE, **STATES}), 0, 12),
        "Qwen3.5, attention": (lambda: hybrid(HYBRID, {**DENSE, **STATES}), 1, 13),
        "Qwen3.5 with experts, delta net": (lambda: hybrid(HYBRID_EXPERTS, HYBRID_MOE), 0, 27),
    }
)
"""Decoders, the layer of each that is counted, and its number of kernels."""


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(BF16)


def step(layer: DecoderLayer, cache_dtype: torch.dtype) -> ForwardContext:
    """Two decodes, of which one has a context."""
    layout = PagedLayout(
        torch.tensor([3, 8]), torch.tensor([[0], [2]]), torch.tensor([4, 1]), (1, 1), (4, 1), ROWS, BLOCK,
        torch.arange(ROWS, dtype=torch.int32),
    )  # fmt: skip
    states = RecurrentState((torch.zeros(ROWS, 4, 128, 128), torch.zeros(ROWS, 3, 1024, dtype=BF16)), ())
    cache = KvCache(*torch.zeros(2, 5, BLOCK, 2, 16).to(cache_dtype), 0.5, 0.25)
    caches = [states if layer.mixer_name == "linear_attn" else cache] * 2
    backend = load_backend("torch_sdpa")
    return ForwardContext(torch.zeros(3, ROWS, dtype=torch.int64), layout, caches, backend, backend.plan(layout, BF16))


def rule_kernels(initial_state_indices: torch.Tensor, output: torch.Tensor | None = None, **_: Any) -> list[str]:
    """Those of FlashInfer's rule for decodes: it fills an output of its own, and converts other indices than int32."""
    return [*["zeros"] * (output is None), *["to"] * (initial_state_indices.dtype != torch.int32), "rule"]


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> Operations:
    """Those of a GPU, with FlashInfer."""
    published_delta.install(monkeypatch)
    return resolve("cuda", BF16, {**FASTER, **OF_STATES})


def launched(layer: DecoderLayer, operations: Operations, cache_dtype: torch.dtype) -> list[str]:
    """The kernels of *layer*; attention counts as one."""
    use_operations(layer, operations)
    context, counter = step(layer, cache_dtype), Launches()
    x, rotation = drawn(ROWS, 64), cos_sin(torch.ones(ROWS, 8), BF16)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(context.backend, "attend", counter.as_one("attention", context.backend.attend))
        library = importlib.import_module("saccade.nn.flashinfer_delta")
        rule = library.gated_delta_rule_decode_pretranspose
        count = lambda *args, **kwargs: counter.apart(rule_kernels(**kwargs), rule, *args, **kwargs)  # noqa: E731
        patch.setattr(library, "gated_delta_rule_decode_pretranspose", count)
        with counter:
            layer(x, rotation, context)
    return counter.names


@pytest.mark.parametrize(("name", "most"), [(name, most) for name, (_, _, most) in LAYERS.items()])
def test_kernels_of_a_decode(name: str, most: int, operations: Operations) -> None:
    """With those of the products, norms, caches and states."""
    make, index, _ = LAYERS[name]
    decoder = make().bfloat16()
    for parameter in decoder.parameters():
        parameter.data = (drawn(*parameter.shape) * 0.1).to(parameter.dtype)
    finish(decoder)
    form = torch.float8_e4m3fn if "FP8" in name else BF16
    found = launched(decoder.layers[index], operations, form)
    assert len(found) == most, " ".join(found)
