"""LLaVA-1.5 and LLaVA-NeXT, as a gateway sees them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints import templates
from checkpoints.qwen import CLIP
from checkpoints.vocabulary import added, write_json, write_llama_like

SIDE = 336
PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
PROCESSOR = {
    "crop_size": {"height": SIDE, "width": SIDE}, "do_center_crop": True, "do_convert_rgb": True, "do_normalize": True,
    "do_rescale": True, "do_resize": True, "resample": 3, "rescale_factor": 1 / 255, "size": {"shortest_edge": SIDE},
    **CLIP,
}  # fmt: skip
VISION = {
    "model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "image_size": SIDE, "patch_size": 14, "projection_dim": 64, "vocab_size": 32000,
}  # fmt: skip


def _write(folder: Path, names: Mapping[str, str], config: Mapping[str, Any], processor: Mapping[str, Any]) -> Path:
    """Write what both have; *names* holds architecture, model_type and the class of the processor."""
    tokens = [added("<image>"), added("<pad>")]
    settings = {"pad_token": "<pad>", "legacy": True, "processor_class": names["processor"]}
    ids = write_llama_like(folder, tokens, settings)
    own = {
        "architectures": [names["architecture"]], "model_type": names["model_type"], "vision_config": VISION,
        "image_token_index": ids["<image>"], "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
        "image_seq_length": (SIDE // 14) ** 2, "projector_hidden_act": "gelu", "pad_token_id": ids["<pad>"],
    }  # fmt: skip
    write_json(folder, "config.json", {**own, **config})
    write_json(folder, "preprocessor_config.json", {**PROCESSOR, **processor, "processor_class": names["processor"]})
    whole = {
        "image_token": "<image>", "num_additional_image_tokens": 1, "patch_size": 14,
        "processor_class": names["processor"], "vision_feature_select_strategy": "default",
    }  # fmt: skip
    write_json(folder, "processor_config.json", whole)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": ids["<pad>"]}
    write_json(folder, "generation_config.json", ends)
    return folder


def write_llava(folder: Path) -> Path:
    """Write LLaVA-1.5; its text_config leaves out what Llama's defaults say."""
    names = {
        "architecture": "LlavaForConditionalGeneration", "model_type": "llava", "processor": "LlavaProcessor",
    }  # fmt: skip
    text = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 960}
    (folder / "chat_template.jinja").write_text(templates.LLAVA)
    return _write(folder, names, {"text_config": text}, {"image_processor_type": "CLIPImageProcessor"})


def write_llava_next(folder: Path) -> Path:
    """Write LLaVA-NeXT over Mistral."""
    names = {
        "architecture": "LlavaNextForConditionalGeneration", "model_type": "llava_next",
        "processor": "LlavaNextProcessor",
    }  # fmt: skip
    text = {"model_type": "mistral", "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "vocab_size": 960}
    config = {"text_config": text, "image_grid_pinpoints": PINPOINTS, "use_image_newline_parameter": True}
    processor = {
        "image_grid_pinpoints": PINPOINTS, "do_pad": True, "aspect_ratio_setting": "anyres",
        "image_processor_type": "LlavaNextImageProcessor",
    }  # fmt: skip
    write_json(folder, "chat_template.json", {"chat_template": templates.LLAVA_NEXT})
    return _write(folder, names, config, processor)
