"""Answers of a random model that are held to random schemas, read by a JSON Schema validator that is not ours."""

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema

from benchmarks.measured import ROOT
from benchmarks.structured.schemas import Schema, bounded_schema
from saccade.engine.config import EngineConfig
from saccade.engine.loop import Engine
from saccade.engine.startup import start
from saccade.engine.vocabulary import read_vocabulary
from saccade.gateway.structured_output.constraint import Constraint
from saccade.gateway.structured_output.trial import try_constraint
from saccade.models.files import read_model_files
from saccade.protocol.output import FinishReason
from saccade.protocol.request import EngineRequest, Grammar, SamplingParams

sys.path += [str(ROOT / "tests"), *map(str, (ROOT / "tests" / "support").iterdir())]

ANSWERS_A_SCHEMA = 10
MAX_TOKENS = 400
NUM_ROWS = 64
SCHEMAS_AT_A_TIME = 20


def report(num_wanted: int) -> None:
    """Print how many of the answers that ended by themselves are valid, until there are *num_wanted* of them."""
    import checkpoints

    with tempfile.TemporaryDirectory() as place:
        folder = checkpoints.NETWORKS["qwen3_vl"](Path(place) / "model")
        engine = start(
            EngineConfig(str(folder), "tiny", device="cpu", num_blocks=4096, max_num_seqs=NUM_ROWS), lambda *_: None
        )
        vocabulary = read_vocabulary(read_model_files(folder), engine.validator.spec.vocab_size)
        special = frozenset(vocabulary.special_token_ids)
        counts, began, seed, num_tokens = Counter[str](), time.monotonic(), 0, 0
        while counts["valid"] + counts["invalid"] < num_wanted:
            schemas = list(_held_schemas(seed, SCHEMAS_AT_A_TIME, counts))
            seed += SCHEMAS_AT_A_TIME
            for schema, token_ids, reason in _answers(engine, schemas, seed):
                num_tokens += len(token_ids)
                text = b"".join(vocabulary.tokens[token_id] for token_id in token_ids if token_id not in special)
                counts[_verdict(schema, text, reason)] += 1
        engine.close()
    ended = counts["valid"] + counts["invalid"]
    print("| answers | number |\n|---|---|")
    print(f"| ended by themselves | {ended} |\n| of these invalid | {counts['invalid']} |")
    print(f"| cut at {MAX_TOKENS} tokens | {counts['cut']} |\n| failed | {counts['failed']} |\n")
    print(f"{counts['schemas']} schemas, {counts['refused']} more refused; {num_tokens} tokens in ", end="")
    print(f"{time.monotonic() - began:.0f} s.")


def _held_schemas(seed: int, number: int, counts: Counter[str]) -> Iterator[tuple[Schema, Grammar]]:
    """Yield the next *number* schemas that are held as they are."""
    for each in range(seed, seed + number):
        schema = bounded_schema(each)
        outcome = try_constraint(Constraint("json_schema", json.dumps(schema), "schema", strict=True))
        counts["schemas" if outcome.grammar else "refused"] += 1
        if outcome.grammar is not None:
            yield schema, outcome.grammar


def _answers(
    engine: Engine, schemas: list[tuple[Schema, Grammar]], seed: int
) -> Iterator[tuple[Schema, list[int], FinishReason]]:
    asked: dict[str, Any] = {}
    tokens: dict[str, list[int]] = {}
    for index, (schema, grammar) in enumerate(schemas):
        for number in range(ANSWERS_A_SCHEMA):
            name = f"{index}-{number}"
            sampling = SamplingParams(max_tokens=MAX_TOKENS, seed=seed * 1000 + number, grammar=grammar)
            asked[name], tokens[name] = schema, []
            token_ids = [(7 * index + number + place) % 500 for place in range(12)]
            engine.requests.submit(0, EngineRequest(request_id=name, token_ids=token_ids, sampling=sampling))
    while engine.has_work:
        for frame in engine.step().values():
            for delta in frame.deltas:
                tokens[delta.request_id] += delta.token_ids
                if delta.finish_reason is not None:
                    yield asked[delta.request_id], tokens[delta.request_id], delta.finish_reason


def _verdict(schema: Schema, text: bytes, reason: FinishReason) -> str:
    if reason is not FinishReason.STOP:
        return "cut" if reason is FinishReason.LENGTH else "failed"
    try:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    except (ValueError, jsonschema.ValidationError) as error:
        print(f"invalid: {text!r} of {json.dumps(schema)}: {error}", file=sys.stderr)
        return "invalid"
    return "valid"
