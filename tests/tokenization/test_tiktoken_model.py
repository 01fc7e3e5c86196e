"""A tiktoken.model is read as the release's own code reads it."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from checkpoints.kimi_k25 import PATTERN
from references.kimi_k25 import KimiK25
from tables import table

from saccade.errors import InvalidValue, StartupError
from saccade.tokenization.tiktoken_model import TiktokenTokenizer
from saccade.tokenization.tokenizer import Segment, Tokenizer

EVERY_BYTE = b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256))
TEXTS = (
    "", "What is in this image?\n\n\n  ok  ", "你好，世界！abc中文mixed混合 text123456", "naïve café’s don't I'LL we've",
    "  \t\n x", "한국어 テスト", "a1b22c333d4444", "e\u0301\u0301 combining", "😀😃", "CamelCaseHTTPServer iPhone ǅ",
)  # fmt: skip


@pytest.fixture(scope="module")
def kimi(tokenizer_of: Callable[[str], Tokenizer]) -> Tokenizer:
    return tokenizer_of("kimi_k25")


@pytest.fixture(scope="module")
def encoding(checkpoint: Callable[[str], Path]) -> tiktoken.Encoding:
    return KimiK25(checkpoint("kimi_k25")).encoding


@table("text", TEXTS)
def test_text_equals_the_reference(text: str, kimi: Tokenizer, encoding: tiktoken.Encoding) -> None:  # E1
    assert kimi.encode_text(text) == encoding.encode(text)
    assert kimi.decode(kimi.encode_text(text)) == text


def test_reserved_ids_have_names(kimi: Tokenizer) -> None:  # A1 A4
    base = kimi.num_tokens - 256
    assert kimi.special_tokens["[BOS]"] == base
    assert kimi.special_tokens["<|media_pad|>"] == base + 21
    assert kimi.special_tokens[f"<|reserved_token_{base + 5}|>"] == base + 5
    assert len(kimi.special_tokens) == 256
    assert [kimi.is_special(base + place) for place in (2, 5, 22)] == [True, True, False]


def runs(kind: str) -> str:
    return {
        "letters": "x" * 60_001,
        "after text": "word " + "y" * 50_000 + " z",
        "spaces": "a" + " " * 25_001 + "b",
        "exactly as long": "x" * 25_000 + " " + "x" * 25_000,
        "beyond a chunk": "wo rd" * 90_000,
        "run over the end of a chunk": "ab " * 130_000 + "x" * 30_000,
        "unit separators": "\x1f" * 25_001 + "\u3000" * 25_001,
    }[kind]


@table(
    "kind",
    [
        "letters", "after text", "spaces", "exactly as long", "beyond a chunk", "run over the end of a chunk",
        "unit separators",
    ],
)  # fmt: skip
def test_long_text_is_cut_where_the_release_cuts(kind: str, kimi: Tokenizer, checkpoint: Any) -> None:  # E1
    text = "<|im_user|>user<|im_middle|>" + runs(kind) + "<|im_end|>"
    segments = [
        Segment("<|im_user|>", True), Segment("us", False), Segment("er", False), Segment("<|im_middle|>", True),
        Segment(runs(kind), False), Segment("<|im_end|>", True),
    ]  # fmt: skip
    assert kimi.encode(segments) == KimiK25(checkpoint("kimi_k25")).token_ids(text, [])


def test_special_tokens_are_never_cut(kimi: Tokenizer) -> None:  # A4
    segments = [Segment("x" * 24_995, False), Segment("<|im_end|>", True), Segment("x" * 399_990, False)] * 2
    assert kimi.encode(segments).count(kimi.special_tokens["<|im_end|>"]) == 2


def test_too_much_text_is_refused(kimi: Tokenizer) -> None:
    with pytest.raises(InvalidValue, match="more than 4194304 bytes"):
        kimi.encode_text("\U0001f600" * (2**20 + 1))


@pytest.mark.parametrize("protected", ["<think>", 256 + 22])
def test_protected_tokens_are_left_out_of_answers(protected: str | int) -> None:  # A9
    settings = {"added_tokens_decoder": {"278": {"content": "<think>", "special": False}}}
    assert not TiktokenTokenizer(EVERY_BYTE, settings, PATTERN).is_special(278)
    assert TiktokenTokenizer(EVERY_BYTE, settings, PATTERN, (protected,)).is_special(278)


@table(
    ("model", "settings", "sentence"),
    [
        (b"", {}, "ranks"),
        (b"!!! 0\n", {}, "line 1"),
        (EVERY_BYTE + b"YWI=\n", {}, "line 257"),
        (EVERY_BYTE + b"YWI= x\n", {}, "line 257"),
        (EVERY_BYTE + b"YWI= 999\n", {}, "ranks"),
        (b"YQ== 0\n", {}, "every byte"),
        (EVERY_BYTE, {"added_tokens_decoder": {"256": {}}}, "'256' has no `content`"),
        (EVERY_BYTE, {"added_tokens_decoder": {str(i): {"content": "<a>"} for i in (256, 257)}}, "same content"),
    ],
)
def test_wrong_files_are_startup_errors(model: bytes, settings: dict[str, Any], sentence: str) -> None:  # A4
    with pytest.raises(StartupError, match=sentence):
        TiktokenTokenizer(model, settings, PATTERN)
