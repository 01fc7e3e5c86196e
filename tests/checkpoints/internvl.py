"""InternVL3.5, dense and with experts: as a gateway sees it, whole tiny ones, and their twins in the release's own form."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torchvision_schemas import import_torchvision

from checkpoints import templates
from checkpoints.experts import one_by_one
from checkpoints.qwen import QWEN2_PATTERN
from checkpoints.qwen3_vl import randomize
from checkpoints.vocabulary import added, byte_level, write_json

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>", "<box>", "</box>",
)  # fmt: skip
NOT_SPECIAL = ("<tool_call>", "</tool_call>", "<think>", "</think>")
VISION = {
    "model_type": "internvl_vision", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 4, "image_size": [112, 112], "patch_size": [14, 14], "hidden_act": "gelu",
    "layer_norm_eps": 1e-6, "attention_bias": True, "use_qk_norm": False, "norm_type": "layer_norm",
    "layer_scale_init_value": 0.1, "use_mean_pooling": True, "use_absolute_position_embeddings": True,
}  # fmt: skip
TINY = {"image_size": [56, 56]}
LARGE = {"attention_bias": False, "use_qk_norm": True, "norm_type": "rms_norm"}
"""The tower of 6 billion parameters."""
TEXT = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 96, "intermediate_size": 136,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 20, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "max_position_embeddings": 8192, "rope_theta": 1000000.0, "attention_bias": False,
    "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {
    **TEXT, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 40, "decoder_sparse_step": 1, "mlp_only_layers": [1],
    "norm_topk_prob": True,
}  # fmt: skip
TEXTS: dict[str, dict[str, Any]] = {"internvl": TEXT, "internvl_moe": EXPERTS}
COLOURS = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


def _tokenizer(folder: Path, vocab_size: int) -> dict[str, int]:
    tokenizer = byte_level(QWEN2_PATTERN, vocab_size=vocab_size, over_borders=vocab_size > 1000)
    tokens = [added(name) for name in SPECIAL] + [added(name, special=False) for name in NOT_SPECIAL]
    numbered = dict(enumerate(tokens, start=tokenizer.get_vocab_size()))
    parsed = json.loads(tokenizer.to_str())
    parsed["added_tokens"] = [{"id": number, **entry} for number, entry in numbered.items()]
    write_json(folder, "tokenizer.json", parsed)
    settings = {
        "added_tokens_decoder": {str(number): entry for number, entry in numbered.items()},
        "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "clean_up_tokenization_spaces": False,
        "extra_special_tokens": {
            "context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>",
            "video_token": "<video>",
        },
        "model_max_length": 16384, "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    write_json(folder, "tokenizer_config.json", settings)
    return {entry["content"]: number for number, entry in numbered.items()}


def write(folder: Path, name: str, vocab_size: int = 1200, vision: dict[str, Any] | None = None) -> Path:
    """Write the gateway's files of the release *name* into *folder* and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = _tokenizer(folder, vocab_size)
    sizes = {**VISION, **(vision or {})}
    side = sizes["image_size"][0]
    tokens = (side // 14 // 2) ** 2
    text = {**TEXTS[name], "vocab_size": -(-(max(ids.values()) + 1) // 64) * 64, "eos_token_id": ids["<|im_end|>"]}
    config = {
        "architectures": ["InternVLForConditionalGeneration"], "model_type": "internvl", "text_config": text,
        "vision_config": sizes, "image_token_id": ids["<IMG_CONTEXT>"], "image_seq_length": tokens,
        "downsample_ratio": 0.5, "projector_hidden_act": "gelu", "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default", "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    write_json(folder, "config.json", config)
    processor = {
        **COLOURS, "crop_to_patches": False, "do_convert_rgb": True, "do_normalize": True, "do_rescale": True,
        "do_resize": True, "image_processor_type": "GotOcr2ImageProcessorFast", "max_patches": 12, "min_patches": 1,
        "processor_class": "InternVLProcessor", "resample": 3, "rescale_factor": 1 / 255,
        "size": {"height": side, "width": side},
    }  # fmt: skip
    write_json(folder, "preprocessor_config.json", processor)
    video = {
        **COLOURS, "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "fps": None,
        "initial_shift": True, "num_frames": 16, "processor_class": "InternVLProcessor", "resample": 3,
        "rescale_factor": 1 / 255, "size": {"height": side, "width": side},
        "video_processor_type": "InternVLVideoProcessor",
    }  # fmt: skip
    write_json(folder, "video_preprocessor_config.json", video)
    write_json(folder, "processor_config.json", {"image_seq_length": tokens, "processor_class": "InternVLProcessor"})
    (folder / "chat_template.jinja").write_text(templates.INTERNVL)
    ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    write_json(folder, "generation_config.json", {"eos_token_id": ends, "pad_token_id": ends[1], "do_sample": False})
    return folder


def write_network(folder: Path, name: str, vision: dict[str, Any] | None = None) -> Path:
    """Write a whole tiny one: 4 layers, hidden 96, tiles of 4 x 4 patches and 4 tokens; *vision* changes its tower."""
    import_torchvision()
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    write(folder, name, vocab_size=600, vision=TINY | (vision or {}))
    torch.manual_seed(0)
    model = InternVLForConditionalGeneration(InternVLConfig.from_pretrained(folder)).float().eval()
    randomize(model)
    stored = (one for key, tensor in model.state_dict().items() for one in one_by_one(key, tensor))
    tensors = {key: tensor.clone() for key, tensor in stored}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


CHAT_NAMES = (
    ("model.vision_tower.encoder.layer.", "vision_model.encoder.layers."),
    ("model.vision_tower.embeddings.cls_token", "vision_model.embeddings.class_embedding"),
    ("model.vision_tower.embeddings.patch_embeddings.projection.", "vision_model.embeddings.patch_embedding."),
    ("model.vision_tower.embeddings.position_embeddings", "vision_model.embeddings.position_embedding"),
    ("model.multi_modal_projector.layer_norm.", "mlp1.0."),
    ("model.multi_modal_projector.linear_1.", "mlp1.1."),
    ("model.multi_modal_projector.linear_2.", "mlp1.3."),
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    (".attention.projection_layer.", ".attn.proj."),
    (".attention.q_norm.", ".attn.q_norm."),
    (".attention.k_norm.", ".attn.k_norm."),
    (".layernorm_before.", ".norm1."),
    (".layernorm_after.", ".norm2."),
    (".lambda_1", ".ls1"),
    (".lambda_2", ".ls2"),
)


def write_chat(folder: Path, native: Path) -> Path:
    """Write the checkpoint *native* in the form of `InternVLChatModel` into *folder* and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((native / name).read_bytes())
    tensors = {}
    loaded = load_file(native / "model.safetensors")
    for key in [key for key in loaded if ".attention.q_proj." in key]:
        parts = [loaded.pop(key.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        loaded[key.replace("attention.q_proj", "attn.qkv")] = torch.cat(parts)
    for key, tensor in loaded.items():
        for theirs, ours in CHAT_NAMES:
            key = key.replace(theirs, ours)
        tensors[key] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((native / "config.json").read_text())
    side = config["vision_config"]["image_size"][0]
    native_vision = config["vision_config"]
    vision = {key: value for key, value in native_vision.items() if key in TEXT or "layer" in key}
    vision |= {key: VISION[key] for key in ("num_attention_heads", "intermediate_size", "hidden_size", "hidden_act")}
    vision |= {
        "image_size": side,
        "patch_size": 14,
        "qkv_bias": native_vision["attention_bias"],
        "qk_normalization": native_vision["use_qk_norm"],
        "norm_type": native_vision["norm_type"],
    }
    chat = {
        "architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "llm_config": config["text_config"],
        "vision_config": vision, "downsample_ratio": 0.5, "dynamic_image_size": True, "force_image_size": side,
        "max_dynamic_patch": 12, "min_dynamic_patch": 1, "pad2square": False, "ps_version": "v2", "select_layer": -1,
        "template": "internvl2_5", "use_thumbnail": True, "torch_dtype": "float32",
    }  # fmt: skip
    write_json(folder, "config.json", chat)
    processor = {
        **COLOURS, "crop_size": side, "do_center_crop": True, "do_normalize": True, "do_resize": True, "resample": 3,
        "feature_extractor_type": "CLIPFeatureExtractor", "size": side,
    }  # fmt: skip
    write_json(folder, "preprocessor_config.json", processor)
    return folder
