"""Masks over Kimi's vocabulary: a tiktoken.model, several tokens that end an answer, more logits than tokens. F13"""

import base64
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints.kimi_k25
import engines
import jsonschema
import numpy as np
import pytest
import tiktoken
from llguidance import LLMatcher
from llguidance.tiktoken import lltokenizer_from_encoding

from saccade.engine.core.grammar_lexers import CompiledGrammar, GrownLexers
from saccade.engine.core.grammar_matcher import GrammarMatcher, add_ids, no_words
from saccade.engine.loop import Engine
from saccade.engine.vocabulary import read_vocabulary
from saccade.grammars.compiler import Vocabulary, source
from saccade.models.files import read_model_files
from saccade.protocol.output import FinishReason
from saccade.protocol.request import Grammar

NUM_PADDING = 37
"""Logits beyond the tokens, as releases have them; not a whole word of a mask."""

CARD: dict[str, Any] = {
    "type": "object",
    "properties": {"名": {"type": "string", "maxLength": 5}, "n": {"type": "integer", "minimum": 0, "maximum": 50}},
    "required": ["名", "n"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar("json_schema", json.dumps(CARD)),
    "Chinese": Grammar("regex", "[你好吗😀]{3,9}"),
    "any text": Grammar("lark", "start: /(?s:.{0,30})/"),
    "a call": Grammar("lark", 'start: <[{tag}]> "f" <[{tag}]>'),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kimi-K2.5 with two ends in generation_config.json and a wider network."""
    made = tmp_path_factory.mktemp("kimi")
    given = checkpoints.kimi_k25.write(tmp_path_factory.mktemp("files"))
    vocab_size = json.loads((given / "config.json").read_text())["text_config"]["vocab_size"]
    whole = checkpoints.kimi_k25.write_network(made / "whole", vocab_size=vocab_size + NUM_PADDING)
    named = {name: number for number, name in names_of(whole).items()}
    ends = {"eos_token_id": [named["<|im_end|>"], named["[EOS]"]]}
    (whole / "generation_config.json").write_text(json.dumps(ends))
    return whole


def names_of(folder: Path) -> dict[int, str]:
    """The named reserved tokens."""
    entries = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    return {int(number): entry["content"] for number, entry in entries.items()}


@pytest.fixture(scope="module")
def vocab_size(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["text_config"]["vocab_size"])


@pytest.fixture(scope="module")
def vocabulary(folder: Path, vocab_size: int) -> Vocabulary:
    return read_vocabulary(read_model_files(folder), vocab_size)


@pytest.fixture(scope="module")
def encoding(folder: Path) -> tiktoken.Encoding:
    """The release's tokenizer as tiktoken has it."""
    ranks = {}
    for line in (folder / "tiktoken.model").read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    named = names_of(folder)
    reserved = range(len(ranks), len(ranks) + checkpoints.kimi_k25.NUM_RESERVED)
    special = {named.get(number, f"<|reserved_token_{number}|>"): number for number in reserved}
    return tiktoken.Encoding(
        "kimi", pat_str=checkpoints.kimi_k25.PATTERN, mergeable_ranks=ranks, special_tokens=special
    )


@pytest.fixture(scope="module")
def subject(folder: Path) -> Iterator[Engine]:
    subject = engines.engine(folder)
    yield subject
    subject.close()


def ids_in(mask: bytes) -> list[int]:
    return [int(number) for number in np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))]


@pytest.mark.parametrize("name", GRAMMARS)
def test_masks_are_those_of_the_librarys_own_converter(
    name: str, folder: Path, vocabulary: Vocabulary, vocab_size: int, encoding: tiktoken.Encoding
) -> None:
    tag = next(number for number, content in names_of(folder).items() if content == "<|tool_call_begin|>")
    grammar = Grammar(GRAMMARS[name].kind, GRAMMARS[name].text.replace("{tag}", str(tag)))
    theirs = lltokenizer_from_encoding(encoding, n_vocab=vocab_size, eos_token=list(vocabulary.eos_token_ids))
    usable, ends = (
        add_ids(no_words(vocab_size), ids, vocab_size) for ids in (range(vocab_size), vocabulary.eos_token_ids)
    )
    compiled = CompiledGrammar(vocabulary.build(), grammar, GrownLexers())
    draw, num_masks = random.Random(0), 0
    for _ in range(6):
        ours = GrammarMatcher(compiled, None, usable, ends)
        reference = LLMatcher(theirs, source(grammar))
        while not ours.is_finished:
            mask = ours.mask()
            assert len(mask) == 4 * -(-vocab_size // 32)
            allowed = ids_in(mask)
            assert allowed == ids_in(reference.compute_bitmask())
            assert max(allowed) < vocab_size - NUM_PADDING
            num_masks += 1
            token_id = draw.choice(allowed)
            ours.take_token(token_id)
            reference.consume_token(token_id)
            if token_id in vocabulary.eos_token_ids:
                break
    assert num_masks > 12


def test_any_of_several_ends_may_end_an_answer(vocabulary: Vocabulary, vocab_size: int) -> None:
    assert len(vocabulary.eos_token_ids) == 2
    usable, ends = (
        add_ids(no_words(vocab_size), ids, vocab_size) for ids in (range(vocab_size), vocabulary.eos_token_ids)
    )
    compiled = CompiledGrammar(vocabulary.build(), Grammar("regex", "ab?"), GrownLexers())
    for end_id in vocabulary.eos_token_ids:
        matcher = GrammarMatcher(compiled, None, usable, ends)
        matcher.take_token(vocabulary.tokens.index(b"a"))
        assert set(ids_in(matcher.mask())) == {vocabulary.tokens.index(b"b"), *vocabulary.eos_token_ids}
        matcher.take_token(end_id)
        assert matcher.is_finished


@pytest.mark.conformance
def test_answers_are_valid_and_have_no_id_without_a_token(
    subject: Engine, folder: Path, vocabulary: Vocabulary, vocab_size: int
) -> None:
    special, ended = frozenset(vocabulary.special_token_ids), 0
    # The padding's logits are made the likeliest.
    bias = dict.fromkeys(range(vocab_size - NUM_PADDING, vocab_size), 100.0)
    for seed in range(12):
        asked = engines.request(
            folder, [9], temperature=1.0, seed=seed, max_tokens=200, grammar=GRAMMARS["schema"], logit_bias=bias
        )
        answer = engines.drain(subject, asked).answers["a"]
        assert max(answer.token_ids) < vocab_size - NUM_PADDING
        if answer.finish_reason is FinishReason.STOP:
            said = b"".join(vocabulary.tokens[number] for number in answer.token_ids if number not in special)
            jsonschema.validate(json.loads(said), CARD)
            ended += 1
    assert ended > 8
