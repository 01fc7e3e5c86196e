"""The tiny checkpoint's tokenizer and template, ours and the reference's."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from saccade.tokenization.chat_template import ChatTemplate, find_source
from saccade.tokenization.tokenizer import Tokenizer, special_variables

IMAGE_PAD = "<|image_pad|>"


@pytest.fixture(scope="session")
def tokenizer_config(tiny_qwen3_vl: Path) -> dict[str, Any]:
    return json.loads((tiny_qwen3_vl / "tokenizer_config.json").read_text())


@pytest.fixture(scope="session")
def tokenizer(tiny_qwen3_vl: Path, tokenizer_config: dict[str, Any]) -> Tokenizer:
    image_pad = json.loads((tiny_qwen3_vl / "config.json").read_text())["image_token_id"]
    return Tokenizer((tiny_qwen3_vl / "tokenizer.json").read_bytes(), tokenizer_config, (image_pad,))


@pytest.fixture(scope="session")
def template(tiny_qwen3_vl: Path, tokenizer: Tokenizer, tokenizer_config: dict[str, Any]) -> ChatTemplate:
    source = find_source(None, (tiny_qwen3_vl / "chat_template.json").read_bytes(), tokenizer_config)
    return ChatTemplate(source, tokenizer.special_tokens, special_variables(tokenizer_config))


@pytest.fixture(scope="session")
def reference_tokenizer(tiny_qwen3_vl: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        loaded = transformers.AutoTokenizer.from_pretrained(tiny_qwen3_vl)
    loaded.chat_template = json.loads((tiny_qwen3_vl / "chat_template.json").read_text())["chat_template"]
    return loaded
