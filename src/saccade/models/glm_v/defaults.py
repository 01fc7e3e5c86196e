"""Values for keys that config.json's sections leave out: the defaults of transformers 5.23's classes.

Does not import torch.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

TEXT: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 151_552,
        "hidden_size": 4096,
        "intermediate_size": 13_696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
    }
)
"""Glm4vTextConfig."""

OCR_TEXT: Mapping[str, Any] = MappingProxyType(
    {
        **TEXT,
        "vocab_size": 59_392,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
    }
)
"""GlmOcrTextConfig."""

ROUTED_TEXT: Mapping[str, Any] = MappingProxyType(
    {
        **TEXT,
        "vocab_size": 151_424,
        "intermediate_size": 10_944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 65_536,
        "attention_bias": True,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    }
)
"""Glm4vMoeTextConfig."""

TOWER: Mapping[str, Any] = MappingProxyType(
    {
        "depth": 24,
        "hidden_size": 1536,
        "hidden_act": "silu",
        "num_heads": 12,
        "in_channels": 3,
        "image_size": 336,
        "patch_size": 14,
        "rms_norm_eps": 1e-5,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 4096,
        "intermediate_size": 13_696,
    }
)
"""Glm4vVisionConfig and Glm4vMoeVisionConfig."""

OCR_TOWER: Mapping[str, Any] = MappingProxyType(
    {
        **TOWER,
        "hidden_size": 1024,
        "attention_bias": True,
        "num_heads": 16,
        "out_hidden_size": 1536,
        "intermediate_size": 4096,
    }
)
"""GlmOcrVisionConfig."""
