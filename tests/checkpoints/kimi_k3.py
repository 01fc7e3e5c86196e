"""Kimi-K3, as a gateway sees it: Kimi-K2.5's kinds of files with other tokens and settings, and no chat template."""

import base64
from pathlib import Path

from checkpoints.kimi_k25 import PATTERN
from checkpoints.vocabulary import added, byte_ranks, write_json

NUM_RESERVED = 256
NAMED = {
    0: "[BOS]", 1: "[EOS]", 2: "<|open|>", 3: "<|close|>", 4: "<|sep|>", 5: "<|end_of_msg|>", 9: "[EOT]",
    18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>", 21: "<|media_pad|>",
    253: "<|kimi_image_placeholder|>", 254: "[UNK]", 255: "[PAD]",
}  # fmt: skip
"""Reserved tokens that have a name, by their place after the ranks. The places are made up, the names are not."""

MEDIA_PROC_CFG = {
    "in_patch_limit": 65536, "patch_size": 14, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "merge_kernel_size": 2,
    "fixed_output_tokens": None, "patch_limit_on_one_side": 512,
    "transparent_bg_config": {
        "pattern": "chessboard", "chessboard_square_size": 8, "chessboard_square_on_top_left": True,
        "chessboard_white_value": 255, "chessboard_gray_value": 180,
    },
    "transparent_bg_fill_stage": "after_resize",
}  # fmt: skip


def write(folder: Path) -> Path:
    """Write the gateway's files into *folder* and return it."""
    ranks = byte_ranks(PATTERN)
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks))
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    ids = {name: len(ranks) + place for place, name in NAMED.items()}
    settings = {
        "added_tokens_decoder": {str(number): added(name, True) for name, number in ids.items()},
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
    }  # fmt: skip
    write_json(folder, "tokenizer_config.json", settings)
    config = {
        "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3",
        "text_config": {
            "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "hidden_size": 64,
            "vocab_size": len(ranks) + NUM_RESERVED, "max_position_embeddings": 1_048_576,
        },
        "vision_config": {"model_type": "kimi_k3_vision", "patch_size": 14, "merge_kernel_size": [2, 2]},
        "media_placeholder_token_id": ids["<|media_pad|>"], "image_placeholder": "<|kimi_image_placeholder|>",
        "bos_token_id": ids["[BOS]"], "eos_token_id": ids["[EOS]"], "pad_token_id": ids["[PAD]"],
    }  # fmt: skip
    write_json(folder, "config.json", config)
    write_json(folder, "preprocessor_config.json", {"media_proc_cfg": MEDIA_PROC_CFG})
    write_json(folder, "generation_config.json", {"eos_token_id": ids["<|end_of_msg|>"]})
    return folder
