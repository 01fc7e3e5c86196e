"""Special tokens are those that the files name; typed ones are text."""

import json
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from tables import table

from saccade.errors import InvalidValue, StartupError
from saccade.tokenization.tokenizer import Segment, Tokenizer
from saccade.tokenization.tokenizer_json import JsonTokenizer


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
        merged = JsonTokenizer(bare, tokenizer_config)
    hidden = {text: number for text, number in tokenizer.special_tokens.items() if tokenizer.is_special(number)}
    assert merged.special_tokens == hidden
    assert [log["tokens"] for log in logs] == [list(hidden)]
    assert "<think>" not in merged.special_tokens
    assert merged.decode(merged.encode_text("<think>")) == "<think>"
    assert (
        merged.encode([Segment("<|im_end|>", is_special=True), Segment("x", is_special=False)])[0]
        == (tokenizer.special_tokens["<|im_end|>"])
    )


def test_nothing_to_merge_says_nothing(tiny_qwen3_vl: Path, tokenizer_config: dict[str, Any]) -> None:  # A4
    content = (tiny_qwen3_vl / "tokenizer.json").read_bytes()
    with structlog.testing.capture_logs() as logs:
        alone, merged = JsonTokenizer(content, {}), JsonTokenizer(content, tokenizer_config)
    assert logs == []
    assert alone.special_tokens == merged.special_tokens
    assert alone.num_tokens == merged.num_tokens


def test_protected_ids_are_special_whatever_the_files_say(tiny_qwen3_vl: Path) -> None:  # F2 A9
    content = (tiny_qwen3_vl / "tokenizer.json").read_bytes()
    think = JsonTokenizer(content, {}).token_id("<think>")
    assert think is not None
    protected = JsonTokenizer(content, {}, [think])
    assert protected.is_special(think)
    assert protected.encode([Segment("<think>", is_special=True)]) == [think]
    assert protected.decode(protected.encode_text("a<think>b")) == "a<think>b"
    assert think not in protected.encode_text("a<think>b")


def test_tags_are_written_by_templates_only_and_shown_in_answers(tiny_qwen3_vl: Path) -> None:  # F2
    tokenizer = JsonTokenizer((tiny_qwen3_vl / "tokenizer.json").read_bytes(), {})
    for tag in ("<think>", "</think>", "<tool_call>", "</tool_call>"):
        token_id = tokenizer.token_id(tag)
        assert token_id is not None
        assert tokenizer.encode([Segment(tag, is_special=True)]) == [token_id]
        assert token_id not in tokenizer.encode_text(f"a{tag}b")
        assert not tokenizer.is_special(token_id)
        assert tokenizer.decode([token_id]) == tag


def test_text_that_would_become_a_protected_id_is_refused(tiny_qwen3_vl: Path) -> None:  # F2
    content = (tiny_qwen3_vl / "tokenizer.json").read_bytes()
    letter = JsonTokenizer(content, {}).encode_text("q")
    with pytest.raises(InvalidValue):
        JsonTokenizer(content, {}, letter).encode_text("q")


@table(
    ("content", "config", "sentence"),
    [
        (b"{", {}, "tokenizer.json is not valid JSON"),
        (b"[]", {}, "tokenizer.json has no"),
        (b'{"model": {"vocab": {}}, "decoder": {"type": "Metaspace"}}', {}, "Metaspace"),
        (None, {"added_tokens_decoder": {"x": {"content": "<a>", "special": True}}}, "'x' is not an id"),
        (None, {"added_tokens_decoder": {"7": {"special": True}}}, "'7' has no `content`"),
        (None, {"added_tokens_decoder": {"9999": {"content": "<a>", "special": True}}}, "'<a>' the id 9999"),
    ],
)
def test_wrong_files_are_startup_errors(
    content: bytes | None, config: dict[str, Any], sentence: str, bare: bytes
) -> None:  # A4
    with pytest.raises(StartupError, match=sentence):
        JsonTokenizer(content or bare, config)


def test_protected_tokens_that_do_not_exist_protect_nothing(bare: bytes) -> None:  # A9: the caller asks for them
    tokenizer = JsonTokenizer(bare, {}, (99999, "<|no such token|>"))
    assert tokenizer.special_tokens == {}
    assert tokenizer.token_id("<|no such token|>") is None


def test_ids_outside_the_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    outside = [tokenizer.num_tokens, tokenizer.num_tokens + 5, 2**40, -1]
    assert tokenizer.decode(outside) == ""
    assert all(map(tokenizer.is_special, outside))


def test_ids_outside_the_vocabulary_are_not_kept(tokenizer: Tokenizer) -> None:
    outside = range(tokenizer.num_tokens, tokenizer.num_tokens + 20_000)
    tracemalloc.start()
    try:
        for token_id in outside:
            assert tokenizer.bytes_of[token_id] == b""
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 100_000


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


LLAMA_TEXTS = (
    "Hi",
    "",
    " leading",
    "two  spaces\nand lines\n\n",
    "你好 é \U0001f600\x00",
    "▁typed▁",
    "<0x41>",
    "a" * 300,
)


@table("text", LLAMA_TEXTS)
def test_sentencepiece_text_equals_the_reference(
    text: str, tokenizer_of: Callable[[str], Tokenizer], reference_of: Callable[[str], Any]
) -> None:  # E1
    token_ids = tokenizer_of("llava").encode_text(text)
    assert token_ids == reference_of("llava")(text)["input_ids"]
    assert tokenizer_of("llava").decode(token_ids) == reference_of("llava").decode(token_ids)


def test_text_after_a_special_token_is_a_text_of_its_own(
    tokenizer_of: Callable[[str], Tokenizer], reference_of: Callable[[str], Any]
) -> None:  # E1
    pieces = ["USER: ", "<image>", "\nWhat?", "</s>", " ", "<image>", "<image>", "x"]
    segments = [Segment(piece, piece.startswith("<")) for piece in pieces]
    assert tokenizer_of("llava").encode(segments) == reference_of("llava")("".join(pieces))["input_ids"]


@table(
    ("add_bos_token", "segments", "num_bos"),
    [
        (True, [Segment("x", False)], 1),
        (True, [Segment("<s>", True), Segment("x", False)], 1),
        (True, [Segment("<s>", False)], 1),
        (False, [Segment("x", False)], 0),
        (False, [Segment("<s>", True), Segment("x", False)], 1),
        (True, [], 1),
    ],
)
def test_bos_is_there_once_unless_it_is_turned_off(
    add_bos_token: bool, segments: list[Segment], num_bos: int, checkpoint: Callable[[str], Path]
) -> None:  # E4
    content = (checkpoint("llava") / "tokenizer.json").read_bytes()
    token_ids = JsonTokenizer(content, {"add_bos_token": add_bos_token}).encode(segments)
    assert token_ids[:1].count(1) == token_ids.count(1) == num_bos


def test_tokens_after_a_text_are_refused(checkpoint: Callable[[str], Path]) -> None:
    parsed = json.loads((checkpoint("llava") / "tokenizer.json").read_text())
    parsed["post_processor"]["single"].append(parsed["post_processor"]["single"][0])
    with pytest.raises(StartupError, match="after a text"):
        JsonTokenizer(json.dumps(parsed).encode(), {})


def test_combining_marks_equal_the_reference(
    tokenizer_of: Callable[[str], Tokenizer], reference_of: Callable[[str], Any]
) -> None:  # E1
    """Qwen3.5 keeps marks with their letters; transformers has that pattern in its class, the releases in the file."""
    text = "हिन्दी में नमस्ते, e\u0301\u0301 x\u20d2 ก็ ​มี \u0301start \u0301"
    assert tokenizer_of("qwen3_5").encode_text(text) == reference_of("qwen3_5")(text)["input_ids"]


def test_normalised_specials_are_found_all_the_same(checkpoint: Callable[[str], Path]) -> None:  # A4
    parsed = json.loads((checkpoint("llava") / "tokenizer.json").read_text())
    for token in parsed["added_tokens"]:
        token["normalized"] = True
    tokenizer = JsonTokenizer(json.dumps(parsed).encode(), {})
    segments = [Segment("x", False), Segment("</s>", True), Segment("</s>", False)]
    assert tokenizer.encode(segments).count(tokenizer.special_tokens["</s>"]) == 1
