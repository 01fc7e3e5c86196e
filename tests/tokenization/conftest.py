"""Tokenizers and templates of tiny checkpoints, ours and the reference's."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from references.native import load
from tokenizer_needs import NEEDS, read, settings_of

from saccade.tokenization.chat_template import ChatTemplate, find_source
from saccade.tokenization.loading import load_tokenizer
from saccade.tokenization.tokenizer import Tokenizer, special_variables
from saccade.tokenization.tokenizer_json import JsonTokenizer


@pytest.fixture(scope="session")
def tokenizer_of(checkpoint: Callable[[str], Path]) -> Callable[[str], Tokenizer]:
    """Our tokenizer for the checkpoint of that name."""

    @cache
    def made(name: str) -> Tokenizer:
        files = read(checkpoint(name))
        return load_tokenizer(files, settings_of(files), NEEDS[name])

    return made


@pytest.fixture(scope="session")
def template_of(checkpoint: Callable[[str], Path], tokenizer_of: Callable[[str], Tokenizer]) -> Callable[..., Any]:
    """Our template for the checkpoint of that name."""

    @cache
    def made(name: str) -> ChatTemplate:
        files = read(checkpoint(name))
        source = find_source(files.get("chat_template.jinja"), files.get("chat_template.json"), settings_of(files))
        variables = special_variables(settings_of(files))
        return ChatTemplate(source, tokenizer_of(name).special_tokens, variables, NEEDS[name].image_tag)

    return made


@pytest.fixture(scope="session")
def reference_of(checkpoint: Callable[[str], Path]) -> Callable[[str], Any]:
    """transformers' tokenizer for the checkpoint of that name."""
    return cache(lambda name: load(checkpoint(name), "AutoTokenizer"))


@pytest.fixture(scope="session")
def tokenizer_config(tiny_qwen3_vl: Path) -> dict[str, Any]:
    return json.loads((tiny_qwen3_vl / "tokenizer_config.json").read_text())


@pytest.fixture(scope="session")
def tokenizer(tiny_qwen3_vl: Path, tokenizer_config: dict[str, Any]) -> Tokenizer:
    image_pad = json.loads((tiny_qwen3_vl / "config.json").read_text())["image_token_id"]
    return JsonTokenizer((tiny_qwen3_vl / "tokenizer.json").read_bytes(), tokenizer_config, (image_pad,))


@pytest.fixture(scope="session")
def template(tiny_qwen3_vl: Path, tokenizer: Tokenizer, tokenizer_config: dict[str, Any]) -> ChatTemplate:
    source = find_source(None, (tiny_qwen3_vl / "chat_template.json").read_bytes(), tokenizer_config)
    return ChatTemplate(source, tokenizer.special_tokens, special_variables(tokenizer_config))


@pytest.fixture(scope="session")
def reference_tokenizer(tiny_qwen3_vl: Path) -> Any:
    loaded = load(tiny_qwen3_vl, "AutoTokenizer")
    loaded.chat_template = json.loads((tiny_qwen3_vl / "chat_template.json").read_text())["chat_template"]
    return loaded
