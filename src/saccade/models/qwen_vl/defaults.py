"""Values for keys that config.json's sections leave out: the defaults of transformers 5.23's classes.

Does not import torch.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from saccade.models.backbones.text_defaults import EXPERTS

TEXT2: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 152_064,
        "hidden_size": 8192,
        "intermediate_size": 29_568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
    }
)
"""Qwen2VLTextConfig and Qwen2_5_VLTextConfig."""

TEXT3: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 128_000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500_000.0,
    }
)
"""Qwen3VLTextConfig."""

TEXT3_EXPERTS: Mapping[str, Any] = MappingProxyType(
    {
        **{key: value for key, value in TEXT3.items() if key != "head_dim"},
        **EXPERTS,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
        "num_experts": 60,
    }
)
"""Qwen3VLMoeTextConfig. By default, a head has its share of the hidden state's channels."""

_TOWER: Mapping[str, Any] = MappingProxyType({"in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2})

TOWER2: Mapping[str, Any] = MappingProxyType(
    {
        **_TOWER,
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "hidden_act": "quick_gelu",
        "mlp_ratio": 4,
        "num_heads": 16,
        "patch_size": 14,
    }
)
"""Qwen2VLVisionConfig."""

WINDOWED: Mapping[str, Any] = MappingProxyType(
    {
        **_TOWER,
        "depth": 32,
        "hidden_size": 3584,
        "hidden_act": "silu",
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "tokens_per_second": 4,
        "window_size": 112,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }
)
"""Qwen2_5_VLVisionConfig."""

TOWER3: Mapping[str, Any] = MappingProxyType(
    {
        **_TOWER,
        "depth": 27,
        "hidden_size": 1152,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "out_hidden_size": 3584,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    }
)
"""Qwen3VLVisionConfig and Qwen3VLMoeVisionConfig."""

FLAT_TOWER: Mapping[str, Any] = MappingProxyType({**TOWER3, "deepstack_visual_indexes": []})
"""Qwen3_5VisionConfig and Qwen3_5MoeVisionConfig, which have no deepstack."""
