"""Mistral Small 3.1 and Ministral 3: as a gateway sees it, and whole tiny ones with random weights and the release's names of tensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import processors

from checkpoints import templates
from checkpoints.qwen import CLIP
from checkpoints.qwen3_vl import randomize
from checkpoints.vocabulary import BEGIN, END, UNKNOWN, added, byte_level, write_json

TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = (
    UNKNOWN, BEGIN, END, "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
)  # fmt: skip
TEXT = {
    "model_type": "mistral", "hidden_size": 96, "intermediate_size": 168, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192, "rope_theta": 1000000000.0, "sliding_window": None, "attention_dropout": 0.0,
    "use_cache": True, "vocab_size": 1280,
}  # fmt: skip
YARN = {
    "type": "yarn", "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
"""Queries grow at every 32nd position, so that it shows."""

MINISTRAL = {
    **{key: value for key, value in TEXT.items() if key != "rope_theta"}, "model_type": "ministral3",
    "rope_parameters": {**YARN, "max_position_embeddings": 8192}, "tie_word_embeddings": False,
}  # fmt: skip
RELEASES: Mapping[str, Mapping[str, Any]] = {"mistral3": TEXT, "ministral3": MINISTRAL}
"""The text of each."""

VISION = {
    "model_type": "pixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "head_dim": 16, "hidden_act": "silu", "image_size": 1540, "patch_size": 14,
    "num_channels": 3, "rope_theta": 10000.0, "attention_dropout": 0.0,
}  # fmt: skip


def _tokenizer(folder: Path) -> dict[str, int]:
    """Write a tokenizer like Tekken, which begins every text with a token; return the ids of the added tokens."""
    tokenizer = byte_level(TEKKEN_PATTERN, vocab_size=1200, nfc=False, over_borders=True)
    numbered = dict(enumerate(map(added, SPECIAL), start=tokenizer.get_vocab_size()))
    ids = {entry["content"]: number for number, entry in numbered.items()}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN}:1 $B:1", special_tokens=[(BEGIN, ids[BEGIN])]
    )
    parsed = json.loads(tokenizer.to_str())
    parsed["added_tokens"] = [{"id": number, **entry} for number, entry in numbered.items()]
    write_json(folder, "tokenizer.json", parsed)
    settings = {
        "add_bos_token": True, "add_eos_token": False, "bos_token": BEGIN, "eos_token": END, "unk_token": UNKNOWN,
        "pad_token": "<pad>", "added_tokens_decoder": {str(number): entry for number, entry in numbered.items()},
        "clean_up_tokenization_spaces": False, "model_max_length": 131072, "processor_class": "PixtralProcessor",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    write_json(folder, "tokenizer_config.json", settings)
    return ids


def write(folder: Path, name: str = "mistral3", changes: Mapping[str, Any] | None = None) -> Path:
    """Write the gateway's files of the release *name* into *folder* and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = _tokenizer(folder)
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
        "image_token_index": ids["[IMG]"], "multimodal_projector_bias": False, "projector_hidden_act": "gelu",
        "spatial_merge_size": 2, "vision_feature_layer": -1, "text_config": RELEASES[name], "vision_config": VISION,
        "torch_dtype": "float32",
    }  # fmt: skip
    write_json(folder, "config.json", {**config, **(changes or {})})
    sizes = {
        "crop_size": None, "do_center_crop": None, "do_convert_rgb": True, "do_normalize": True, "do_rescale": True,
        "do_resize": True, "image_processor_type": "PixtralImageProcessorFast", "patch_size": 14,
        "processor_class": "PixtralProcessor", "resample": 3, "rescale_factor": 1 / 255,
        "size": {"longest_edge": 1540}, **CLIP,
    }  # fmt: skip
    write_json(folder, "preprocessor_config.json", sizes)
    tokens = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    whole = {**tokens, "patch_size": 14, "processor_class": "PixtralProcessor", "spatial_merge_size": 2}
    write_json(folder, "processor_config.json", whole)
    write_json(folder, "chat_template.json", {"chat_template": templates.MISTRAL3})
    ends = {"bos_token_id": ids[BEGIN], "eos_token_id": ids[END], "pad_token_id": ids["<pad>"]}
    write_json(folder, "generation_config.json", ends)
    return folder


def _released(name: str) -> str:
    """Return the release's name of a tensor of transformers."""
    for ours, theirs in (
        ("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."), ("model.", "")
    ):  # fmt: skip
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def write_network(folder: Path, name: str = "mistral3") -> Path:
    """Write a whole tiny one: 3 layers, hidden 96, heads wider than its part of that."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    write(folder, name)
    torch.manual_seed(0)
    model = Mistral3ForConditionalGeneration(Mistral3Config.from_pretrained(folder, tie_word_embeddings=False))
    randomize(model.float().eval())
    tensors = {_released(name): value.contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
