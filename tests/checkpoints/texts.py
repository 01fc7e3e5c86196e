"""Models that read text only: whole tiny ones, with random weights and the releases' names of tensors.

Sizes differ, so that no two dimensions agree by chance.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from checkpoints import gemma3, mistral3, qwen, templates
from checkpoints.qwen3_vl import randomize
from checkpoints.vocabulary import added, byte_level, write_json, write_llama_like

HEADERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
INSTRUCTIONS = ("[INST]", "[/INST]")
SIZES = {
    "hidden_size": 96, "intermediate_size": 168, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "torch_dtype": "float32",
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR, FULL = "linear_attention", "full_attention"
QWEN3_5 = {
    "head_dim": 48, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 12,
    "linear_value_head_dim": 20, "linear_conv_kernel_dim": 4, "mtp_num_hidden_layers": 1,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [3, 2, 1],
        "mrope_interleaved": True,
    },
}  # fmt: skip
CONFIGS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama_text": (
            "LlamaForCausalLM",
            {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": LLAMA3, "tie_word_embeddings": True},
        ),
        "mistral_text": ("MistralForCausalLM", {"model_type": "mistral", "head_dim": 32, "sliding_window": 20}),
        "qwen2_text": (
            "Qwen2ForCausalLM",
            {"model_type": "qwen2", "rope_theta": 1000000.0, "use_sliding_window": False},
        ),
        "qwen3_text": ("Qwen3ForCausalLM", {"model_type": "qwen3", "head_dim": 32, "rope_theta": 1000000.0}),
        "qwen3_moe_text": (
            "Qwen3MoeForCausalLM",
            {
                "model_type": "qwen3_moe",
                "head_dim": 32,
                "num_experts": 5,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 56,
                "norm_topk_prob": True,
                "mlp_only_layers": [1],
                "decoder_sparse_step": 1,
            },
        ),
        "ministral_text": (
            "Ministral3ForCausalLM",
            {
                "model_type": "ministral3",
                "head_dim": 32,
                "sliding_window": None,
                "rope_parameters": {**mistral3.YARN, "max_position_embeddings": 8192},
            },
        ),
        "qwen3_5_text": (
            "Qwen3_5ForCausalLM",
            {
                **QWEN3_5,
                "model_type": "qwen3_5_text",
                "num_hidden_layers": 4,
                "layer_types": [LINEAR, FULL, LINEAR, FULL],
                "tie_word_embeddings": True,
            },
        ),
        "qwen3_5_moe_text": (
            "Qwen3_5MoeForCausalLM",
            {
                **QWEN3_5,
                "model_type": "qwen3_5_moe_text",
                "full_attention_interval": 2,
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 36,
                "shared_expert_intermediate_size": 44,
            },
        ),
        "gemma3_text": ("Gemma3ForCausalLM", {**gemma3.TEXT, "eos_token_id": 1}),
    }
)
"""The architecture of each, and the keys of config.json in which it differs from the others."""


def _write_tokenizer(folder: Path, name: str) -> dict[str, int]:
    """Write tokenizer and template of the release *name*; return the ids of the added tokens."""
    if name.startswith("qwen3_5"):
        return qwen.write_tokenizer(folder, qwen.RELEASES["qwen3_5"], byte_level(qwen.QWEN3_5_PATTERN))
    if name.startswith("qwen"):
        release = qwen.Release(
            "", "", {}, template=templates.QWEN_TEXT, template_file="chat_template.jinja", not_special=qwen.NOT_SPECIAL
        )
        return qwen.write_tokenizer(folder, release, byte_level(qwen.QWEN2_PATTERN))
    if name == "gemma3_text":
        (folder / "chat_template.jinja").write_text(templates.GEMMA3)
        return gemma3.write_tokenizer(folder)
    tokens = HEADERS if name == "llama_text" else INSTRUCTIONS
    begin = {"bos_token": HEADERS[0], "eos_token": HEADERS[3]} if name == "llama_text" else {}
    template = templates.LLAMA_TEXT if name == "llama_text" else templates.MISTRAL_TEXT
    settings = {**begin, "chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    return write_llama_like(folder, map(added, tokens), settings)


def write(folder: Path, name: str) -> Path:
    """Write the whole release *name* into *folder* and return it."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    ids = _write_tokenizer(folder, name)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    architecture, own = CONFIGS[name]
    config = {
        **SIZES, "architectures": [architecture], "vocab_size": -(-(max(ids.values()) + 1) // 64) * 64,
        "eos_token_id": ids[settings["eos_token"]], **own,
    }  # fmt: skip
    write_json(folder, "config.json", config)
    torch.manual_seed(0)
    read = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, architecture)(read).float().eval()
    randomize(model)
    model.save_pretrained(folder)
    write_json(folder, "config.json", config)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder
