"""What a mask costs a row, with a vocabulary of the size of Qwen3's: computed in the core, applied by the executor.

The vocabulary is trained on the Python files of this installation, so its tokens have the lengths that a release's
have. Answers are drawn evenly from what the masks allow, which no model does: most tokens in texts are rare ones.
"""

import json
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import torch
from llguidance import LLTokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from benchmarks.structured.schemas import Schema, bounded_schema
from saccade.engine.core.grammar_lexers import CompiledGrammar, GrownLexers
from saccade.engine.core.grammar_matcher import GrammarMatcher, add_ids, no_words
from saccade.engine.core.step import DrawMask
from saccade.engine.executor.logits_processors import GrammarMasks
from saccade.gateway.structured_output.constraint import ANY_OBJECT, Constraint, Kind
from saccade.gateway.structured_output.trial import try_constraint
from saccade.grammars.compiler import Vocabulary
from saccade.models.tool_formats.form import CallConstraint, FunctionConstraint, ToolCallTokens
from saccade.protocol.request import Grammar
from saccade.tokenization.token_bytes import ByteLevel

NUM_LOGITS, NUM_TOKENS, END_ID = 151_936, 151_643, 151_645
CHARACTERS = 60_000_000
ANSWERS, MAX_TOKENS = 40, 60
RANDOM_SCHEMAS = 20
HEAD = "Microseconds a mask:\n\n| the answer is held to | masks | median | mean | 99 % | largest |\n|" + "---|" * 6
CARD: Schema = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["photo", "scan", "drawing"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "is_sharp": {"type": "boolean"},
    },
    "required": ["title", "count", "kind", "tags", "is_sharp"],
    "additionalProperties": False,
}
FORMS = {
    "hermes": ToolCallTokens("hermes", 151_657, 151_658),
    "qwen3_coder": ToolCallTokens("qwen3_coder", 151_657, 151_658),
    "kimi_k2": ToolCallTokens("kimi_k2", 151_657, 151_658, 151_659, 151_660, 151_661),
}


def report() -> None:
    """Print a row for each kind of grammar, and what applying a mask takes."""
    began = time.perf_counter()
    vocabulary = trained_vocabulary()
    trained = time.perf_counter()
    tokenizer = vocabulary.build()
    built = time.perf_counter() - trained
    print(f"{NUM_LOGITS} logits; the vocabulary took {trained - began:.0f} s to train and {built:.1f} s to build.\n")
    print(HEAD)
    for name, grammars in _cases():
        print_row(name, [seconds for grammar in grammars for seconds in _masks(tokenizer, grammar)])
    for num_rows in (1, 8):
        print(f"\nApplying masks to {num_rows} x {NUM_LOGITS} logits: {1e6 * _applied(num_rows):.0f} a row (median).")


def print_row(name: str, seconds: list[float]) -> None:
    """Print what masks took, in microseconds."""
    taken = sorted(1e6 * each for each in seconds)
    print(
        f"| {name} | {len(taken)} | {statistics.median(taken):.0f} | {statistics.mean(taken):.0f} "
        f"| {taken[int(0.99 * len(taken))]:.0f} | {taken[-1]:.0f} |",
        flush=True,
    )


def trained_vocabulary() -> Vocabulary:
    """Return a byte-level BPE's tokens, then special ones, then ids without a token."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=NUM_TOKENS, show_progress=False, initial_alphabet=alphabet)
    trained.train_from_iterator(_texts(), trainer)
    as_bytes = ByteLevel().to_bytes
    tokens = [as_bytes(token) for token, _ in sorted(trained.get_vocab().items(), key=lambda entry: entry[1])]
    special = range(len(tokens), len(tokens) + 26)
    tokens += [b"<special %d>" % token_id for token_id in special]
    padded = [*tokens, *[b""] * (NUM_LOGITS - len(tokens))]
    return Vocabulary(padded, special, [END_ID], lambda text: trained.encode(text).ids)


def _texts() -> Iterator[str]:
    """Yield the Python files of this installation, CHARACTERS together."""
    left = CHARACTERS
    for place in ("stdlib", "purelib"):
        for file in sorted(Path(sysconfig.get_paths()[place]).rglob("*.py")):
            if place == "stdlib" and "site-packages" in file.parts:
                continue
            text = file.read_text(errors="ignore")
            left -= len(text)
            if left < 0:
                return
            yield text


def _cases() -> Iterator[tuple[str, list[Grammar]]]:
    yield "an object of five properties", [_grammar("json_schema", json.dumps(CARD))]
    schemas = (json.dumps(bounded_schema(seed)) for seed in range(RANDOM_SCHEMAS))
    yield f"one of {RANDOM_SCHEMAS} random schemas", [_grammar("json_schema", schema) for schema in schemas]
    yield "any JSON object", [_grammar("json_schema", ANY_OBJECT)]
    yield "a date by a regular expression", [_grammar("regex", "[0-9]{4}-[01][0-9]-[0-3][0-9]")]
    yield "one of 100 names", [_grammar("regex", "|".join(f"item number {index}" for index in range(100)))]
    for form, tokens in FORMS.items():
        for must_call in (True, False):
            functions = [FunctionConstraint(name, CARD, f"tools.{name}") for name in ("describe", "file_away")]
            calls = CallConstraint(functions, tokens, must_call, many=True)
            calls_text = msgspec.json.encode(calls).decode()
            yield f"calls in the form {form}{'' if must_call else ', or a text'}", [_grammar("tool_calls", calls_text)]


def _grammar(kind: Kind, text: str) -> Grammar:
    outcome = try_constraint(Constraint(kind, text, "held"))
    if outcome.grammar is None:
        raise ValueError(outcome.message)
    return outcome.grammar


def _masks(tokenizer: LLTokenizer, grammar: Grammar) -> Iterator[float]:
    """Yield the seconds of each mask of answers that are drawn evenly from what is allowed."""
    compiled = CompiledGrammar(tokenizer, grammar, GrownLexers())
    usable, end_ids = (add_ids(no_words(NUM_LOGITS), ids, NUM_LOGITS) for ids in (range(NUM_LOGITS), (END_ID,)))
    pristine = GrammarMatcher(compiled, None, usable, end_ids)
    draw = Random(0)
    for _ in range(ANSWERS):
        matcher = pristine.copy()
        for _ in range(MAX_TOKENS):
            began = time.perf_counter()
            mask = matcher.mask()
            yield time.perf_counter() - began
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
            token_id = int(allowed[draw.randrange(len(allowed))])
            matcher.take_token(token_id)
            if matcher.is_finished or token_id == END_ID:
                break


def _applied(num_rows: int) -> float:
    """Return the seconds that a mask takes to apply."""
    masks = GrammarMasks(torch.device("cpu"))
    bits = np.random.default_rng(0).integers(0, 256, NUM_LOGITS // 8, np.uint8).tobytes()
    logits, draw_masks = torch.zeros(num_rows, NUM_LOGITS), [DrawMask(draw, bits) for draw in range(num_rows)]
    return _median(lambda: masks.apply(logits, draw_masks)) / num_rows


def _median(work: Callable[[], None]) -> float:
    taken = []
    for _ in range(50):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
