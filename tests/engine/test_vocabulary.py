"""The vocabulary for masks: every family's tokens by their bytes, and text divided as the model divides it. F13"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tables import table

from saccade.engine.vocabulary import read_vocabulary
from saccade.grammars.compiler import compile_grammar
from saccade.models.files import read_model_files
from saccade.protocol.request import Grammar

FAMILIES = ("qwen3_vl", "qwen3_5", "kimi_k25", "llava", "llava_next", "smolvlm", "phi3_v", "paddleocr_vl")
VOCAB_SIZE = 5000


@table("name", FAMILIES)
def test_text_has_the_models_own_tokens(name: str, checkpoint: Callable[[str], Path]) -> None:
    """Also where the tokenizer begins every text with a space or a token of its own; what it cannot write, by bytes."""
    vocabulary = read_vocabulary(read_model_files(checkpoint(name)), VOCAB_SIZE)
    for text in ('": "the image"', "the", " the", "你好 <tool_call> e\u0301\n\n", "😀"):
        ids = vocabulary(text)
        assert b"".join(vocabulary.tokens[token_id] for token_id in ids) == text.encode()
        if "image" in text:
            assert len(ids) < len(text)
    assert [vocabulary.tokens[token_id] for token_id in vocabulary(b"\xe4\xbd")] == [b"\xe4", b"\xbd"]


@pytest.mark.ci
def test_long_text_is_written_completely(checkpoint: Callable[[str], Path]) -> None:
    """Each of a long text's tokens costs the same, and all of the text is written."""
    vocabulary = read_vocabulary(read_model_files(checkpoint("qwen3_vl")), VOCAB_SIZE)
    text = "the image of 你好 " * 2000
    assert text.encode().startswith(b"".join(vocabulary.tokens[token_id] for token_id in vocabulary(text)))
    assert len(vocabulary(text)) < 1000
    matcher = compile_grammar(vocabulary.build(), Grammar("regex", text))
    written = b""
    while not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        token_id = next(8 * place + bit for place, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1)
        matcher.consume_token(token_id)
        written += b"" if token_id in vocabulary.eos_token_ids else vocabulary.tokens[token_id]
    assert written.decode() == text


@table("name", FAMILIES)
def test_no_text_has_a_special_token_or_a_tag(name: str, checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint(name)
    vocabulary = read_vocabulary(read_model_files(folder), VOCAB_SIZE)
    matcher = compile_grammar(vocabulary.build(), Grammar("json_schema", '{"type": "string"}'))
    matcher.consume_token(vocabulary.tokens.index(b'"'))
    mask = matcher.compute_bitmask()
    entries = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    marked = {int(number) for number, entry in entries.items() if entry["content"].startswith("<")}
    assert marked
    assert not [number for number in marked if mask[number // 8] >> number % 8 & 1]
