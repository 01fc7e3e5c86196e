"""The Qwen releases, as a gateway sees them: tokenizer, template, processor and config.json, no weights."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from checkpoints import templates
from checkpoints.vocabulary import added, byte_level, write_json

QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN3_5_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
TOOLS = ("<tool_call>", "</tool_call>")
NOT_SPECIAL = (*TOOLS, "<tool_response>", "</tool_response>", "<think>", "</think>")
CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip


@dataclass(frozen=True)
class Release:
    """What tells one release from another. *in_tokenizer_json* counts the added tokens that tokenizer.json has."""

    model_type: str
    architecture: str
    processor: Mapping[str, Any]
    template: str = templates.QWEN3
    template_file: str = "chat_template.json"
    pattern: str = QWEN2_PATTERN
    not_special: Sequence[str] = NOT_SPECIAL
    in_tokenizer_json: int = 1000
    tokenizer_class: str = "Qwen2Tokenizer"


QWEN2_PROCESSOR = {
    "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, **CLIP,
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor",
}  # fmt: skip
QWEN3_PROCESSOR = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "temporal_patch_size": 2,
    "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}  # fmt: skip
RELEASES = {
    "qwen2_vl": Release(
        model_type="qwen2_vl",
        architecture="Qwen2VLForConditionalGeneration",
        processor=QWEN2_PROCESSOR,
        template=templates.QWEN2,
        not_special=(),
        in_tokenizer_json=3,  # Qwen2-VL-2B: the rest is only in tokenizer_config.json
    ),
    "qwen2_5_vl": Release(
        model_type="qwen2_5_vl",
        architecture="Qwen2_5_VLForConditionalGeneration",
        processor={**QWEN2_PROCESSOR, "processor_class": "Qwen2_5_VLProcessor"},
        template=templates.QWEN2,
        not_special=TOOLS,
    ),
    "qwen3_vl": Release("qwen3_vl", "Qwen3VLForConditionalGeneration", QWEN3_PROCESSOR),
    "qwen3_vl_moe": Release("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", QWEN3_PROCESSOR),
} | {
    name: Release(
        model_type=name,
        architecture=architecture,
        processor=QWEN3_PROCESSOR,
        template=templates.QWEN3_5,
        template_file="chat_template.jinja",
        pattern=QWEN3_5_PATTERN,
        tokenizer_class="Qwen3_5Tokenizer",
    )
    for name, architecture in (
        ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
        ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    )
}


def write_tokenizer(folder: Path, release: Release, tokenizer: Tokenizer) -> dict[str, int]:
    """Write tokenizer.json, tokenizer_config.json and the chat template; return the ids of the added tokens."""
    tokens = [added(name) for name in SPECIAL] + [added(name, special=False) for name in release.not_special]
    numbered = dict(enumerate(tokens, start=tokenizer.get_vocab_size()))
    parsed = json.loads(tokenizer.to_str())
    kept = list(numbered.items())[: release.in_tokenizer_json]
    parsed["added_tokens"] = [{"id": number, **entry} for number, entry in kept]
    write_json(folder, "tokenizer.json", parsed)
    settings = {
        "added_tokens_decoder": {str(number): entry for number, entry in numbered.items()},
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "model_max_length": 32768,
        "split_special_tokens": False,
        "tokenizer_class": release.tokenizer_class,
    }
    write_json(folder, "tokenizer_config.json", settings)
    if release.template_file.endswith(".json"):
        write_json(folder, release.template_file, {"chat_template": release.template})
    else:
        (folder / release.template_file).write_text(release.template)
    return {entry["content"]: number for number, entry in numbered.items()}


def image_ids(ids: Mapping[str, int]) -> dict[str, int]:
    """Return the ids that config.json names."""
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def vocab_size(ids: Mapping[str, int]) -> int:
    """Return the rows of the embedding: the tokens, rounded up to 64."""
    return -(-(max(ids.values()) + 1) // 64) * 64


def write_generation_config(folder: Path, ids: Mapping[str, int]) -> None:
    """Write generation_config.json: greedy, ends at either end token."""
    ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    write_json(folder, "generation_config.json", {"do_sample": False, "eos_token_id": ends, "pad_token_id": ends[1]})


def _text(ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size(ids), "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32768, "intermediate_size": 256, "rms_norm_eps": 1e-6,
        "bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"], "hidden_act": "silu",
    }  # fmt: skip


def _config(release: Release, ids: Mapping[str, int]) -> dict[str, Any]:
    names = {"architectures": [release.architecture], "model_type": release.model_type, **image_ids(ids)}
    vision = {
        "depth": 4, "hidden_size": 64, "num_heads": 4, "patch_size": release.processor["patch_size"],
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 128, "intermediate_size": 128,
    }  # fmt: skip
    if release.template == templates.QWEN2:  # config.json of these is flat
        rope = {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}, "rope_theta": 1e6}
        vision |= {"in_chans": 3, "spatial_patch_size": 14, "embed_dim": 64}
        return {**names, **_text(ids), **rope, "vision_config": vision}
    text = {**_text(ids), "model_type": f"{release.model_type}_text"}
    vision |= {"in_channels": 3, "model_type": release.model_type, "num_position_embeddings": 64}
    return {**names, "text_config": text, "vision_config": vision}


def write(folder: Path, name: str) -> Path:
    """Write the gateway's files of the release *name* into *folder* and return it."""
    release = RELEASES[name]
    ids = write_tokenizer(folder, release, byte_level(release.pattern, vocab_size=1200, over_borders=True))
    write_json(folder, "config.json", _config(release, ids))
    write_json(folder, "preprocessor_config.json", release.processor)
    write_generation_config(folder, ids)
    return folder
