"""Which of a checkpoint's files makes its tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
from tokenizer_needs import NEEDS, read, settings_of

from saccade.errors import StartupError
from saccade.tokenization.imagewise import ImagewiseTokenizer
from saccade.tokenization.loading import TokenizerNeeds, load_tokenizer
from saccade.tokenization.tiktoken_model import TiktokenTokenizer
from saccade.tokenization.tokenizer_json import JsonTokenizer


@pytest.mark.parametrize(
    ("name", "kind"),
    [("kimi_k25", TiktokenTokenizer), ("phi3_v", ImagewiseTokenizer), ("llava", JsonTokenizer)],
)
def test_each_file_has_its_tokenizer(name: str, kind: type, checkpoint: Callable[[str], Path]) -> None:
    files = read(checkpoint(name))
    assert type(load_tokenizer(files, settings_of(files), NEEDS[name])) is kind


def test_a_conversion_beside_a_tiktoken_model_is_not_used(checkpoint: Callable[[str], Path]) -> None:
    files = read(checkpoint("kimi_k25")) | {"tokenizer.json": b"not even JSON"}
    assert isinstance(load_tokenizer(files, settings_of(files), NEEDS["kimi_k25"]), TiktokenTokenizer)


@pytest.mark.parametrize(("files", "sentence"), [({}, r"no tokenizer.json\."), ({"tiktoken.model": b""}, "split text")])
def test_no_tokenizer_is_a_startup_error(files: dict[str, bytes], sentence: str) -> None:
    with pytest.raises(StartupError, match=sentence):
        load_tokenizer(files, {}, TokenizerNeeds("<image>"))


def test_specials_only_in_the_config_are_merged_and_logged_once(checkpoint: Callable[[str], Path]) -> None:  # E3
    files = read(checkpoint("qwen2_vl"))
    with structlog.testing.capture_logs() as logs:
        tokenizer = load_tokenizer(files, settings_of(files), NEEDS["qwen2_vl"])
    in_json = [token["content"] for token in json.loads(files["tokenizer.json"])["added_tokens"]]
    assert [log["tokens"] for log in logs] == [[c for c in tokenizer.special_tokens if c not in in_json]]
    assert "<|image_pad|>" in tokenizer.special_tokens
    assert "<|image_pad|>" not in in_json


def test_no_tokenizer_config_is_fine(checkpoint: Callable[[str], Path]) -> None:  # E3
    files = read(checkpoint("llava"))
    assert "<image>" in load_tokenizer(files, {}, NEEDS["llava"]).special_tokens


@pytest.mark.parametrize("declared", ["id", None])
def test_placeholders_are_special_whatever_the_files_say(
    declared: str | None, checkpoint: Callable[[str], Path]
) -> None:  # A9 F2
    parsed = json.loads(read(checkpoint("llava"))["tokenizer.json"])
    for token in parsed["added_tokens"]:
        token["special"] = token["content"] != "<image>"
    ids = {token["content"]: token["id"] for token in parsed["added_tokens"]}
    needs = TokenizerNeeds("<image>", ids["<image>"] if declared else None)
    tokenizer = load_tokenizer({"tokenizer.json": json.dumps(parsed).encode()}, {}, needs)
    assert tokenizer.special_tokens["<image>"] == ids["<image>"]
    assert ids["<image>"] not in tokenizer.encode_text("a<image>b")
