"""The same masks by xgrammar, which is no dependency: `pip install --no-deps xgrammar apache-tvm-ffi` first."""

import json
import time
from collections.abc import Iterator
from random import Random

import numpy as np
import xgrammar

from benchmarks.structured import masks
from benchmarks.structured.masks import ANSWERS, CARD, END_ID, MAX_TOKENS, NUM_LOGITS, RANDOM_SCHEMAS
from benchmarks.structured.schemas import bounded_schema
from saccade.gateway.structured_output.constraint import ANY_OBJECT


def report() -> None:
    """Print a row for each kind of grammar, with the time that compiling took."""
    vocabulary = masks.trained_vocabulary()
    info = xgrammar.TokenizerInfo(
        list(vocabulary.tokens),
        xgrammar.VocabType.RAW,
        vocab_size=NUM_LOGITS,
        stop_token_ids=[END_ID],
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    schemas = [json.dumps(bounded_schema(seed)) for seed in range(RANDOM_SCHEMAS)]
    print(masks.HEAD)
    cases = {
        "an object of five properties": ("schema", [json.dumps(CARD)]),
        f"one of {RANDOM_SCHEMAS} random schemas": ("schema", schemas),
        "any JSON object": ("schema", [ANY_OBJECT]),
        "a date by a regular expression": ("regex", ["[0-9]{4}-[01][0-9]-[0-3][0-9]"]),
        "one of 100 names": ("regex", ["|".join(f"item number {index}" for index in range(100))]),
    }
    for name, (kind, texts) in cases.items():
        began, compiled, num_refused = time.perf_counter(), [], 0
        for text in texts:
            try:
                made = compiler.compile_json_schema(text) if kind == "schema" else compiler.compile_regex(text)
            except RuntimeError:
                num_refused += 1
            else:
                compiled.append(made)
        seconds = (time.perf_counter() - began) / len(texts)
        label = f"{name} ({1e3 * seconds:.0f} ms to compile{f', {num_refused} refused' if num_refused else ''})"
        masks.print_row(label, [taken for one in compiled for taken in _masks(one)])


def _masks(compiled: xgrammar.CompiledGrammar) -> Iterator[float]:
    """Yield the seconds of each mask of answers that are drawn evenly from what is allowed."""
    bits, draw = xgrammar.allocate_token_bitmask(1, NUM_LOGITS), Random(0)
    for _ in range(ANSWERS):
        matcher = xgrammar.GrammarMatcher(compiled)
        for _ in range(MAX_TOKENS):
            began = time.perf_counter()
            matcher.fill_next_token_bitmask(bits)
            yield time.perf_counter() - began
            allowed = np.flatnonzero(np.unpackbits(bits.numpy().view(np.uint8)[0], bitorder="little")[:NUM_LOGITS])
            token_id = int(allowed[draw.randrange(len(allowed))])
            matcher.accept_token(token_id)
            if matcher.is_terminated():
                break
