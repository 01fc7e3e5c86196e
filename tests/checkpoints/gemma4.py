"""Gemma 4: as a gateway sees it, and whole tiny ones with random weights, one like the 26B release and one like E2B."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file

from checkpoints import templates
from checkpoints.qwen3_vl import randomize
from checkpoints.vocabulary import BEGIN, END, UNKNOWN, added, byte_fallback, write_json

FIRST = ("<pad>", "<eos>", "<bos>", "<unk>")
SPECIAL = (
    "<|turn>", "<turn|>", "<|image>", "<image|>", "<|image|>", "<|video|>", "<|audio>", "<audio|>", "<|audio|>",
    "<|think|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
    "<tool_response|>", '<|"|>',
)  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"
ROPES = {
    FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
}
TEXT = {
    "model_type": "gemma4_text", "attention_bias": False, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
    "head_dim": 16, "global_head_dim": 32, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 64,
    "max_position_embeddings": 8192, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
    "rope_parameters": ROPES, "tie_word_embeddings": True, "final_logit_softcapping": 30.0,
}  # fmt: skip
LARGE = {
    **TEXT, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 8,
    "top_k_experts": 3, "moe_intermediate_size": 24, "intermediate_size": 48, "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0, "sliding_window": 40, "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False, "num_hidden_layers": 4, "layer_types": [SLIDING, FULL, SLIDING, FULL],
}  # fmt: skip
"""As the 26B release: keys that are values, experts beside the MLP, images that see themselves whole."""

SMALL = {
    **TEXT, "attention_k_eq_v": False, "num_global_key_value_heads": None, "enable_moe_block": False,
    "intermediate_size": 96, "hidden_size_per_layer_input": 12, "num_kv_shared_layers": 3, "sliding_window": 24,
    "use_bidirectional_attention": None, "use_double_wide_mlp": True, "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL],
}  # fmt: skip
"""As E2B: embeddings of each layer, keys and values that later layers share, MLPs of twice the width."""

VISION = {
    "model_type": "gemma4_vision", "head_dim": 12, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 48,
    "intermediate_size": 80, "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 4,
    "patch_size": 4, "pooling_kernel_size": 3, "position_embedding_size": 3360, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
}  # fmt: skip
UNIFIED = {
    **{key: value for key, value in LARGE.items() if "expert" not in key and key != "hidden_size_per_layer_input"},
    "model_type": "gemma4_unified_text",
}
del UNIFIED["enable_moe_block"], UNIFIED["moe_intermediate_size"]
PATCHES = {
    "model_type": "gemma4_unified_vision", "patch_size": 4, "pooling_kernel_size": 3, "mm_embed_dim": 48,
    "mm_posemb_size": 1120, "output_proj_dims": 48, "rms_norm_eps": 1e-6,
}  # fmt: skip
RELEASES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "gemma4": (LARGE, {**VISION, "standardize": True, "use_clipped_linears": False}),
    "gemma4_unified": (UNIFIED, PATCHES),
    "gemma4_e2b": (SMALL, {**VISION, "standardize": False, "use_clipped_linears": True}),
}
BUDGET = 70


def _tokenizer(folder: Path) -> dict[str, int]:
    """Write Gemma's kind of tokenizer, spaces as ▁ and none before the text; return the ids of the added tokens."""
    parsed = byte_fallback()
    others = [token for token in parsed["model"]["vocab"] if token not in (UNKNOWN, BEGIN, END)]
    parsed["model"]["vocab"] = {token: number for number, token in enumerate([*FIRST, *others])}
    parsed["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    parsed["pre_tokenizer"] = split
    parsed["decoder"]["decoders"].pop()
    numbered = dict(enumerate(map(added, FIRST))) | dict(enumerate(map(added, SPECIAL), len(others) + len(FIRST)))
    parsed["added_tokens"] = [{"id": number, **entry} for number, entry in numbered.items()]
    parsed["post_processor"] = None  # the template writes the first token
    write_json(folder, "tokenizer.json", parsed)
    settings = {
        "added_tokens_decoder": {str(number): entry for number, entry in numbered.items()}, "bos_token": "<bos>",
        "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>", "clean_up_tokenization_spaces": False,
        "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>",
        "boa_token": "<|audio>", "eoa_token": "<audio|>", "tokenizer_class": "PreTrainedTokenizerFast",
        "padding_side": "left", "processor_class": "Gemma4Processor",
    }  # fmt: skip
    write_json(folder, "tokenizer_config.json", settings)
    return {entry["content"]: number for number, entry in numbered.items()}


def write(folder: Path, name: str, changed: Mapping[str, Any] = MappingProxyType({})) -> Path:
    """Write the gateway's files of the release *name* into *folder* and return it; *changed* are keys of its text."""
    text, vision = RELEASES[name]
    folder.mkdir(parents=True, exist_ok=True)
    ids = _tokenizer(folder)
    kind = "Gemma4Unified" if name == "gemma4_unified" else "Gemma4"
    num_ids = -(-(max(ids.values()) + 1) // 32) * 32
    sizes = {"vocab_size": num_ids, "vocab_size_per_layer_input": num_ids}
    config = {
        "architectures": [f"{kind}ForConditionalGeneration"], "model_type": "gemma4_unified" if name == "gemma4_unified" else "gemma4", "audio_config": None,
        "audio_token_id": ids["<|audio|>"], "boa_token_id": ids["<|audio>"], "boi_token_id": ids["<|image>"],
        "eoi_token_id": ids["<image|>"], "image_token_id": ids["<|image|>"], "video_token_id": ids["<|video|>"],
        "text_config": {**text, **sizes, **changed}, "vision_config": vision, "tie_word_embeddings": True, "dtype": "float32",
    }  # fmt: skip
    write_json(folder, "config.json", config)
    shared = {
        "do_convert_rgb": True, "do_rescale": True, "do_resize": True, "image_mean": [0.0] * 3, "image_std": [1.0] * 3,
        "patch_size": vision["patch_size"], "pooling_kernel_size": vision["pooling_kernel_size"], "resample": 3,
        "rescale_factor": 1 / 255,
    }  # fmt: skip
    images = {
        **shared, "do_normalize": False, "max_soft_tokens": BUDGET, "image_processor_type": f"{kind}ImageProcessor",
    }  # fmt: skip
    videos = {
        **shared, "do_normalize": True, "do_sample_frames": True, "max_soft_tokens": BUDGET, "num_frames": 32,
        "video_processor_type": f"{kind}VideoProcessor",
    }  # fmt: skip
    write_json(folder, "preprocessor_config.json", images)
    write_json(folder, "processor_config.json", {
        "image_processor": images, "video_processor": videos, "image_seq_length": BUDGET,
        "processor_class": "Gemma4Processor",
    })  # fmt: skip
    (folder / "chat_template.jinja").write_text(templates.GEMMA4)
    ends = {"bos_token_id": 2, "eos_token_id": [1, ids["<turn|>"]], "pad_token_id": 0}
    write_json(folder, "generation_config.json", {**ends, "do_sample": False})
    return folder


def write_network(folder: Path, name: str, changed: Mapping[str, Any] = MappingProxyType({})) -> Path:
    """Write a whole tiny one: hidden 64, images of at most 70 tokens, more than a window."""
    write(folder, name, changed)
    import transformers

    kind = "Gemma4Unified" if name == "gemma4_unified" else "Gemma4"
    config = getattr(transformers, f"{kind}Config").from_pretrained(folder)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float().eval()
    randomize(model)
    tensors = {key: value.contiguous() for key, value in model.state_dict().items() if key != "lm_head.weight"}
    generator = torch.Generator().manual_seed(1)
    for key, value in tensors.items():
        tensors[key] = _spread(key, value, generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _spread(key: str, value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return buffers whose effect shows: transformers begins with 1, 0 and no bounds."""
    noise = torch.rand(value.shape, generator=generator)
    if key.endswith(("_min", "_max")):
        return (0.4 + noise) * (-1 if key.endswith("_min") else 1)
    if key.endswith(("layer_scalar", "std_scale", "std_bias", "per_expert_scale", "router.scale")):
        return 0.6 + noise
    # Scores are not scaled: with weights near 1, the attention of random heads is sharp, and rounding errors grow.
    return value * 0.3 if key.endswith(".q_norm.weight") else value
