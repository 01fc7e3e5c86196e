"""Streamed text is the whole text, cut where it is certain."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tables import table

from saccade.tokenization.detokenizer import Detokenizer, TextRules
from saccade.tokenization.tokenizer import Tokenizer

TEXTS = ("plain words", "Héllo wörld", "你好，世界！", "👩‍👩‍👧‍👦🤔", "a\ufffdb", "مرحبا", "")
ours = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def stream(tokenizer: Tokenizer, token_ids: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, TextRules(stop))
    return [*(detokenizer.push_tokens([token_id]) for token_id in token_ids), detokenizer.finish_text()]


@table("text", TEXTS)
def test_text_streams_without_broken_characters(text: str, tokenizer: Tokenizer) -> None:
    pieces = stream(tokenizer, tokenizer.encode_text(text))
    assert "".join(pieces) == text
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")


@pytest.mark.parametrize("name", ["llava", "phi3_v", "qwen2_vl", "kimi_k25"])
def test_a_text_that_goes_on_keeps_its_first_space(name: str, tokenizer_of: Callable[[str], Tokenizer]) -> None:
    tokenizer = tokenizer_of(name)
    space = next(token_id for token_id in range(tokenizer.num_tokens) if tokenizer.bytes_of[token_id] == b" ")
    detokenizer = Detokenizer(tokenizer, continues=True)
    assert detokenizer.push_tokens([space, space]) + detokenizer.finish_text() == "  "


@ours
@given(token_ids=st.lists(st.integers(0, 639), max_size=60))
def test_any_ids_stream_as_they_decode_whole(
    token_ids: list[int], tokenizer: Tokenizer, reference_tokenizer: object
) -> None:
    known = [token_id for token_id in token_ids if token_id < tokenizer.num_tokens]
    whole = reference_tokenizer.decode(known, skip_special_tokens=True)  # type: ignore[attr-defined]
    assert "".join(stream(tokenizer, token_ids)) == whole


@ours
@given(text=st.text(max_size=40))
def test_any_text_survives(text: str, tokenizer: Tokenizer, reference_tokenizer: object) -> None:
    token_ids = tokenizer.encode_text(text)
    whole = reference_tokenizer.decode(token_ids)  # type: ignore[attr-defined]
    assert "".join(stream(tokenizer, token_ids)) == whole


@table(
    ("text", "stop", "shown"),
    [
        ("one two three", ("two",), "one "),
        ("one two three", ("four",), "one two three"),
        ("one two three", ("three", "two"), "one "),
        ("aaab", ("aab",), "a"),
        ("abcabcabd!", ("abcabd",), "abc"),
        ("xabcd", ("abcd", "bc"), "xa"),
        ("xabcd", ("abcd", "d"), "x"),
        ("stop", ("stop",), ""),
        ("ends with st", ("stop",), "ends with st"),
        ("你好世界", ("世",), "你好"),
        ("line\n\nnext", ("\n\n",), "line"),
    ],
)
def test_stop_strings(text: str, stop: tuple[str, ...], shown: str, tokenizer: Tokenizer) -> None:
    token_ids = [tokenizer.encode_text(character) for character in text]
    one_by_one = stream(tokenizer, [token_id for ids in token_ids for token_id in ids], stop)
    whole = Detokenizer(tokenizer, TextRules(stop))
    assert "".join(one_by_one) == shown
    assert whole.push_tokens(tokenizer.encode_text(text)) + whole.finish_text() == shown
    assert (whole.stop is not None) == (shown != text)


@ours
@given(
    text=st.text(alphabet="ab", max_size=30),
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_text_is_held_back_only_as_long_as_it_may_be_a_stop_string(
    text: str, stop: list[str], tokenizer: Tokenizer
) -> None:
    ends = [(text.find(s) + len(s), -len(s)) for s in stop if s in text]
    expected = text[: sum(min(ends))] if ends else text
    pieces = stream(tokenizer, [tokenizer.encode_text(character)[0] for character in text], tuple(stop))
    assert "".join(pieces) == expected
    shown = 0
    for position, piece in enumerate(pieces[:-1], start=1):
        shown += len(piece)
        held = text[shown:position] if shown < len(expected) else ""
        assert not held or any(s.startswith(held) for s in stop)


def test_nothing_is_taken_after_a_stop_string(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, TextRules(("b",)))
    token_ids = [tokenizer.encode_text(character)[0] for character in "abc"]
    assert detokenizer.push_tokens(token_ids) == "a"
    assert (detokenizer.num_tokens, detokenizer.stop is not None) == (2, True)
    assert detokenizer.push_tokens(token_ids) + detokenizer.finish_text() == ""


@ours
@given(
    text=st.text(alphabet="ab", max_size=20),
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 12),
    shows_stop=st.booleans(),
)
def test_stop_strings_that_are_complete_too_early_end_nothing(
    text: str, stop: list[str], min_tokens: int, shows_stop: bool, tokenizer: Tokenizer
) -> None:
    ends = [(end, -len(s)) for s in stop for end in range(min_tokens + 1, len(text) + 1) if text[:end].endswith(s)]
    end, neg_length = min(ends, default=(len(text), 0))
    detokenizer = Detokenizer(tokenizer, TextRules(tuple(stop), min_tokens, shows_stop))
    pieces = [detokenizer.push_tokens(tokenizer.encode_text(character)) for character in text]
    assert "".join(pieces) + detokenizer.finish_text() == text[: end if shows_stop else end + neg_length]
    assert detokenizer.num_tokens == end


def test_tokens_of_another_text_count_for_the_minimum(tokenizer: Tokenizer) -> None:
    token_ids = [tokenizer.encode_text(character)[0] for character in "ab"]
    for num_others, shown in ((0, "ab"), (1, "a")):
        detokenizer = Detokenizer(tokenizer, TextRules(("b",), min_tokens=2))
        detokenizer.num_others = num_others
        assert detokenizer.push_tokens(token_ids) + detokenizer.finish_text() == shown


def test_special_tokens_may_be_shown(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, TextRules(shows_special=True))
    content, token_id = next(iter(tokenizer.special_tokens.items()))
    assert detokenizer.push_tokens([token_id, tokenizer.num_tokens]) + detokenizer.finish_text() == content


def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    specials = [token_id for token_id in tokenizer.special_tokens.values() if tokenizer.is_special(token_id)]
    assert specials
    assert stream(tokenizer, specials) == [""] * (len(specials) + 1)


def test_pieces_are_never_longer_than_they_must_be(tokenizer: Tokenizer) -> None:
    pieces = stream(tokenizer, tokenizer.encode_text("plain words without end"))
    assert pieces[-1] == ""
    assert all(before or after for before, after in pairwise(pieces[:-1]))
