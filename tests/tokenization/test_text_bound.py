"""A text never has fewer tokens than its bound says, whatever a tokenizer does to it."""

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tables import table

from saccade.tokenization.text_bound import NFC_SHRINKS
from saccade.tokenization.tokenizer import Segment, TextBound, Tokenizer
from saccade.tokenization.tokenizer_json import JsonTokenizer

KINDS = ("qwen2_vl", "qwen3_5", "kimi_k25", "llava", "phi3_v")
TokenizerOf = Callable[[str], Tokenizer]
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SHRINKING = "\u1fbe\u0308\u0301\u212a\u2126\u0314\u0301\u0345\u1fef\u1100\u1161\u11a8"
"""Each becomes less in NFC, down to two sevenths of its bytes."""
TEXTS = (
    "", " ", "What is in this image? " * 50, "x" * 5000, " " * 5000, "\n\t\u00a0\u3000" * 500, SHRINKING * 100,
    "\u2581" * 500, "\u4f60\u597d" * 500, "\U0001f600" * 500, "\x00\x1f\ufffd" * 100, "<think>" * 100, "<|user|>" * 100,
)  # fmt: skip


@table("text", TEXTS)
@table("kind", KINDS)
def test_no_text_has_fewer_tokens(kind: str, text: str, tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of(kind)
    assert tokenizer.text_bound.least_tokens(text) <= len(tokenizer.encode_text(text))


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(parts=st.lists(st.text() | st.sampled_from([*TEXTS[:8], *SHRINKING, " ", "a"]), max_size=30))
def test_no_mixture_has_fewer_tokens(kind: str, parts: list[str], tokenizer_of: TokenizerOf) -> None:
    tokenizer, text = tokenizer_of(kind), "".join(parts)
    assert tokenizer.text_bound.least_tokens(text) <= len(tokenizer.encode_text(text))


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_of_use(kind: str, tokenizer_of: TokenizerOf) -> None:
    bound = tokenizer_of(kind).text_bound
    assert 2 <= bound.bytes_per_token <= 64
    assert bound.least_tokens("x" * 6400) >= 100


def test_white_space_that_a_special_token_swallows_does_not_count(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of("phi3_v")
    text = " " * 5000
    swallowed = tokenizer.encode([Segment("<|user|>", is_special=True), Segment(text, is_special=False)])
    assert tokenizer.text_bound.least_tokens(text) == 0
    assert len(swallowed) < 10


@pytest.mark.ci
def test_nfc_shrinks_no_text_more_than_the_bound_allows() -> None:
    """For every character that NFC keeps: the longest text that it could come from."""
    longest: dict[str, int] = {}
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    for character in characters:
        parts = unicodedata.normalize("NFD", character)
        longest[parts] = max(longest.get(parts, 0), len(character.encode()))
    worst = 0.0
    for character in characters:
        parts = unicodedata.normalize("NFD", character)
        if unicodedata.normalize("NFC", character) != character:
            continue
        most = [0] * (len(parts) + 1)
        for start in range(len(parts)):
            for stop in range(start + 1, len(parts) + 1):
                most[stop] = max(most[stop], most[start] + longest.get(parts[start:stop], 0))
        worst = max(worst, most[-1] / len(character.encode()))
    assert 3 < worst <= NFC_SHRINKS


def edited(folder: Path, **changes: Any) -> TextBound:
    """The bound of a tokenizer.json with *changes* to its parts; those of the model are merged into it."""
    parsed = json.loads((folder / "tokenizer.json").read_text())
    model = parsed["model"] | changes.pop("model", {})
    return JsonTokenizer(json.dumps(parsed | {"model": model} | changes).encode(), {}).text_bound


SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}


@table(
    "changes",
    [
        {"normalizer": {"type": "StripAccents"}},
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Strip", "strip_left": True, "strip_right": True}]}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "aaaa"}, "content": "a"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}]}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"model": {"dropout": 0.1}},
        {"truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}},
    ],
)  # fmt: skip
def test_files_that_lose_text_have_no_bound(changes: dict[str, Any], tiny_qwen3_vl: Path) -> None:
    assert edited(tiny_qwen3_vl).bytes_per_token > 0
    assert edited(tiny_qwen3_vl, **changes).least_tokens("a" * 10**6) == 0


def test_a_vocabulary_without_a_byte_has_no_bound(tiny_qwen3_vl: Path) -> None:
    parsed = json.loads((tiny_qwen3_vl / "tokenizer.json").read_text())
    vocab = {token: token_id for token, token_id in parsed["model"]["vocab"].items() if "q" not in token}
    merges = [merge for merge in parsed["model"]["merges"] if "q" not in "".join(merge)]
    assert edited(tiny_qwen3_vl, model={"vocab": vocab, "merges": merges}).bytes_per_token == 0


def test_bytes_beyond_ascii_may_shrink() -> None:
    bound = TextBound(bytes_per_token=10, shrinks=4)
    assert [bound.least_tokens(text) for text in ("", "a", "a" * 10, "a" * 11, "\u00e9" * 20, "\u00e9" * 21)] == [
        0,
        1,
        1,
        2,
        1,
        2,
    ]
