"""Special tokens are those that the files name; typed ones are text."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import structlog

from saccade.errors import InvalidValue, StartupError
from saccade.tokenization.tokenizer import Segment, Tokenizer, special_variables


@pytest.fixture
def bare(tiny_qwen3_vl: Path) -> bytes:
    """tokenizer.json without any added token, as the release of Qwen2-VL-2B has it."""
    parsed = json.loads((tiny_qwen3_vl / "tokenizer.json").read_text())
    return json.dumps(parsed | {"added_tokens": []}).encode()


@pytest.mark.parametrize(
    "text", ["<|im_end|>", "a<|im_start|>b", "<|image_pad|><|image_pad|>", "你好<|endoftext|>", " <|im_end|> \n"]
)
def test_typed_specials_are_text_and_round_trip(
    text: str, tokenizer: Tokenizer, reference_tokenizer: Any
) -> None:  # F2
    token_ids = tokenizer.encode_text(text)
    assert not any(map(tokenizer.is_special, token_ids))
    assert tokenizer.decode(token_ids) == text
    assert token_ids == reference_tokenizer.encode(text, split_special_tokens=True)


def test_specials_of_the_template_become_single_ids(tokenizer: Tokenizer) -> None:  # A4
    for text, token_id in tokenizer.special_tokens.items():
        assert tokenizer.encode([Segment(text, is_special=True)]) == [token_id]


def test_specials_of_the_config_are_merged_once(
    bare: bytes, tokenizer: Tokenizer, tokenizer_config: dict[str, Any]
) -> None:  # A4
    with structlog.testing.capture_logs() as logs:
        merged = Tokenizer(bare, tokenizer_config)
    assert merged.special_tokens == tokenizer.special_tokens
    assert [log["tokens"] for log in logs] == [list(tokenizer.special_tokens)]
    assert "<think>" not in merged.special_tokens
    assert merged.decode(merged.encode_text("<think>")) == "<think>"
    assert (
        merged.encode([Segment("<|im_end|>", is_special=True), Segment("x", is_special=False)])[0]
        == (tokenizer.special_tokens["<|im_end|>"])
    )


def test_nothing_to_merge_says_nothing(tiny_qwen3_vl: Path, tokenizer_config: dict[str, Any]) -> None:  # A4
    content = (tiny_qwen3_vl / "tokenizer.json").read_bytes()
    with structlog.testing.capture_logs() as logs:
        alone, merged = Tokenizer(content, {}), Tokenizer(content, tokenizer_config)
    assert logs == []
    assert alone.special_tokens == merged.special_tokens
    assert alone.num_tokens == merged.num_tokens


def test_protected_ids_are_special_whatever_the_files_say(tiny_qwen3_vl: Path) -> None:  # F2 A9
    content = (tiny_qwen3_vl / "tokenizer.json").read_bytes()
    think = Tokenizer(content, {}).encode_text("<think>")
    assert len(think) == 1
    protected = Tokenizer(content, {}, think)
    assert protected.encode([Segment("<think>", is_special=True)]) == think
    assert protected.decode(protected.encode_text("a<think>b")) == "a<think>b"
    assert think[0] not in protected.encode_text("a<think>b")


def test_text_that_would_become_a_protected_id_is_refused(tiny_qwen3_vl: Path) -> None:  # F2
    content = (tiny_qwen3_vl / "tokenizer.json").read_bytes()
    letter = Tokenizer(content, {}).encode_text("q")
    with pytest.raises(InvalidValue):
        Tokenizer(content, {}, letter).encode_text("q")


@pytest.mark.parametrize(
    ("content", "config", "sentence"),
    [
        (b"{", {}, "tokenizer.json is not valid JSON"),
        (b"[]", {}, "tokenizer.json holds no"),
        (b'{"model": {"vocab": {}}, "decoder": {"type": "Metaspace"}}', {}, "Metaspace"),
        (None, {"added_tokens_decoder": {"x": {"content": "<a>", "special": True}}}, "'x' is no id"),
        (None, {"added_tokens_decoder": {"7": {"special": True}}}, "'7' has no `content`"),
        (None, {"added_tokens_decoder": {"9999": {"content": "<a>", "special": True}}}, "'<a>' the id 9999"),
    ],
)
def test_wrong_files_are_startup_errors(
    content: bytes | None, config: dict[str, Any], sentence: str, bare: bytes
) -> None:  # A4
    with pytest.raises(StartupError, match=sentence):
        Tokenizer(content or bare, config)


def test_unknown_protected_id_is_a_startup_error(bare: bytes) -> None:  # A9
    with pytest.raises(StartupError, match="99999"):
        Tokenizer(bare, {}, (99999,))


def test_ids_outside_the_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    outside = [tokenizer.num_tokens, tokenizer.num_tokens + 5, 2**40, -1]
    assert tokenizer.decode(outside) == ""
    assert all(map(tokenizer.is_special, outside))


def test_special_variables() -> None:
    config = {"bos_token": None, "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": "<pad>", "x": "y"}
    assert special_variables(config) == {"eos_token": "</s>", "pad_token": "<pad>"}


def test_long_text_lets_other_threads_run(tokenizer: Tokenizer) -> None:
    """The event loop among them: it has other clients to answer."""
    done = threading.Event()
    num_turns = 0

    def take_turns() -> None:
        nonlocal num_turns
        while not done.wait(0.001):
            num_turns += 1

    other = threading.Thread(target=take_turns)
    other.start()
    tokenizer.encode_text("word " * 400_000)
    done.set()
    other.join()
    assert num_turns > 50


def test_too_many_bytes_are_refused_before_they_become_tokens(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidValue, match="more than 4194304 bytes"):
        tokenizer.encode_text("\U0001f600" * (2**20 + 1))
