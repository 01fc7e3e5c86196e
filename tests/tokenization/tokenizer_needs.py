"""What the families of the tiny checkpoints ask of their tokenizers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints.kimi_k25 import PATTERN

from saccade.tokenization.image_tag import ImageTag
from saccade.tokenization.loading import TokenizerNeeds

PHI3_TAG = ImageTag("<|image_{number}|>\n")
NEEDS = {
    "qwen2_vl": TokenizerNeeds("<|image_pad|>"),
    "qwen3_5": TokenizerNeeds("<|image_pad|>"),
    "kimi_k25": TokenizerNeeds("<|media_pad|>", tiktoken_pattern=PATTERN),
    "llava": TokenizerNeeds("<image>"),
    "llava_next": TokenizerNeeds("<image>"),
    "phi3_v": TokenizerNeeds("<|image|>", image_tag=PHI3_TAG, split_at_images=True),
}


def read(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def settings_of(files: Mapping[str, bytes]) -> dict[str, Any]:
    return json.loads(files["tokenizer_config.json"])
