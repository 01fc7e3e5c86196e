"""Values for keys that a text network's section leaves out: the defaults of its configuration class.

Does not import torch.

Source: transformers 5.23; a conformance test compares each key with its class. If a family's decoder has a
configuration class of its own, the table is in the family's folder.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

COMMON: Mapping[str, Any] = MappingProxyType({"hidden_act": "silu", "rope_theta": 10_000.0, "rms_norm_eps": 1e-6})

LLAMA: Mapping[str, Any] = MappingProxyType(
    {
        **COMMON,
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    }
)
MISTRAL: Mapping[str, Any] = MappingProxyType(
    {
        **LLAMA,
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    }
)
MINISTRAL: Mapping[str, Any] = MappingProxyType(
    {
        **MISTRAL,
        "vocab_size": 131_072,
        "num_hidden_layers": 34,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    }
)
PHI3: Mapping[str, Any] = MappingProxyType(
    {
        **LLAMA,
        "vocab_size": 32_064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
)
QWEN2: Mapping[str, Any] = MappingProxyType(
    {
        **LLAMA,
        "vocab_size": 151_936,
        "intermediate_size": 22_016,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
    }
)
QWEN3: Mapping[str, Any] = MappingProxyType({**QWEN2, "head_dim": 128})
QWEN3_MOE: Mapping[str, Any] = MappingProxyType(
    {
        **QWEN2,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    }
)
EXPERTS: Mapping[str, Any] = MappingProxyType({"decoder_sparse_step": 1, "norm_topk_prob": True})
"""Settings of all experts that some classes do not have."""
HYBRID: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 248_320,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "full_attention_interval": 4,
        "attn_output_gate": True,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
    }
)
"""Qwen3.5, with the values of keys that only the releases have."""
HYBRID_EXPERTS: Mapping[str, Any] = MappingProxyType(
    {
        **HYBRID,
        **EXPERTS,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    }
)
DEEPSEEK: Mapping[str, Any] = MappingProxyType(
    {
        **COMMON,
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_nextn_predict_layers": 1,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
        "rope_interleave": True,
    }
)
