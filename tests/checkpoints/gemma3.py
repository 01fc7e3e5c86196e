"""Gemma 3: as a gateway sees it, and a whole tiny one with random weights and the release's names of tensors."""

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
SPECIAL = ("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>")
TEXT = {
    "model_type": "gemma3_text", "head_dim": 16, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 4, "query_pre_attn_scalar": 24, "max_position_embeddings": 8192,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 12, "sliding_window_pattern": 3,
}  # fmt: skip
"""As the releases, which leave out what the class has by default. A window is shorter than an image."""

VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4,
    "num_hidden_layers": 3, "image_size": 64, "patch_size": 8, "vision_use_head": False,
}  # fmt: skip
NUM_TOKENS = 16


def write_tokenizer(folder: Path) -> dict[str, int]:
    """Write Gemma's kind of tokenizer, with runs of line breaks as tokens; return the ids of the added tokens."""
    parsed = byte_fallback()
    others = [token for token in parsed["model"]["vocab"] if token not in (UNKNOWN, BEGIN, END)]
    runs = [token for token in ("\n\n", "\n\n\n") if token not in others]
    parsed["model"]["vocab"] = {token: number for number, token in enumerate([*FIRST, *others])}
    parsed["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    parsed["pre_tokenizer"] = split
    parsed["decoder"]["decoders"].pop()
    numbered = dict(enumerate(map(added, FIRST))) | dict(enumerate(map(added, SPECIAL), len(others) + len(FIRST)))
    plain = enumerate(runs, len(others) + len(FIRST) + len(SPECIAL))
    numbered |= {number: {**added(text), "special": False} for number, text in plain}
    parsed["added_tokens"] = [{"id": number, **entry} for number, entry in numbered.items()]
    begin = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    parsed["post_processor"] = {
        "type": "TemplateProcessing", "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}},
    }  # fmt: skip
    write_json(folder, "tokenizer.json", parsed)
    settings = {
        "added_tokens_decoder": {str(number): entry for number, entry in numbered.items()}, "add_bos_token": True,
        "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>",
        "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>",
        "clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "Gemma3Processor",
    }  # fmt: skip
    write_json(folder, "tokenizer_config.json", settings)
    return {entry["content"]: number for number, entry in numbered.items()}


def write(folder: Path, changed: Mapping[str, Any] = MappingProxyType({})) -> Path:
    """Write the gateway's files into *folder* and return it; *changed* are keys of its text."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(folder)
    num_ids = -(-(max(ids.values()) + 1) // 32) * 32
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "float32",
        "boi_token_index": ids["<start_of_image>"], "eoi_token_index": ids["<end_of_image>"],
        "image_token_index": ids["<image_soft_token>"], "mm_tokens_per_image": NUM_TOKENS,
        "eos_token_id": [1, ids["<end_of_turn>"]], "initializer_range": 0.02,
        "text_config": {**TEXT, "vocab_size": num_ids, **changed}, "vision_config": VISION,
    }  # fmt: skip
    write_json(folder, "config.json", config)
    edge = VISION["image_size"]
    images = {
        "do_convert_rgb": None, "do_normalize": True, "do_pan_and_scan": None, "do_rescale": True, "do_resize": True,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_processor_type": "Gemma3ImageProcessor",
        "image_seq_length": NUM_TOKENS, "pan_and_scan_max_num_crops": None, "pan_and_scan_min_crop_size": None,
        "pan_and_scan_min_ratio_to_activate": None, "processor_class": "Gemma3Processor", "resample": 2,
        "rescale_factor": 1 / 255, "size": {"height": edge, "width": edge},
    }  # fmt: skip
    write_json(folder, "preprocessor_config.json", images)
    write_json(folder, "processor_config.json", {"image_seq_length": NUM_TOKENS, "processor_class": "Gemma3Processor"})
    write_json(folder, "chat_template.json", {"chat_template": templates.GEMMA3})
    ends = {"bos_token_id": 2, "eos_token_id": [1, ids["<end_of_turn>"]], "pad_token_id": 0}
    write_json(folder, "generation_config.json", ends)
    return folder


def _released(name: str) -> str:
    """Return the release's name of a tensor of transformers."""
    for ours, theirs in (
        ("model.language_model.", "language_model.model."), ("model.vision_tower.", "vision_tower.vision_model."),
        ("lm_head.", "language_model.lm_head."), ("model.", ""),
    ):  # fmt: skip
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def write_network(folder: Path, changed: Mapping[str, Any] = MappingProxyType({})) -> Path:
    """Write a whole tiny one: 4 layers, one of which attends to all tokens, hidden 64."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    write(folder, changed)
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(Gemma3Config.from_pretrained(folder)).float().eval()
    randomize(model)
    tensors = {
        _released(name): value.contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
