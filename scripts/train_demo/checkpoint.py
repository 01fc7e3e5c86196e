"""The hub layout: seven files that any loader of Qwen3-VL checkpoints reads."""

import json
from pathlib import Path
from typing import Any

import tokenizer as words
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

# Pictures are resized to at least and at most so many pixels.  128x64 lies on the lower bound; the upper one lets
# three to one pictures through at 192x64 and makes 96 rows of nearly square ones.
PIXELS = (8192, 12288)
# What transformers puts into every config and no loader of this family reads.
_NOT_WRITTEN = (
    "_name_or_path",
    "architectures",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "is_encoder_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "rope_parameters",
    "transformers_version",
)
LAYOUT = "4.57.1"
"""The transformers release whose config.json layout is written: the one hub checkpoints of this family have."""


def build_config(tokenizer: Tokenizer) -> Qwen3VLConfig:
    """The architecture of the demonstration model."""
    end = words.token_id(tokenizer, "<|im_end|>")
    pad = words.token_id(tokenizer, "<|endoftext|>")
    text = {
        "vocab_size": words.padded_size(tokenizer),
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [12, 10, 10],
            "mrope_interleaved": True,
        },
        "bos_token_id": pad,
        "eos_token_id": end,
        "tie_word_embeddings": True,
    }
    vision = {
        "depth": 5,
        "hidden_size": 192,
        "intermediate_size": 768,
        "num_heads": 6,
        "out_hidden_size": 256,
        "num_position_embeddings": 256,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "deepstack_visual_indexes": [1, 3],
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=words.token_id(tokenizer, "<|image_pad|>"),
        video_token_id=words.token_id(tokenizer, "<|video_pad|>"),
        vision_start_token_id=words.token_id(tokenizer, "<|vision_start|>"),
        vision_end_token_id=words.token_id(tokenizer, "<|vision_end|>"),
    )


def write_hub(folder: Path, model: Qwen3VLForConditionalGeneration, tokenizer: Tokenizer) -> None:
    """Write the model in bfloat16 with everything a loader needs beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    words.write(folder, tokenizer)
    _write_json(folder / "config.json", _hub_config(model.config))
    _write_json(folder / "generation_config.json", _generation_config(tokenizer))
    _write_json(folder / "preprocessor_config.json", _picture_config())
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _hub_config(config: Qwen3VLConfig) -> dict[str, Any]:
    """config.json as hub checkpoints of this family have it: rope as `rope_scaling`, `torch_dtype`, no nested names."""
    written: dict[str, Any] = config.to_dict()
    text, vision = written["text_config"], written["vision_config"]
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {
        "mrope_interleaved": True,
        "mrope_section": rope["mrope_section"],
        "rope_type": "default",
    }
    for part in (written, text, vision):
        for name in _NOT_WRITTEN:
            part.pop(name, None)
    text["torch_dtype"] = "bfloat16"
    vision["model_type"] = "qwen3_vl"
    written["architectures"] = ["Qwen3VLForConditionalGeneration"]
    written["torch_dtype"] = "bfloat16"
    written["transformers_version"] = LAYOUT
    return dict(sorted(written.items()))


def _generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    end = words.token_id(tokenizer, "<|im_end|>")
    pad = words.token_id(tokenizer, "<|endoftext|>")
    return {
        "bos_token_id": pad,
        "do_sample": False,
        "eos_token_id": [end, pad],
        "pad_token_id": pad,
        "transformers_version": LAYOUT,
    }


def _picture_config() -> dict[str, Any]:
    return {
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": 2,
        "patch_size": 16,
        "processor_class": "Qwen3VLProcessor",
        "size": {"longest_edge": PIXELS[1], "shortest_edge": PIXELS[0]},
        "temporal_patch_size": 2,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
