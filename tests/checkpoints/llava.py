"""LLaVA-1.5 and LLaVA-NeXT: as a gateway sees them, and whole tiny ones with random weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from checkpoints import templates
from checkpoints.qwen import CLIP
from checkpoints.qwen3_vl import randomize
from checkpoints.vocabulary import added, write_json, write_llama_like

SIDE = 336
PINPOINTS = [[1, 2], [2, 1], [2, 2], [3, 1], [1, 3]]
VISION = {
    "model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "image_size": SIDE, "patch_size": 14, "projection_dim": 64, "vocab_size": 32000,
}  # fmt: skip
TINY_VISION = {
    **VISION, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 5, "num_attention_heads": 6,
    "image_size": 56,
}  # fmt: skip
TINY_TEXT = {
    "hidden_size": 96, "intermediate_size": 168, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 8192,
}  # fmt: skip


def _write(folder: Path, names: Mapping[str, str], config: Mapping[str, Any], processor: Mapping[str, Any]) -> Path:
    """Write what both have; *names* holds architecture, model_type and the class of the processor."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [added("<image>"), added("<pad>")]
    settings = {"pad_token": "<pad>", "legacy": True, "processor_class": names["processor"]}
    ids = write_llama_like(folder, tokens, settings)
    side = config["vision_config"]["image_size"]
    own = {
        "architectures": [names["architecture"]], "model_type": names["model_type"],
        "image_token_index": ids["<image>"], "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
        "image_seq_length": (side // 14) ** 2, "projector_hidden_act": "gelu", "pad_token_id": ids["<pad>"],
        "torch_dtype": "float32",
    }  # fmt: skip
    write_json(folder, "config.json", {**own, **config})
    sizes = {
        "crop_size": {"height": side, "width": side}, "do_center_crop": True, "do_convert_rgb": True,
        "do_normalize": True, "do_rescale": True, "do_resize": True, "resample": 3, "rescale_factor": 1 / 255,
        "size": {"shortest_edge": side}, **CLIP,
    }  # fmt: skip
    write_json(folder, "preprocessor_config.json", {**sizes, **processor, "processor_class": names["processor"]})
    whole = {
        "image_token": "<image>", "num_additional_image_tokens": 1, "patch_size": 14,
        "processor_class": names["processor"], "vision_feature_select_strategy": "default",
    }  # fmt: skip
    write_json(folder, "processor_config.json", whole)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": ids["<pad>"]}
    write_json(folder, "generation_config.json", ends)
    return folder


def write_llava(folder: Path, vision: Mapping[str, Any] = VISION, text: Mapping[str, Any] | None = None) -> Path:
    """Write LLaVA-1.5; its text_config leaves out what Llama's defaults say."""
    names = {
        "architecture": "LlavaForConditionalGeneration", "model_type": "llava", "processor": "LlavaProcessor",
    }  # fmt: skip
    silent = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 960}
    config = {"vision_config": vision, "text_config": {**silent, **(text or {})}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "chat_template.jinja").write_text(templates.LLAVA)
    return _write(folder, names, config, {"image_processor_type": "CLIPImageProcessor"})


def write_llava_next(folder: Path, vision: Mapping[str, Any] = VISION, text: Mapping[str, Any] | None = None) -> Path:
    """Write LLaVA-NeXT over Mistral."""
    names = {
        "architecture": "LlavaNextForConditionalGeneration", "model_type": "llava_next",
        "processor": "LlavaNextProcessor",
    }  # fmt: skip
    silent = {"model_type": "mistral", "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "vocab_size": 960}
    pinpoints = [[side * vision["image_size"] for side in pinpoint] for pinpoint in PINPOINTS]
    config = {
        "vision_config": vision, "text_config": {**silent, **(text or {})}, "image_grid_pinpoints": pinpoints,
        "use_image_newline_parameter": True,
    }  # fmt: skip
    processor = {
        "image_grid_pinpoints": pinpoints, "do_pad": True, "aspect_ratio_setting": "anyres",
        "image_processor_type": "LlavaNextImageProcessor",
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder, "chat_template.json", {"chat_template": templates.LLAVA_NEXT})
    return _write(folder, names, config, processor)


HUB_NAMES = (
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.vision_tower.", "vision_tower.vision_model."),
    ("model.", ""),
)
"""What transformers 5 calls a part, and what the releases do; the first that fits counts."""


def write_llava_network(folder: Path) -> Path:
    """Write a whole LLaVA-1.5 of 4 layers, whose text_config leaves out the number of key and value heads."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    write_llava(folder, TINY_VISION, TINY_TEXT)
    return _write_weights(folder, LlavaForConditionalGeneration, LlavaConfig)


def write_llava_next_network(folder: Path) -> Path:
    """Write a whole LLaVA-NeXT of 4 layers over Mistral with grouped heads."""
    from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration

    write_llava_next(folder, TINY_VISION, {**TINY_TEXT, "num_key_value_heads": 2, "sliding_window": None})
    return _write_weights(folder, LlavaNextForConditionalGeneration, LlavaNextConfig)


def _write_weights(folder: Path, network: Any, config: Any) -> Path:
    torch.manual_seed(0)
    model = network(config.from_pretrained(folder)).float().eval()
    randomize(model)
    tensors = {_hub_name(name): value.contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _hub_name(name: str) -> str:
    ours, theirs = next(pair for pair in HUB_NAMES if name.startswith(pair[0]))
    return theirs + name.removeprefix(ours)
