"""Whole Qwen2-VL, Qwen2.5-VL, Qwen3-VL with experts and Qwen3.5: tiny, random, with the releases' names of tensors.

Sizes differ, so that no two dimensions agree by chance.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torchvision_schemas import import_torchvision

from checkpoints import qwen
from checkpoints.qwen3_vl import randomize
from checkpoints.vocabulary import byte_level, write_json

TOWER = {"patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2, "in_chans": 3}


def _text(ids: Mapping[str, int], **sizes: Any) -> dict[str, Any]:
    return {
        "vocab_size": qwen.vocab_size(ids), "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"], **sizes,
    }  # fmt: skip


def _flat(ids: Mapping[str, int], section: list[int], **sizes: Any) -> dict[str, Any]:
    """The text model's keys of a flat config.json."""
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": section}, "rope_theta": 1e6}
    window = {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 4}
    return {**_text(ids, **sizes), **rope, **window}


def _qwen2_vl(ids: Mapping[str, int]) -> dict[str, Any]:
    text = _flat(ids, [4, 3, 5], hidden_size=96, intermediate_size=160)
    vision = {**TOWER, "depth": 4, "embed_dim": 48, "hidden_size": 96, "num_heads": 6, "mlp_ratio": 3}
    return {**text, "vision_config": vision, "tie_word_embeddings": True}


def _qwen2_5_vl(ids: Mapping[str, int]) -> dict[str, Any]:
    text = _flat(ids, [3, 5, 6], hidden_size=112, intermediate_size=176)
    vision = {
        **TOWER, "depth": 5, "hidden_size": 40, "intermediate_size": 72, "num_heads": 2, "out_hidden_size": 112,
        "hidden_act": "silu", "window_size": 112, "fullatt_block_indexes": [1, 4], "tokens_per_second": 2,
    }  # fmt: skip
    return {**text, "vision_config": vision, "tie_word_embeddings": False}


def _qwen3_vl_moe(ids: Mapping[str, int]) -> dict[str, Any]:
    text = _text(ids, hidden_size=96, intermediate_size=144, head_dim=20, num_hidden_layers=5) | {
        "model_type": "qwen3_vl_moe_text", "attention_bias": False, "tie_word_embeddings": False, "rope_theta": 5e6,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 3, 3], "rope_type": "default"},
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "decoder_sparse_step": 1,
        "mlp_only_layers": [1], "norm_topk_prob": True,
    }  # fmt: skip
    vision = {
        "model_type": "qwen3_vl_moe", "depth": 4, "hidden_size": 56, "intermediate_size": 88, "num_heads": 2,
        "out_hidden_size": 96, "num_position_embeddings": 49, "patch_size": 16, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "in_channels": 3, "hidden_act": "gelu_pytorch_tanh",
        "deepstack_visual_indexes": [0, 2, 3],
    }  # fmt: skip
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": False}


def _qwen3_5_text(ids: Mapping[str, int], section: list[int], **sizes: Any) -> dict[str, Any]:
    rope = {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": section,
        "mrope_interleaved": True,
    }  # fmt: skip
    return _text(ids, **sizes) | {
        "attention_bias": False, "attn_output_gate": True, "mamba_ssm_dtype": "float32", "rope_parameters": rope,
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
    }  # fmt: skip


def _qwen3_5_tower(**sizes: int) -> dict[str, Any]:
    return {
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
        "hidden_act": "gelu_pytorch_tanh", **sizes,
    }  # fmt: skip


def _qwen3_5(ids: Mapping[str, int]) -> dict[str, Any]:
    """Layers by name, three value heads for a key head, and no key for deepstack."""
    linear, full = "linear_attention", "full_attention"
    text = _qwen3_5_text(ids, [3, 2, 1], hidden_size=104, intermediate_size=136, head_dim=48, num_hidden_layers=5) | {
        "model_type": "qwen3_5_text", "layer_types": [linear, full, linear, linear, full],
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 12, "linear_value_head_dim": 20,
        "linear_conv_kernel_dim": 4, "tie_word_embeddings": True,
    }  # fmt: skip
    vision = _qwen3_5_tower(
        depth=3, hidden_size=40, num_heads=2, intermediate_size=72, out_hidden_size=104, num_position_embeddings=36
    )
    return {"text_config": text, "vision_config": {**vision, "model_type": "qwen3_5"}, "tie_word_embeddings": True}


def _qwen3_5_moe(ids: Mapping[str, int]) -> dict[str, Any]:
    """Layers by an interval, one key/value head, and a longer convolution."""
    text = _qwen3_5_text(ids, [4, 3, 3], hidden_size=88, head_dim=80, num_key_value_heads=1) | {
        "model_type": "qwen3_5_moe_text", "full_attention_interval": 2, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 5, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 36,
        "shared_expert_intermediate_size": 44, "tie_word_embeddings": False,
    }  # fmt: skip
    vision = _qwen3_5_tower(
        depth=4, hidden_size=24, num_heads=6, intermediate_size=56, out_hidden_size=88, num_position_embeddings=49
    )
    vision |= {"model_type": "qwen3_5_moe", "deepstack_visual_indexes": []}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": False}


CONFIGS = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
}

HYBRIDS = ("qwen3_5", "qwen3_5_moe")


def _released(name: str, key: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Return name and layout of a tensor as the release *name* stores it."""
    if name == "qwen3_vl_moe":
        return key, tensor.transpose(1, 2) if ".experts." in key else tensor
    if name in HYBRIDS:
        return key, tensor
    for theirs, released in (("model.language_model.", "model."), ("model.visual.", "visual.")):
        key = key.replace(theirs, released)
    return key, tensor


def _draft_layer(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a draft layer: those of a layer with attention, and its own."""
    query = ".self_attn.q_proj.weight"
    prefix = next(key for key in tensors if key.endswith(query)).removesuffix(query)
    [hidden] = tensors["model.language_model.norm.weight"].shape
    shapes = {key: [*tensor.shape] for key, tensor in tensors.items() if key.startswith(f"{prefix}.")}
    shapes = {key.replace(prefix, "mtp.layers.0"): shape for key, shape in shapes.items()}
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    shapes |= {"mtp.fc.weight": [hidden, 2 * hidden], **{f"mtp.{norm}.weight": [hidden] for norm in norms}}
    draw = torch.Generator().manual_seed(1)
    return {
        key: torch.randn(shape, generator=draw) * (0.1 if len(shape) == 1 else shape[-1] ** -0.5)
        for key, shape in shapes.items()
    }


def write(folder: Path, name: str, changes: Mapping[str, Any] = MappingProxyType({})) -> Path:
    """Write the tiny release *name* into *folder* and return it: float32, under 3 MB.

    *changes* replace keys of config.json, and of its vision_config.
    """
    import_torchvision()
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    release = qwen.RELEASES[name]
    ids = qwen.write_tokenizer(folder, release, byte_level(release.pattern))
    names = {"architectures": [release.architecture], "model_type": name, **qwen.image_ids(ids)}
    config = {**names, **CONFIGS[name](ids), "torch_dtype": "float32"}
    config |= {**changes, "vision_config": {**config["vision_config"], **changes.get("vision_config", {})}}
    write_json(folder, "config.json", config)
    qwen.write_generation_config(folder, ids)
    size = {"size": {"shortest_edge": 4096, "longest_edge": 1048576}} if "size" in release.processor else {}
    write_json(folder, "preprocessor_config.json", {**release.processor, **size})
    model_class = getattr(transformers, release.architecture)
    torch.manual_seed(0)
    model = model_class(model_class.config_class.from_pretrained(folder)).float().eval()
    randomize(model)
    stored = (_released(name, key, tensor) for key, tensor in model.state_dict().items())
    tensors = {key: tensor.contiguous() for key, tensor in stored}
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    if name in HYBRIDS:
        tensors |= _draft_layer(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
