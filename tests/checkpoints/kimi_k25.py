"""Kimi-K2.5, as a gateway sees it: tiktoken.model without tokenizer.json, processor settings nested in one key; and
whole, with random weights under the release's names.
"""

import base64
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from checkpoints import templates
from checkpoints.vocabulary import added, byte_ranks, write_json

PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How the release's tokenizer splits text; it stands in its remote code, not in a file that a gateway reads."""

NUM_RESERVED = 256
NAMED = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 6: "<|start_header_id|>",
    7: "<|end_header_id|>", 9: "[EOT]", 10: "<|im_system|>", 11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>", 13: "<|tool_call_begin|>", 14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>", 17: "<|im_middle|>", 18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>",
    21: "<|media_pad|>", 22: "<think>", 23: "</think>", 254: "[UNK]", 255: "[PAD]",
}  # fmt: skip
"""Reserved tokens that have a name, by their place after the ranks; the rest are <|reserved_token_ID|>."""

NOT_SPECIAL = {NAMED[place] for place in (11, 12, 13, 14, 15, 22, 23)}
MEDIA_PROC_CFG = {
    "in_patch_limit": 16384, "patch_size": 14, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "merge_kernel_size": 2,
    "fixed_output_tokens": None, "patch_limit_on_one_side": 512, "in_patch_limit_each_frame": 4096,
    "in_patch_limit_video": None, "sample_fps": 2.0, "max_num_frames_each_video": None,
    "temporal_merge_kernel_size": 4, "timestamp_mode": "hh:mm:ss.fff",
    "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
}  # fmt: skip


def write_tokenizer(folder: Path) -> dict[str, int]:
    """Write tiktoken.model, tokenizer_config.json and chat_template.jinja; return the ids of the named tokens."""
    ranks = byte_ranks(PATTERN)
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks))
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    numbered = {len(ranks) + place: added(name, name not in NOT_SPECIAL) for place, name in NAMED.items()}
    settings = {
        "added_tokens_decoder": {str(number): entry for number, entry in numbered.items()},
        "additional_special_tokens": [NAMED[place] for place in (2, 3, 4, 6, 7, 9, 10, 17)],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]",
        "clean_up_tokenization_spaces": False, "extra_special_tokens": {},
        "model_max_length": 1000000000000000019884624838656, "tokenizer_class": "TikTokenTokenizer",
    }  # fmt: skip
    write_json(folder, "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(templates.KIMI_K25)
    return {entry["content"]: number for number, entry in numbered.items()}


def write(folder: Path) -> Path:
    """Write the gateway's files into *folder* and return it."""
    ids = write_tokenizer(folder)
    ends = {"bos_token_id": ids["[BOS]"], "eos_token_id": ids["[EOS]"], "pad_token_id": ids["[PAD]"]}
    text = {
        "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": ids["[BOS]"] + NUM_RESERVED,
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
        "max_position_embeddings": 262144, **ends,
    }  # fmt: skip
    vision = {
        "patch_size": 14, "merge_kernel_size": [2, 2], "init_pos_emb_height": 64, "init_pos_emb_width": 64,
        "init_pos_emb_time": 4, "vt_hidden_size": 64, "vt_num_hidden_layers": 2, "vt_num_attention_heads": 4,
        "vt_intermediate_size": 128, "mm_hidden_size": 64, "text_hidden_size": 128, "merge_type": "sd2_tpool",
    }  # fmt: skip
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text,
        "vision_config": vision, "media_placeholder_token_id": ids["<|media_pad|>"], "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>", "ignore_index": -100, **ends,
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
    }  # fmt: skip
    write_json(folder, "config.json", config)
    processor = {
        "auto_map": {
            "AutoProcessor": "kimi_k25_processor.KimiK25Processor",
            "AutoImageProcessor": "kimi_k25_vision_processing.KimiK25VisionProcessor",
        },
        "media_proc_cfg": MEDIA_PROC_CFG,
    }
    write_json(folder, "preprocessor_config.json", processor)
    write_json(folder, "generation_config.json", {"max_length": 262144, "eos_token_id": ids["<|im_end|>"]})
    return folder


TEXT = {
    "hidden_size": 96, "intermediate_size": 136, "moe_intermediate_size": 40, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 6, "kv_lora_rank": 34, "q_lora_rank": 44, "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12, "v_head_dim": 14, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "rope_theta": 50000.0,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {
        "type": "yarn", "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
"""The text decoder of the whole checkpoint; its rotary settings are the release's."""

VISION = {
    "patch_size": 14, "merge_kernel_size": [2, 2], "init_pos_emb_height": 8, "init_pos_emb_width": 8,
    "init_pos_emb_time": 4, "vt_hidden_size": 48, "vt_num_hidden_layers": 4, "vt_num_attention_heads": 4,
    "vt_intermediate_size": 68, "mm_hidden_size": 48, "text_hidden_size": 96, "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger", "pos_emb_type": "divided_fixed", "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5, "video_attn_type": "spatial_temporal",
}  # fmt: skip
NATIVE = {
    "vt_hidden_size": "hidden_size", "vt_num_hidden_layers": "num_hidden_layers",
    "vt_num_attention_heads": "num_attention_heads", "vt_intermediate_size": "intermediate_size",
    "init_pos_emb_height": "pos_emb_height", "init_pos_emb_width": "pos_emb_width", "init_pos_emb_time": "pos_emb_time",
}  # fmt: skip
"""The release's keys, which transformers does not read, and its own."""


def write_network(folder: Path, **text: Any) -> Path:
    """Write a whole tiny checkpoint, float32, with other values of TEXT where *text* has them."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {**TEXT, **text}
    config["vision_config"] = {**VISION, **{ours: VISION[key] for key, ours in NATIVE.items()}}
    config |= {
        "image_token_id": config["media_placeholder_token_id"], "projection_hidden_size": VISION["mm_hidden_size"],
        "projection_layer_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    write_json(folder, "config.json", config)
    draw = torch.Generator().manual_seed(0)
    shapes = {**_text_shapes(config["text_config"]), **_vision_shapes(config["vision_config"])}
    tensors = {name: _random(name, shape, draw) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _random(name: str, shape: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    """N(0, 1/fan_in) for matrices; noise around 1 for norm weights, around 0 for biases."""
    noise = torch.randn(shape, generator=draw)
    if len(shape) == 1:
        return 0.1 * noise + ("norm" in name and name.endswith("weight"))
    if "embed_tokens" in name or "pos_emb" in name:
        return noise
    return noise / math.sqrt(math.prod(shape[1:]))


def _mlp(name: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    wide = {f"{name}.{matrix}_proj.weight": (width, hidden) for matrix in ("gate", "up")}
    return {**wide, f"{name}.down_proj.weight": (hidden, width)}


def _attention(name: str, text: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads, latent, query_latent = (
        text[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank", "q_lora_rank")
    )
    plain, rotated, value = (text[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    queries = heads * (plain + rotated)
    biased = {f"{name}.kv_a_proj_with_mqa": (latent + rotated, hidden), f"{name}.o_proj": (hidden, heads * value)}
    if query_latent is None:
        yield f"{name}.q_proj.weight", (queries, hidden)
    else:
        biased[f"{name}.q_a_proj"] = (query_latent, hidden)
        yield f"{name}.q_a_layernorm.weight", (query_latent,)
        yield f"{name}.q_b_proj.weight", (queries, query_latent)
    yield f"{name}.kv_a_layernorm.weight", (latent,)
    yield f"{name}.kv_b_proj.weight", (heads * (plain + value), latent)
    for matrix, shape in biased.items():
        yield f"{matrix}.weight", shape
        if text["attention_bias"]:
            yield f"{matrix}.bias", shape[:1]


def _text_shapes(text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    vocab_size, hidden, width = text["vocab_size"], text["hidden_size"], text["moe_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "language_model.lm_head.weight": (vocab_size, hidden),
        "language_model.model.embed_tokens.weight": (vocab_size, hidden),
        "language_model.model.norm.weight": (hidden,),
    }
    for layer in range(text["num_hidden_layers"] + text["num_nextn_predict_layers"]):
        name = f"language_model.model.layers.{layer}"
        shapes |= {f"{name}.{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        shapes |= dict(_attention(f"{name}.self_attn", text))
        if layer < text["first_k_dense_replace"]:
            shapes |= _mlp(f"{name}.mlp", hidden, text["intermediate_size"])
            continue
        shapes[f"{name}.mlp.gate.weight"] = (text["n_routed_experts"], hidden)
        shapes[f"{name}.mlp.gate.e_score_correction_bias"] = (text["n_routed_experts"],)
        shapes |= _mlp(f"{name}.mlp.shared_experts", hidden, width * text["n_shared_experts"])
        for expert in range(text["n_routed_experts"]):
            shapes |= _mlp(f"{name}.mlp.experts.{expert}", hidden, width)
    return shapes


def _vision_shapes(vision: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, width, patch = (vision[key] for key in ("vt_hidden_size", "vt_intermediate_size", "patch_size"))
    merged = hidden * math.prod(vision["merge_kernel_size"])
    linear = {"mm_projector.proj.0": (merged, merged), "mm_projector.proj.2": (vision["text_hidden_size"], merged)}
    norms = ["vision_tower.encoder.final_layernorm", "mm_projector.pre_norm"]
    for number in range(vision["vt_num_hidden_layers"]):
        block = f"vision_tower.encoder.blocks.{number}"
        norms += [f"{block}.norm0", f"{block}.norm1"]
        linear |= {f"{block}.wqkv": (3 * hidden, hidden), f"{block}.wo": (hidden, hidden)}
        linear |= {f"{block}.mlp.fc0": (width, hidden), f"{block}.mlp.fc1": (hidden, width)}
    patches = "vision_tower.patch_embed"
    table = (vision["init_pos_emb_height"], vision["init_pos_emb_width"], hidden)
    shapes: dict[str, tuple[int, ...]] = {
        f"{patches}.proj.weight": (hidden, 3, patch, patch), f"{patches}.proj.bias": (hidden,),
        f"{patches}.pos_emb.weight": table,
    }  # fmt: skip
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in norms:
        shapes |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
    return shapes
