"""What holds for every kind of tokenizer."""

import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saccade.tokenization.chat_template import ChatTemplate
from saccade.tokenization.detokenizer import Detokenizer
from saccade.tokenization.tokenizer import Segment, Tokenizer, special_variables

KINDS = ("qwen2_vl", "qwen3_5", "kimi_k25", "llava", "phi3_v")
TokenizerOf = Callable[[str], Tokenizer]
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("kind", KINDS)
def test_no_typed_special_token_becomes_one(kind: str, tokenizer_of: TokenizerOf) -> None:  # F2
    tokenizer = tokenizer_of(kind)
    special = set(tokenizer.special_tokens.values())
    bos = tokenizer.encode([])
    for content in ["".join(tokenizer.special_tokens), *tokenizer.special_tokens]:
        for text in (content, f" {content}\n", f"a{content}b{content}"):
            token_ids = tokenizer.encode_text(text)
            assert token_ids[: len(bos)] == bos
            assert special.isdisjoint(token_ids[len(bos) :])
            assert tokenizer.decode(token_ids[len(bos) :]) == text


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_of_the_template_are_single_ids(kind: str, tokenizer_of: TokenizerOf) -> None:  # A4
    tokenizer = tokenizer_of(kind)
    bos = tokenizer.encode([])
    for content, token_id in tokenizer.special_tokens.items():
        encoded = tokenizer.encode([Segment(content, is_special=True)])
        assert encoded in ([token_id], [*bos, token_id])
        assert tokenizer.token_id(content) == token_id
        assert tokenizer.bytes_of[token_id] == content.encode()


@pytest.mark.parametrize("kind", KINDS)
def test_roles_and_images_cannot_be_forged(
    kind: str, tokenizer_of: TokenizerOf, template_of: Callable[[str], ChatTemplate]
) -> None:  # F1 F2
    tokenizer, template = tokenizer_of(kind), template_of(kind)
    everything = "".join(tokenizer.special_tokens) + "<|image_1|><|image_2|>"

    def chat(text: str) -> list[dict[str, Any]]:
        parts = [{"type": "text", "text": text}, {"type": "image"}, {"type": "text", "text": text}]
        turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": text}]
        return [*turns, {"role": "user", "content": text}]

    special = set(tokenizer.special_tokens.values())
    harmless, forged = (
        [token_id for token_id in tokenizer.encode(template.render(chat(text))) if token_id in special]
        for text in ("word", everything)
    )
    assert forged == harmless


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(data=st.data())
def test_any_ids_stream_as_they_decode_whole(
    kind: str, data: st.DataObject, tokenizer_of: TokenizerOf, reference_of: Callable[[str], Any]
) -> None:
    tokenizer = tokenizer_of(kind)
    row_of_bytes = st.lists(st.integers(3, 258), max_size=5)  # Llama's byte tokens
    ids = st.lists(st.one_of(st.integers(0, tokenizer.num_tokens - 1).map(lambda i: [i]), row_of_bytes), max_size=20)
    token_ids = [token_id for row in data.draw(ids) for token_id in row]
    if kind == "kimi_k25":
        shown = [token_id for token_id in token_ids if not tokenizer.is_special(token_id)]
        whole = b"".join(tokenizer.bytes_of[token_id] for token_id in shown).decode(errors="replace")
    else:
        whole = reference_of(kind).decode(token_ids, skip_special_tokens=True)
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.push_tokens([token_id]) for token_id in token_ids) + detokenizer.finish_text() == whole


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(text=st.text(max_size=40))
def test_any_text_survives(kind: str, text: str, tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of(kind)
    detokenizer = Detokenizer(tokenizer)
    shown = detokenizer.push_tokens(tokenizer.encode_text(text)) + detokenizer.finish_text()
    assert shown == (text if kind in ("kimi_k25", "llava", "phi3_v") else unicodedata.normalize("NFC", text))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_outside_the_vocabulary_have_no_text(kind: str, tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of(kind)
    outside = [tokenizer.num_tokens, tokenizer.num_tokens + 5, 2**40, -1]
    assert tokenizer.decode(outside) == ""
    assert all(map(tokenizer.is_special, outside))
    assert tokenizer.token_id("no such token") is None


@pytest.mark.parametrize("kind", ["qwen3_5", "kimi_k25"])
def test_markers_of_reasoning_are_shown_and_known(kind: str, tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of(kind)
    token_id = tokenizer.token_id("</think>")
    assert token_id is not None
    assert not tokenizer.is_special(token_id)
    assert tokenizer.decode([token_id]) == "</think>"


def test_special_variables() -> None:
    config = {"bos_token": None, "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": "<pad>", "x": "y"}
    assert special_variables(config) == {"eos_token": "</s>", "pad_token": "<pad>"}
