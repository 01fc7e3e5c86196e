"""Tiny checkpoints of architectures without a family, random, float32, with the releases' processors and tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from checkpoints.qwen3_vl import randomize
from checkpoints.vocabulary import added, byte_level, write_json

PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
END = "<|im_end|>"
VOCAB = 700
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ part['text'] if part['type'] == 'text' else IMAGE }}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SQUARE = {"size": {"height": 56, "width": 56}}
TILES = {**SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 4}
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 56, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL_TEXT = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
}  # fmt: skip
WINDOWS = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MERGED = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}


@dataclass(frozen=True)
class Release:
    """A release: its text and vision settings, others of config.json, its processor's, and its special tokens.

    *image* are the text that a template writes for an image and the token that stands for it.
    """

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    others: Mapping[str, Any]
    processor: Mapping[str, Any]
    pixels: Mapping[str, Any]
    image: tuple[str, str] = ("<image>", "<image>")
    named: Mapping[str, str] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()
    around: tuple[str, str] = ("", "")


RELEASES = {
    "aya_vision": Release(
        {"model_type": "cohere2", **WINDOWS},
        SIGLIP,
        {"downsample_factor": 2, "tie_word_embeddings": True},
        {"processor_class": "AyaVisionProcessor", "img_size": 56, "patch_size": 14, "downsample_factor": 2},
        {"image_processor_type": "GotOcr2ImageProcessor", **TILES},
        ("<image>", "<|IMG_PATCH|>"),
        tokens=("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>", "TILE_GLOBAL", *(f"TILE_{n}" for n in range(1, 5))),
    ),
    "lighton_ocr": Release(
        {"model_type": "qwen3"},
        {**SMALL, "model_type": "pixtral", "head_dim": 16, "image_size": 224, "patch_size": 14},
        {"spatial_merge_size": 2},
        {"processor_class": "LightOnOcrProcessor", "patch_size": 14, "spatial_merge_size": 2},
        {"image_processor_type": "PixtralImageProcessor", "patch_size": {"height": 14, "width": 14}, "size": {"longest_edge": 196}, "do_pad": True},
        ("<|image_pad|>", "<|image_pad|>"),
        {"image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>", "image_end_token": "<|vision_end|>"},
        ("<|vision_pad|>", "<|vision_end|>"),
    ),
    "llava_onevision": Release(
        {"model_type": "qwen2"},
        SIGLIP,
        {"image_grid_pinpoints": [[56, 56], [56, 112], [112, 56], [112, 112]], "video_token_index": 1},
        {"processor_class": "LlavaOnevisionProcessor", "num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        {"image_processor_type": "LlavaOnevisionImageProcessor", **SQUARE, "image_grid_pinpoints": [[56, 56], [56, 112], [112, 56], [112, 112]]},
        tokens=("<video>",),
    ),
    "gemma3": Release(
        {"model_type": "gemma3_text", **WINDOWS, "sliding_window": 12, "query_pre_attn_scalar": 24},
        SIGLIP,
        {"mm_tokens_per_image": 16},
        {"processor_class": "Gemma3Processor", "image_seq_length": 16},
        {"image_processor_type": "Gemma3ImageProcessor", **SQUARE},
        ("<start_of_image>", "<image_soft_token>"),
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        ("<end_of_image>",),
    ),
    "idefics3": Release(
        {"model_type": "llama"},
        {**SMALL, "image_size": 56, "patch_size": 14},
        {"scale_factor": 2},
        {"processor_class": "Idefics3Processor", "image_seq_len": 4},
        {"image_processor_type": "Idefics3ImageProcessor", "max_image_size": {"longest_edge": 56}, "size": {"longest_edge": 112}},
        tokens=("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))),
    ),
    "ovis2": Release(
        {"model_type": "qwen2"},
        {**SMALL, "image_size": 56, "patch_size": 14, "vocab_size": 64, "hidden_stride": 2},
        {"hidden_size": 64},
        {"processor_class": "Ovis2Processor", "image_seq_length": 4},
        {"image_processor_type": "Ovis2ImageProcessor", **TILES},
        ("<image>", "<IMG_ATOM>"),
        tokens=("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
    ),
    "qianfan_ocr": Release(
        {"model_type": "qwen3"},
        {**SMALL, "image_size": [56, 56], "patch_size": [14, 14]},
        {"image_seq_length": 4},
        {"processor_class": "QianfanOCRProcessor", "image_seq_length": 4},
        {"image_processor_type": "GotOcr2ImageProcessor", **TILES},
        ("<image>", "<IMG_CONTEXT>"),
        {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"},
        ("<img>", "</img>"),
    ),
    "aria": Release(
        {"model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
        {**SMALL, "model_type": "idefics3_vision", "image_size": 980, "patch_size": 70},
        {"projector_patch_to_query_dict": {"196": 4}},
        {"processor_class": "AriaProcessor", "size_conversion": {"980": 4}},
        {"image_processor_type": "AriaImageProcessor", "max_image_size": 980, "min_image_size": 336},
        named={"image_token": "<image>"},
    ),
    "video_llama_3": Release(
        {"model_type": "qwen2"},
        {**SMALL, "patch_size": 14},
        {"video_token_id": 1},
        {"processor_class": "VideoLlama3Processor"},
        {"image_processor_type": "VideoLlama3ImageProcessor", "patch_size": 14, "merge_size": 2, "size": {"shortest_edge": 784, "longest_edge": 50176}},
        ("<|image_pad|>", "<|image_pad|>"), MERGED, ("<|video_pad|>",),
    ),
    "exaone4_5": Release(
        {"model_type": "exaone4", **WINDOWS},
        {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_key_value_heads": 1, "out_hidden_size": 64, "window_size": 56, "fullatt_block_indexes": [1]},
        {"video_token_id": 1},
        {"processor_class": "Exaone4_5_Processor"},
        {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2, "size": {"shortest_edge": 3136, "longest_edge": 50176}},
        ("<|image_pad|>", "<|image_pad|>"), MERGED, ("<|video_pad|>",),
    ),
}  # fmt: skip
SERVED = tuple(name for name in RELEASES if name != "ovis2")
"""Without a class that embeds other tokens than placeholders for an image."""

ALONE = ("llava_onevision",)
"""Releases whose processor makes something else of an image if there are others."""

NATIVE = ("gemma3", "idefics3")
"""Releases that Saccade knows, so that config.json must ask for the library."""

KEYS = {"aya_vision": "image_token_index", "llava_onevision": "image_token_index", "aria": "image_token_index"}


def tokens_of(release: Release) -> tuple[str, ...]:
    """All special tokens, each once."""
    return tuple(dict.fromkeys(("<|im_start|>", END, *release.image, *release.tokens)))


def write(folder: Path, name: str) -> Path:
    """Write the checkpoint *name*, with weights, into *folder* and return it."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    folder.mkdir(parents=True, exist_ok=True)
    release = RELEASES[name]
    tokenizer = byte_level(PATTERN, vocab_size=600, nfc=False)
    import json

    numbered = dict(enumerate(map(added, tokens_of(release)), start=tokenizer.get_vocab_size()))
    parsed = json.loads(tokenizer.to_str())
    parsed["added_tokens"] = [{"id": number, **entry} for number, entry in numbered.items()]
    write_json(folder, "tokenizer.json", parsed)
    ids = {entry["content"]: number for number, entry in numbered.items()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END, "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {str(number): entry for number, entry in numbered.items()},
        "extra_special_tokens": dict(release.named), "processor_class": release.processor["processor_class"],
        "chat_template": TEMPLATE.replace("IMAGE", repr(release.image[0])),
    }  # fmt: skip
    write_json(folder, "tokenizer_config.json", settings)
    write_json(folder, "preprocessor_config.json", release.pixels)
    write_json(folder, "processor_config.json", release.processor)
    ends = {"eos_token_id": ids[END], "pad_token_id": ids[END], "bos_token_id": ids["<|im_start|>"]}
    text = {**SMALL_TEXT, **ends, **release.text}
    others = dict(release.others)
    if name == "ovis2":
        others["visual_indicator_token_ids"] = [ids[token] for token in release.tokens]
    image = {KEYS.get(name, "image_token_id"): ids[release.image[1]]}
    config = CONFIG_MAPPING[name].from_dict(
        {"text_config": text, "vision_config": dict(release.vision), "dtype": "float32", **image, **others}
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    randomize(model)
    model.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    asked = {"model_impl": "transformers"} if name in NATIVE else {}
    write_json(folder, "config.json", {**saved, **image, **asked})
    return folder
