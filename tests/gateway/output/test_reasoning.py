"""An answer's reasoning is told from its content by token ids, however the answer is cut into deltas."""

from dataclasses import replace
from pathlib import Path

import pytest
import scripted
from tables import table

from saccade.gateway.output.reasoning import Reasoning
from saccade.gateway.served_models.served_model import ReasoningTokens
from saccade.models.family import THINK
from saccade.protocol.output import FinishReason, TokenDelta, TokenLogprob
from saccade.tokenization.detokenizer import Detokenizer
from saccade.tokenization.tokenizer import Tokenizer
from saccade.tokenization.tokenizer_json import JsonTokenizer

THOUGHT = "Hm\n你好\n"
CONTENT = "\n\n你 <a>"


@pytest.fixture(scope="module")
def tokenizer(tiny_qwen3_vl: Path) -> Tokenizer:
    return JsonTokenizer((tiny_qwen3_vl / "tokenizer.json").read_bytes(), {})


@pytest.fixture(scope="module")
def markers(tokenizer: Tokenizer) -> ReasoningTokens:
    found = ReasoningTokens.of_tokenizer(tokenizer, THINK)
    assert found is not None
    return found


def read(tokenizer: Tokenizer, reasoning: Reasoning, deltas: list[list[int]]) -> tuple[str, str]:
    """Return reasoning and content as a client sees them."""
    detokenizer = Detokenizer(tokenizer)
    thought = content = ""
    for token_ids in deltas:
        text, rest = reasoning.take_tokens(token_ids)
        thought += text
        content += detokenizer.push_tokens(rest)
    return thought + reasoning.finish_answer(), content + detokenizer.finish_text()


def test_markers_are_found_by_name(tokenizer: Tokenizer, markers: ReasoningTokens) -> None:
    assert tokenizer.decode([markers.start_id, markers.end_id]) == "<think></think>"


def test_model_without_markers(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    known = tokenizer.token_id
    monkeypatch.setattr(tokenizer, "token_id", lambda content: None if content == "</think>" else known(content))
    assert ReasoningTokens.of_tokenizer(tokenizer, THINK) is None


S, E = "start", "end"


@table(
    ("prompt", "is_open"),
    [([1, S, 5], True), ([1, S], True), ([S, 5, 6], False), ([S, E], False), ([E, S], True), ([S], True), ([], False),
     ([S, 5, E, 6], False), ([1, E, 5], False)],
)  # fmt: skip
def test_prompts_that_open_the_reasoning(prompt: list[int | str], is_open: bool, markers: ReasoningTokens) -> None:
    ids = {S: markers.start_id, E: markers.end_id}
    assert markers.opened_by([ids.get(token, 9) if isinstance(token, str) else token for token in prompt]) == is_open


@table("opened_by", ["prompt", "answer", "both"])
@table("size", [1, 2, 3, 1000])
def test_reasoning_and_content_do_not_depend_on_the_deltas(
    opened_by: str, size: int, tokenizer: Tokenizer, markers: ReasoningTokens
) -> None:
    prompt = [7, markers.start_id] if opened_by != "answer" else [7, 8]
    reasoning = Reasoning(markers, tokenizer, prompt=prompt)
    thought, content = tokenizer.encode_text(THOUGHT), tokenizer.encode_text(CONTENT)
    ids = [*thought, markers.end_id, *content]
    if opened_by != "prompt":
        ids.insert(0, markers.start_id)
    deltas = [[], *(ids[start : start + size] for start in range(0, len(ids), size))]
    assert read(tokenizer, reasoning, deltas) == (THOUGHT, CONTENT)
    assert (reasoning.num_tokens, reasoning.num_markers) == (len(thought), len(ids) - len(thought) - len(content))
    assert not reasoning.is_open


@table(
    ("written", "expected"),
    [
        ([S, "a", E, "b", E, "c", S, "d"], ("a", "bc<think>d")),
        ([S, "a", E, E, "b", E], ("a", "b")),
        (["a", S, "b", E], ("", "a<think>b</think>")),
        (["a", S, "b", E, "c", E, "d"], ("", "a<think>b</think>cd")),
        ([E, "a"], ("", "a")),
        ([S, E, "a"], ("", "a")),
        ([S, "a", S, "b"], ("a<think>b", "")),
        ([S], ("", "")),
        ([], ("", "")),
    ],
)
def test_markers_count_in_their_places_only(
    written: list[str], expected: tuple[str, str], tokenizer: Tokenizer, markers: ReasoningTokens
) -> None:
    ids = {S: [markers.start_id], E: [markers.end_id]}
    deltas = [ids.get(piece) or tokenizer.encode_text(piece) for piece in written]
    assert read(tokenizer, Reasoning(markers, tokenizer), deltas) == expected


@table(
    ("thought", "shown"),
    [
        ("thought\nHm\n", "Hm\n"),
        ("thought\n", ""),
        ("thoughts", "thoughts"),
        ("thou", "thou"),
        ("", ""),
        ("thought", ""),
    ],
)
@table("size", [1, 2, 100])
def test_header_of_the_reasoning_is_not_shown(
    thought: str, shown: str, size: int, tokenizer: Tokenizer, markers: ReasoningTokens
) -> None:
    ids = [markers.start_id, *tokenizer.encode_text(thought), markers.end_id, *tokenizer.encode_text(CONTENT)]
    reasoning = Reasoning(replace(markers, header="thought\n"), tokenizer)
    deltas = [ids[start : start + size] for start in range(0, len(ids), size)]
    assert read(tokenizer, reasoning, deltas) == (shown, CONTENT)


@table(
    ("written", "expected"),
    [
        ([S, "thought\nA", E, "Hello", S, "thought\nB", E, " you"], ("AB", "Hello you")),
        ([S, "thought\n", E, "Hello", S, "thought\n", E, " you"], ("", "Hello you")),
        ([S, "thought", E, "Hello", S, "thought", E, " you"], ("", "Hello you")),
        (["Hello", S, "thought\nB", E, " you"], ("B", "Hello you")),
        (["Hello", S, "thought\nB"], ("B", "Hello")),
        ([S, "thought\nA", S, "thought\nB", E, "Hello", E], ("A<think>thought\nB", "Hello")),
        ([S, "thought"], ("", "")),
    ],
)
@table("size", [1, 2, 3, 100])
def test_blocks_with_a_header_are_reasoning_in_every_place(
    written: list[str], expected: tuple[str, str], size: int, tokenizer: Tokenizer, markers: ReasoningTokens
) -> None:
    known = {S: [markers.start_id], E: [markers.end_id]}
    ids = [token_id for piece in written for token_id in known.get(piece) or tokenizer.encode_text(piece)]
    reasoning = Reasoning(replace(markers, header="thought\n"), tokenizer)
    deltas = [ids[start : start + size] for start in range(0, len(ids), size)]
    assert read(tokenizer, reasoning, deltas) == expected


def test_no_character_spans_the_border(tokenizer: Tokenizer, markers: ReasoningTokens) -> None:
    first, *rest = tokenizer.encode_text("\U0001f9ff")
    assert rest
    deltas = [[markers.start_id], [first], [markers.end_id], rest]
    thought, content = read(tokenizer, Reasoning(markers, tokenizer), deltas)
    assert thought == "\ufffd"
    assert set(content) == {"\ufffd"}


def script(gateway: scripted.Gateway, *pieces: list[int], finish: FinishReason = FinishReason.STOP) -> None:
    ids = [token_id for piece in pieces for token_id in piece]
    end = [gateway.eos] if finish is FinishReason.STOP else []
    gateway.worker.script = [*(TokenDelta("r", [token_id]) for token_id in ids), TokenDelta("r", end, finish)]


def ask(gateway: scripted.Gateway, stream: bool, **fields: object) -> tuple[str | None, str | None, str, int, int]:
    """Return content, reasoning, finish reason, completion tokens and reasoning tokens."""
    answer = gateway.chat(**scripted.streamed(stream), **fields)
    assert answer.status == 200, answer.body
    if stream:
        *chunks, last, _ = answer.events
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert all(len(delta) <= 1 or set(delta) == {"reasoning", "reasoning_content"} for delta in deltas[1:])
        content = "".join(delta.get("content", "") for delta in deltas) or None
        reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas) or None
        reason, usage = chunks[-1]["choices"][0]["finish_reason"], last["usage"]
    else:
        choice, usage = answer.json["choices"][0], answer.json["usage"]
        content, reasoning = choice["message"]["content"], choice["message"].get("reasoning_content")
        reason = choice["finish_reason"]
    tokens = usage["completion_tokens_details"]["reasoning_tokens"]
    return content, reasoning, reason, usage["completion_tokens"], tokens


@table("stream", [True, False])
@table("shown", [True, False, None])
def test_answer_over_http(
    stream: bool, shown: bool | None, gateway: scripted.Gateway, tokenizer: Tokenizer, markers: ReasoningTokens
) -> None:
    thought, content = tokenizer.encode_text(THOUGHT), tokenizer.encode_text(CONTENT)
    script(gateway, [markers.start_id], thought, [markers.end_id], content)
    num_tokens = len(thought) + len(content) + 3
    expected = (CONTENT, None if shown is False else THOUGHT, "stop", num_tokens, len(thought))
    assert ask(gateway, stream, include_reasoning=shown) == expected


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_answer_that_ends_within_reasoning_has_no_content(
    stream: bool, finish: FinishReason, gateway: scripted.Gateway, tokenizer: Tokenizer, markers: ReasoningTokens
) -> None:
    thought = tokenizer.encode_text("Hm\U0001f9ff")[:-1]
    script(gateway, [markers.start_id], thought, finish=finish)
    num_tokens = len(thought) + 1 + (finish is FinishReason.STOP)
    assert ask(gateway, stream) == (None, "Hm\ufffd", finish.value, num_tokens, len(thought))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("shown", [True, False])
def test_tokens_of_reasoning_have_log_probabilities_too(
    stream: bool, shown: bool, gateway: scripted.Gateway, tokenizer: Tokenizer, markers: ReasoningTokens
) -> None:
    ids = [markers.start_id, *tokenizer.encode_text(THOUGHT), markers.end_id, *tokenizer.encode_text(CONTENT)]
    given = [TokenLogprob(-float(number), 1) for number in range(len(ids))]
    script = [TokenDelta("r", [token_id], logprobs=[logprob]) for token_id, logprob in zip(ids, given, strict=True)]
    gateway.worker.script = [*script, TokenDelta("r", [], FinishReason.LENGTH)]
    answer = gateway.chat(stream=stream, logprobs=True, include_reasoning=shown)
    events = answer.events[1:-1] if stream else [answer.json]
    logprobs = [event["choices"][0]["logprobs"]["content"] for event in events]
    assert [-entry["logprob"] for content in logprobs for entry in content] == list(range(len(ids)))


def test_reasoning_counts_for_min_tokens(
    gateway: scripted.Gateway, tokenizer: Tokenizer, markers: ReasoningTokens
) -> None:
    content = [token_id for character in "a STOP b STOP" for token_id in tokenizer.encode_text(character)]
    script(gateway, [markers.start_id], tokenizer.encode_text("x"), [markers.end_id], content)
    for min_tokens, shown in ((8, "a "), (9, "a STOP b ")):
        assert ask(gateway, stream=False, stop="STOP", min_tokens=min_tokens)[0] == shown


@pytest.mark.parametrize("shown", [True, False])
def test_special_tokens_of_reasoning(
    shown: bool, gateway: scripted.Gateway, tokenizer: Tokenizer, markers: ReasoningTokens
) -> None:
    special = tokenizer.special_tokens["<|vision_end|>"]
    script(gateway, [markers.start_id, special], [markers.end_id], tokenizer.encode_text("a"))
    answer = ask(gateway, stream=False, skip_special_tokens=not shown)
    assert answer[:2] == ("a", "<|vision_end|>" if shown else None)


@pytest.mark.parametrize("stream", [True, False])
def test_stop_strings_end_the_content_only(
    stream: bool, gateway: scripted.Gateway, tokenizer: Tokenizer, markers: ReasoningTokens
) -> None:
    thought, content = tokenizer.encode_text("a STOP b"), tokenizer.encode_text("c STOP d")
    script(gateway, [markers.start_id], thought, [markers.end_id], content)
    answer = ask(gateway, stream, stop="STOP")
    assert (answer[:3], answer[4]) == (("c ", "a STOP b", "stop"), len(thought))


def test_openai_sdk_sees_the_reasoning(
    gateway: scripted.Gateway, tokenizer: Tokenizer, markers: ReasoningTokens
) -> None:
    script(gateway, [markers.start_id], tokenizer.encode_text("Hm"), [markers.end_id], tokenizer.encode_text("Yes"))
    answer = gateway.client().chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("Yes", "Hm")  # type: ignore[attr-defined]
