"""Kimi-K2.5, as a gateway sees it: tiktoken.model without tokenizer.json, processor settings nested in one key."""

import base64
from pathlib import Path

from checkpoints import templates
from checkpoints.vocabulary import added, byte_ranks, write_json

PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How the release's tokenizer splits text; it stands in its remote code, not in a file that a gateway reads."""

NUM_RESERVED = 256
NAMED = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 6: "<|start_header_id|>",
    7: "<|end_header_id|>", 9: "[EOT]", 10: "<|im_system|>", 11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>", 13: "<|tool_call_begin|>", 14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>", 17: "<|im_middle|>", 18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>",
    21: "<|media_pad|>", 22: "<think>", 23: "</think>", 254: "[UNK]", 255: "[PAD]",
}  # fmt: skip
"""Reserved tokens that have a name, by their place after the ranks; the rest are <|reserved_token_ID|>."""

NOT_SPECIAL = {NAMED[place] for place in (11, 12, 13, 14, 15, 22, 23)}
MEDIA_PROC_CFG = {
    "in_patch_limit": 16384, "patch_size": 14, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "merge_kernel_size": 2,
    "fixed_output_tokens": None, "patch_limit_on_one_side": 512, "in_patch_limit_each_frame": 4096,
    "in_patch_limit_video": None, "sample_fps": 2.0, "max_num_frames_each_video": None,
    "temporal_merge_kernel_size": 4, "timestamp_mode": "hh:mm:ss.fff",
    "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
}  # fmt: skip


def write_tokenizer(folder: Path) -> dict[str, int]:
    """Write tiktoken.model, tokenizer_config.json and chat_template.jinja; return the ids of the named tokens."""
    ranks = byte_ranks(PATTERN)
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks))
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    numbered = {len(ranks) + place: added(name, name not in NOT_SPECIAL) for place, name in NAMED.items()}
    settings = {
        "added_tokens_decoder": {str(number): entry for number, entry in numbered.items()},
        "additional_special_tokens": [NAMED[place] for place in (2, 3, 4, 6, 7, 9, 10, 17)],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]",
        "clean_up_tokenization_spaces": False, "extra_special_tokens": {},
        "model_max_length": 1000000000000000019884624838656, "tokenizer_class": "TikTokenTokenizer",
    }  # fmt: skip
    write_json(folder, "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(templates.KIMI_K25)
    return {entry["content"]: number for number, entry in numbered.items()}


def write(folder: Path) -> Path:
    """Write the gateway's files into *folder* and return it."""
    ids = write_tokenizer(folder)
    ends = {"bos_token_id": ids["[BOS]"], "eos_token_id": ids["[EOS]"], "pad_token_id": ids["[PAD]"]}
    text = {
        "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": ids["[BOS]"] + NUM_RESERVED,
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
        "max_position_embeddings": 262144, **ends,
    }  # fmt: skip
    vision = {
        "patch_size": 14, "merge_kernel_size": [2, 2], "init_pos_emb_height": 64, "init_pos_emb_width": 64,
        "init_pos_emb_time": 4, "vt_hidden_size": 64, "vt_num_hidden_layers": 2, "vt_num_attention_heads": 4,
        "vt_intermediate_size": 128, "mm_hidden_size": 64, "text_hidden_size": 128, "merge_type": "sd2_tpool",
    }  # fmt: skip
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text,
        "vision_config": vision, "media_placeholder_token_id": ids["<|media_pad|>"], "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>", "ignore_index": -100, **ends,
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
    }  # fmt: skip
    write_json(folder, "config.json", config)
    processor = {
        "auto_map": {
            "AutoProcessor": "kimi_k25_processor.KimiK25Processor",
            "AutoImageProcessor": "kimi_k25_vision_processing.KimiK25VisionProcessor",
        },
        "media_proc_cfg": MEDIA_PROC_CFG,
    }
    write_json(folder, "preprocessor_config.json", processor)
    write_json(folder, "generation_config.json", {"max_length": 262144, "eos_token_id": ids["<|im_end|>"]})
    return folder
