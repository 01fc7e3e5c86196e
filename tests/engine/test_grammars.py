"""Answers that are held to a grammar, whatever else the request asks for. F13"""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import jsonschema_rs
import msgspec
import pytest
import recordings
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tables import table
from tokenizers import Tokenizer

from saccade.engine.core import grammar_lexers
from saccade.engine.loop import Engine
from saccade.engine.vocabulary import read_vocabulary
from saccade.grammars import compiler
from saccade.grammars.compiler import Vocabulary, compile_grammar
from saccade.models.files import read_model_files
from saccade.protocol.kv_transfer import SendKv
from saccade.protocol.output import FinishReason
from saccade.protocol.request import EngineRequest, Grammar

CARD = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["x", "yy"]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def subject(tiny_qwen3_vl: Path) -> Iterator[Engine]:
    subject = engines.engine(tiny_qwen3_vl)
    yield subject
    subject.close()


@pytest.fixture(scope="module")
def vocabulary(tiny_qwen3_vl: Path, subject: Engine) -> Vocabulary:
    return read_vocabulary(read_model_files(tiny_qwen3_vl), subject.validator.spec.vocab_size)


def held(folder: Path, grammar: Grammar | dict[str, Any] = CARD, name: str = "a", **sampling: Any) -> EngineRequest:
    """A request drawn at random, and held to *grammar* or a JSON schema."""
    if isinstance(grammar, dict):
        grammar = Grammar("json_schema", json.dumps(grammar))
    wanted = {"temperature": 1.0, "seed": 3, "max_tokens": 300, "grammar": grammar, **sampling}
    return engines.request(folder, [12], name, **wanted)


def text_of(answer: engines.Answer, vocabulary: Vocabulary) -> str:
    special = frozenset(vocabulary.special_token_ids)
    return b"".join(vocabulary.tokens[i] for i in answer.token_ids if i not in special).decode()


def assert_valid(answer: engines.Answer, vocabulary: Vocabulary, schema: dict[str, Any] = CARD) -> None:
    assert (answer.finish_reason, answer.failure) == (FinishReason.STOP, None)
    assert jsonschema_rs.is_valid(schema, json.loads(text_of(answer, vocabulary)))


SCHEMAS: list[dict[str, Any]] = [
    CARD,
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 6}]},
    {"type": "string", "pattern": "^[a-c]{2,5}$"},
    {"type": "number", "minimum": -1, "maximum": 1, "multipleOf": 0.25},
    {"const": {"a": [1, {"b": None}]}},
    {"type": "string", "format": "date"},
    {
        "$defs": {"pair": {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": [1, 2]}], "items": False}},
        "type": "array",
        "items": {"$ref": "#/$defs/pair"},
        "maxItems": 2,
    },
]


@pytest.mark.conformance
def test_finished_answers_are_valid(subject: Engine, tiny_qwen3_vl: Path, vocabulary: Vocabulary) -> None:
    names = [f"{index}-{number}" for index in range(len(SCHEMAS)) for number in range(38)]
    asked = [held(tiny_qwen3_vl, SCHEMAS[int(name.split("-")[0])], name, seed=seed) for seed, name in enumerate(names)]
    answers = engines.drain(subject, *asked).answers
    assert len(answers) == 304
    for name, answer in answers.items():
        if answer.finish_reason is FinishReason.STOP:
            assert_valid(answer, vocabulary, SCHEMAS[int(name.split("-")[0])])
    assert sum(answer.finish_reason is FinishReason.STOP for answer in answers.values()) > 250
    assert engines.is_idle(subject)


@pytest.mark.ci
@table(
    "sampling",
    [
        {"min_tokens": 200},
        {"stop_token_ids": ()},  # what ignore_eos becomes
        {"num_logprobs": 2, "num_prompt_logprobs": 1},
        {"presence_penalty": 2.0, "repetition_penalty": 5.0, "frequency_penalty": 2.0},
        {"logit_bias": {5: 100.0, 80: 100.0}},
        {"temperature": 0.0},
        {"top_k": 1, "top_p": 0.1, "min_p": 0.5},
    ],
)
def test_the_grammar_comes_before_other_parameters(
    sampling: dict[str, Any], subject: Engine, tiny_qwen3_vl: Path, vocabulary: Vocabulary
) -> None:
    answer = engines.drain(subject, held(tiny_qwen3_vl, **sampling)).answers["a"]
    assert_valid(answer, vocabulary)
    if "num_logprobs" in sampling:
        assert len(answer.logprobs) == len(answer.token_ids)


def test_truncated_answer_has_finish_reason_length(
    subject: Engine, tiny_qwen3_vl: Path, vocabulary: Vocabulary
) -> None:
    answer = engines.drain(subject, held(tiny_qwen3_vl, max_tokens=4)).answers["a"]
    assert answer.finish_reason is FinishReason.LENGTH
    assert text_of(answer, vocabulary).startswith("{")


def test_samples_have_matchers_of_their_own(subject: Engine, tiny_qwen3_vl: Path, vocabulary: Vocabulary) -> None:  # B9
    asked = msgspec.structs.replace(held(tiny_qwen3_vl), num_samples=4)
    answers = engines.drain(subject, asked).answers
    assert len({text_of(answer, vocabulary) for answer in answers.values()}) > 1
    for answer in answers.values():
        assert_valid(answer, vocabulary)


def test_preemption_does_not_change_an_answer(tiny_qwen3_vl: Path, subject: Engine, vocabulary: Vocabulary) -> None:
    asked = [held(tiny_qwen3_vl, name=name, seed=seed) for seed, name in enumerate("abcd")]
    alone = {one.request_id: engines.drain(subject, one).answers[one.request_id].token_ids for one in asked}
    tight = engines.engine(tiny_qwen3_vl, num_blocks=9, max_model_len=128)
    cut = [
        msgspec.structs.replace(one, sampling=msgspec.structs.replace(one.sampling, max_tokens=100)) for one in asked
    ]
    together = engines.drain(tight, *cut).answers
    assert tight.load().preemptions_total > 0
    for name, answer in together.items():
        assert answer.token_ids == alone[name][:100]
        if answer.finish_reason is FinishReason.STOP:
            assert_valid(answer, vocabulary)
    tight.close()


def test_requests_without_a_grammar_are_unconstrained(subject: Engine, tiny_qwen3_vl: Path) -> None:
    free = engines.request(tiny_qwen3_vl, [12], "free", temperature=1.0, seed=5, max_tokens=20)
    alone = engines.drain(subject, free).answers["free"].token_ids
    assert engines.drain(subject, held(tiny_qwen3_vl), free).answers["free"].token_ids == alone


def test_an_empty_mask_fails_its_request_alone(subject: Engine, tiny_qwen3_vl: Path, vocabulary: Vocabulary) -> None:
    asked = held(tiny_qwen3_vl, name="empty", allowed_token_ids=(vocabulary.tokens.index(b"q"),))
    answers = engines.drain(subject, held(tiny_qwen3_vl), asked).answers
    failure = answers["empty"].failure
    assert failure is not None
    assert (failure.code, failure.param) == ("invalid_value", "grammar")
    assert_valid(answers["a"], vocabulary)
    assert engines.is_idle(subject)


def test_allowed_ids_and_a_grammar_are_combined(subject: Engine, tiny_qwen3_vl: Path, vocabulary: Vocabulary) -> None:
    ids = tuple(vocabulary.tokens.index(bytes([byte])) for byte in b"ab")
    asked = held(tiny_qwen3_vl, Grammar("regex", "[abc]{6}"), allowed_token_ids=ids)
    assert set(text_of(engines.drain(subject, asked).answers["a"], vocabulary)) <= {"a", "b"}


def test_a_wrong_grammar_fails_its_request_alone(subject: Engine, tiny_qwen3_vl: Path, vocabulary: Vocabulary) -> None:
    wrong = msgspec.structs.replace(held(tiny_qwen3_vl, Grammar("regex", "(a"), "wrong"), num_samples=3)
    answers = engines.drain(subject, wrong, held(tiny_qwen3_vl)).answers
    assert answers["wrong"].failure is not None
    assert set(answers) == {"wrong", "a"}
    assert_valid(answers["a"], vocabulary)


def test_an_abort_while_the_grammar_is_compiled(subject: Engine, tiny_qwen3_vl: Path, vocabulary: Vocabulary) -> None:
    grammar = Grammar("json_schema", json.dumps({**CARD, "title": "never compiled before"}))
    subject.requests.submit(0, msgspec.structs.replace(held(tiny_qwen3_vl, grammar, "first"), num_samples=2))
    subject.requests.submit(0, held(tiny_qwen3_vl, grammar, "second"))
    # Sample 1 takes the place of sample 0, and still waits for the grammar.
    subject.requests.abort(0, "first", 0)
    subject.requests.abort(0, "second")
    answers = engines.drain(subject).answers
    assert answers["first"].finish_reason is answers["second"].finish_reason is FinishReason.ABORT
    assert_valid(answers["first#1"], vocabulary)
    assert engines.is_idle(subject)


def slow_compiler(patch: pytest.MonkeyPatch) -> tuple[threading.Event, list[str]]:
    """Return an event that compilations wait for, and the list of the grammars that were begun."""
    go, begun, compile_one = threading.Event(), list[str](), grammar_lexers.compile_grammar

    def compiling(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
        begun.append(grammar.text)
        go.wait()
        return compile_one(tokenizer, grammar)

    patch.setattr(grammar_lexers, "compile_grammar", compiling)
    return go, begun


@table("ends", ["abort", "hangup"])
def test_what_nobody_waits_for_is_not_compiled(
    subject: Engine, tiny_qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Compilations of requests that have ended delay no other tenant; one that another request waits for goes on."""
    go, begun = slow_compiler(monkeypatch)
    texts = [f"{ends} [ab]{{{number}}}" for number in range(1, 6)]
    for number, text in enumerate(texts):
        subject.requests.submit(1, held(tiny_qwen3_vl, Grammar("regex", text), f"{number}"))
    subject.requests.submit(0, held(tiny_qwen3_vl, Grammar("regex", texts[3]), "beside"))
    for number in range(len(texts)):
        if ends == "abort":
            subject.requests.abort(1, f"{number}")
    subject.requests.hangup(1)
    go.set()
    answer = engines.drain(subject).answers["beside"]
    assert (answer.failure, answer.finish_reason) == (None, FinishReason.STOP)
    assert set(begun) <= {texts[0], texts[3]}
    again = engines.drain(subject, held(tiny_qwen3_vl, Grammar("regex", texts[4]), "again")).answers["again"]
    assert (again.failure, again.finish_reason) == (None, FinishReason.STOP)


def test_a_request_does_not_inherit_the_grammar_of_one_with_its_id(
    subject: Engine, tiny_qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = engines.request(tiny_qwen3_vl, [12], "a", max_tokens=5)
    right = engines.drain(subject, free).answers["a"].token_ids
    go, _ = slow_compiler(monkeypatch)
    subject.requests.submit(0, held(tiny_qwen3_vl, Grammar("regex", "never before [xy]{9}"), "a"))
    subject.requests.abort(0, "a")
    engines.collect(engines.Outcome(), subject.step()[0])
    subject.requests.submit(0, free)
    go.set()
    assert engines.drain(subject).answers["a"].token_ids == right


def test_a_refused_leg_compiles_nothing(subject: Engine, tiny_qwen3_vl: Path) -> None:
    """This engine has no role, so it refuses the leg; its id may be used again."""
    leg = held(tiny_qwen3_vl, Grammar("regex", "also never [xy]{9}"), "leg")
    answers = engines.drain(subject, msgspec.structs.replace(leg, kv_transfer=SendKv(bytes(32)))).answers
    assert answers["leg"].failure is not None
    assert subject.requests.grammars is not None
    assert not subject.requests.grammars.pending


def test_grammar_begins_after_the_reasoning(subject: Engine, tiny_qwen3_vl: Path, vocabulary: Vocabulary) -> None:
    end_id, ends = vocabulary.tokens.index(b">"), tuple(vocabulary.eos_token_ids)
    grammar = Grammar("json_schema", json.dumps(CARD), reasoning_end_id=end_id)
    for seed in range(4):
        # Likelier than the end of the reasoning is only an end of the answer, which is not drawn before.
        asked = held(tiny_qwen3_vl, grammar, seed=seed, logit_bias={end_id: 12.0, **dict.fromkeys(ends, 50.0)})
        answer = engines.drain(subject, asked).answers["a"]
        border = answer.token_ids.index(end_id)
        assert not set(ends) & set(answer.token_ids[:border])
        assert_valid(engines.Answer(answer.token_ids[border + 1 :], answer.finish_reason), vocabulary)


def test_masks_are_recorded_and_replayed(tiny_qwen3_vl: Path, tmp_path: Path, vocabulary: Vocabulary) -> None:
    with recordings.recording_engine(tiny_qwen3_vl, tmp_path) as subject:
        answer = engines.drain(subject, held(tiny_qwen3_vl)).answers["a"]
    assert_valid(answer, vocabulary)
    outcome = recordings.replayed(recordings.segments(tmp_path)[0])
    assert outcome.first is None
    assert outcome.num_tokens == len(answer.token_ids)


def test_a_model_without_a_tokenizer_refuses_by_name(tiny_qwen3_vl: Path) -> None:
    subject = engines.engine(tiny_qwen3_vl)
    subject.requests.grammars = None
    failure = engines.drain(subject, held(tiny_qwen3_vl)).answers["a"].failure
    assert failure is not None
    assert (failure.code, failure.param) == ("unsupported_parameter", "grammar")


def test_a_text_never_has_the_token_of_a_tag(subject: Engine, tiny_qwen3_vl: Path, vocabulary: Vocabulary) -> None:
    """What reads as a tag is written in other tokens; a grammar asks for the tag itself by its id."""
    added = json.loads((tiny_qwen3_vl / "tokenizer.json").read_text())["added_tokens"]
    tag = next(token["id"] for token in added if token["content"] == "<tool_call>")
    bias = {tag: 100.0}
    for schema in ({"const": "<tool_call>"}, {"type": "string", "maxLength": 40}):
        text = engines.drain(subject, held(tiny_qwen3_vl, schema, logit_bias=bias)).answers["a"]
        assert tag not in text.token_ids
        assert_valid(text, vocabulary, schema)
    itself = engines.drain(subject, held(tiny_qwen3_vl, Grammar("lark", f'start: <[{tag}]> "!"'))).answers["a"]
    assert itself.token_ids[0] == tag


def test_text_that_must_come_has_the_models_own_tokens(
    subject: Engine, tiny_qwen3_vl: Path, vocabulary: Vocabulary
) -> None:
    """Where a grammar leaves no choice, as in a property's name, the answer is divided as the tokenizer divides it."""
    text = "What is in this image? The description"
    answer = engines.drain(subject, held(tiny_qwen3_vl, Grammar("regex", re.escape(text)))).answers["a"]
    tokenizer = Tokenizer.from_file(str(tiny_qwen3_vl / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert answer.token_ids[: len(ids)] == ids
    assert len(ids) < len(text)
    assert text_of(answer, vocabulary) == text


def test_tenants_share_no_compiled_grammar(
    subject: Engine, tiny_qwen3_vl: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Grammar] = []

    def counting(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
        compiled.append(grammar)
        return compile_grammar(tokenizer, grammar)

    monkeypatch.setattr(grammar_lexers, "compile_grammar", counting)
    schema = {"const": "of one tenant"}
    for number, salt in enumerate((b"one", b"one", b"another", b"one")):
        asked = msgspec.structs.replace(held(tiny_qwen3_vl, schema, name=str(number)), salt=salt)
        assert_valid(engines.drain(subject, asked).answers[str(number)], vocabulary, schema)
    assert len(compiled) == 2


def test_failed_compilation_is_retried(
    subject: Engine, tiny_qwen3_vl: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the grammar stays; one of the worker, such as a lack of memory, may be over."""
    schema = {"enum": ["only", "here"]}

    def breaks(*_: object) -> LLMatcher:
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(grammar_lexers, "compile_grammar", breaks)
        failure = engines.drain(subject, held(tiny_qwen3_vl, schema)).answers["a"].failure
        assert failure is not None
        assert failure.code == "internal_error"
    assert_valid(engines.drain(subject, held(tiny_qwen3_vl, schema)).answers["a"], vocabulary, schema)


SMALL_LEXER = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=50_000,
    step_max_items=10_000,
    max_items_in_row=1_000,
    max_lexer_states=2_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
"""LIMITS with a tenth of the states, so that fewer tokens fill a lexer."""


@pytest.mark.ci
def test_fifty_answers_in_a_row_with_bounds_that_add_up(
    subject: Engine, tiny_qwen3_vl: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer has one of fifty texts, each with a bound of its own: the lexer's states for them add up."""
    monkeypatch.setattr(compiler, "LIMITS", SMALL_LEXER)
    other, quote = engines.engine(tiny_qwen3_vl), vocabulary.tokens.index(b'"')
    texts = {f"f{index}": {"type": "string", "minLength": 30, "maxLength": 900 + index} for index in range(50)}
    fields = [{"properties": {name: text}, "required": [name]} for name, text in texts.items()]
    schema = {"anyOf": [{"type": "object", "additionalProperties": False, **field} for field in fields]}
    for number in range(50):
        engine, salt = (subject, other)[number % 2], (b"one", b"another")[number // 2 % 2]
        asked = held(tiny_qwen3_vl, schema, str(number), seed=number, logit_bias={quote: 30.0})
        answer = engines.drain(engine, msgspec.structs.replace(asked, salt=salt)).answers[str(number)]
        assert_valid(answer, vocabulary, schema)
    assert engines.is_idle(subject)
    other.close()


def test_a_grammar_that_is_too_large_later_cuts_its_answer_alone(
    subject: Engine, tiny_qwen3_vl: Path, vocabulary: Vocabulary
) -> None:
    """An answer that has begun does not fail because of its grammar."""
    a, x = (vocabulary.tokens.index(letter) for letter in (b"a", b"x"))
    hard = Grammar("regex", "x{70}((a{1,100}){1,100}){1,100}")
    asked = held(tiny_qwen3_vl, hard, "hard", logit_bias={a: 100.0, x: 100.0}, max_tokens=200)
    answers = engines.drain(subject, msgspec.structs.replace(asked, num_samples=2), held(tiny_qwen3_vl)).answers
    for name in ("hard", "hard#1"):
        assert (answers[name].finish_reason, answers[name].failure) == (FinishReason.LENGTH, None)
        assert text_of(answers[name], vocabulary).startswith("x" * 70 + "a")
        assert len(answers[name].token_ids) < 200
    assert_valid(answers["a"], vocabulary)
    assert engines.is_idle(subject)
