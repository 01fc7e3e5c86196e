"""Whole answers are encoded while they grow: the same bytes as at once, counted, and the end has little left to do."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import scripted
from instructions import counting_instructions
from tables import table
from waiting import wait_until

from saccade.gateway.apis.chat.reader import read_chat_completion
from saccade.gateway.apis.chat.wire import ChatCompletion
from saccade.gateway.apis.chat_endpoint import AnswerWriter, ReadBody
from saccade.gateway.apis.completions.reader import read_completion
from saccade.gateway.apis.completions.wire import Completion
from saccade.gateway.apis.messages.reader import read_messages
from saccade.gateway.apis.responses.reader import ResponseReader
from saccade.gateway.chat import Chat, PlainPrompt
from saccade.gateway.config import GatewayConfig
from saccade.gateway.json_parts import Part, joined, num_bytes
from saccade.gateway.output.answer import Answer
from saccade.gateway.output.choice import AnswerChunk
from saccade.gateway.output.delivery import Delivery
from saccade.gateway.output.logprobs import choice_logprobs, prompt_logprobs
from saccade.gateway.served_models.served_model import ServedModel
from saccade.gateway.tenants.account import EVERYBODY, Account
from saccade.models.files import read_model_files
from saccade.protocol.output import FinishReason, TokenDelta, TokenLogprob
from saccade.telemetry import Metrics

TEXT = 'He said "content":[],\n\\ \u4f60\U0001f9ff </s> "logprobs":{"content":[]} end'
PROMPT = 'Once "text":"" upon'


@pytest.fixture(scope="module")
def served(tiny_qwen3_vl: Path) -> ServedModel:
    return ServedModel.from_files("m", read_model_files(tiny_qwen3_vl), 1 << 20)


def logprob(place: int, num_top: int = 3) -> TokenLogprob:
    top_ids = [300 + (place + rank) % 90 for rank in range(num_top)]
    return TokenLogprob(-place / 7, place, top_ids, [-rank / 3 - place for rank in range(num_top)])


def deltas(ids: list[int], index: int, num_top: int = 3) -> list[TokenDelta]:
    *first, last = ids
    steps = [TokenDelta("r", [one], index=index, logprobs=[logprob(i, num_top)]) for i, one in enumerate(first)]
    return [
        *steps,
        TokenDelta("r", [last], FinishReason.LENGTH, index=index, logprobs=[logprob(len(first), num_top)]),
    ]


class Unread:
    """A response that nobody reads."""

    def write_events(self, events: bytes, num_kept_bytes: int) -> bool:
        return True

    async def flush(self) -> None:
        pass


def writers(read: ReadBody, served: ServedModel, ids: list[int]) -> list[tuple[Answer, Delivery, AnswerWriter]]:
    """An answer, its delivery and its writer for each prompt of *read*, all with these *ids*."""
    made = []
    for form in read.formats:
        plain = None if form.prompt is None else PlainPrompt(form.prompt.content, form.prompt.field)
        chat = Chat([], 0, [], True, {}, (), plain=plain)
        metrics, account = Metrics(), Account(EVERYBODY)
        answer = Answer(read.request, chat, served, ids, [], metrics=metrics, account=account, begun_at=0.0)
        writer = form.writer(answer)
        made.append((answer, Delivery(answer, writer, Unread(), metrics), writer))
    return made


def written(parts: list[Part]) -> bytes:
    return b"".join(joined(parts, 1000))


CHAT = {"messages": [{"role": "user", "content": "hi"}], "n": 2}
COMPLETION = {"prompt": PROMPT, "n": 2}
ASKED: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "chat": (read_chat_completion, ChatCompletion, CHAT),
    "chat, log probabilities": (
        read_chat_completion,
        ChatCompletion,
        {**CHAT, "logprobs": True, "top_logprobs": 3, "return_token_ids": True, "prompt_logprobs": 2},
    ),
    "chat, ids": (read_chat_completion, ChatCompletion, {**CHAT, "return_token_ids": True}),
    "completion": (read_completion, Completion, COMPLETION),
    "completion, log probabilities": (read_completion, Completion, {**COMPLETION, "logprobs": 3}),
    "completion, echo": (read_completion, Completion, {**COMPLETION, "echo": True}),
    "completion, ids": (read_completion, Completion, {**COMPLETION, "return_token_ids": True}),
    "completion, all": (
        read_completion,
        Completion,
        {
            "prompt": [PROMPT, "b"],
            "n": 2,
            "logprobs": 3,
            "echo": True,
            "return_token_ids": True,
            "prompt_logprobs": 2,
        },
    ),
}


@table("read, kind, fields", ASKED.values(), ASKED)
async def test_whole_answers_are_the_bytes_of_their_structs(
    read: Any, kind: Any, fields: dict[str, Any], served: ServedModel
) -> None:
    """Read as its struct and written again at once, an answer is the same bytes: order, spaces, escapes, numbers."""
    tokenizer = served.tokenizer
    ids = tokenizer.encode_text(TEXT)
    prompt = tokenizer.encode_text(PROMPT)
    made = writers(read(False, msgspec.json.encode(fields), b""), served, prompt)
    body: list[Part] = []
    for answer, delivery, writer in made:
        answer.prompt_logprobs += [logprob(place) for place in range(1, len(prompt))]
        for index in (1, 0):
            for delta in deltas(ids, index):
                delivery.take(delta)
        body += await writer.end_answer()
    content = written(body)
    assert num_bytes(body) == len(content)
    answered = msgspec.json.decode(content, type=kind)
    assert msgspec.json.encode(answered) == content
    assert [choice.index for choice in answered.choices] == list(range(2 * len(made)))
    given = choice_logprobs(tokenizer, ids, [logprob(place) for place in range(len(ids))])
    ranked = prompt_logprobs(tokenizer, prompt, [logprob(place) for place in range(1, len(prompt))])
    for choice in answered.choices:
        text = choice.message.content if kind is ChatCompletion else choice.text
        assert text.endswith(TEXT)
        if fields.get("return_token_ids"):
            assert choice.token_ids == ids
        if kind is ChatCompletion:
            assert choice.logprobs == (given if fields.get("logprobs") else None)
        elif choice.logprobs is not None:
            assert choice.logprobs.tokens[-len(ids) :] == [entry.token for entry in given.content]
            assert len({len(column) for column in msgspec.structs.astuple(choice.logprobs)}) == 1
            assert choice.logprobs.text_offset[-len(ids)] == len(text) - len(TEXT)
    if fields.get("prompt_logprobs"):
        assert (answered if kind is ChatCompletion else answered.choices[0]).prompt_logprobs == ranked


def test_tokens_that_do_not_belong_to_the_answer_after_all_lose_their_entries(served: ServedModel) -> None:
    """A stop string may lie in tokens that were taken for the beginning of a call."""
    ids = served.tokenizer.encode_text("a b c d")
    for read, asked in ((read_chat_completion, {"top_logprobs": 3}), (read_completion, {})):
        base = {**(CHAT if asked else COMPLETION), "n": 1, "logprobs": True if asked else 3, "return_token_ids": True}
        [(answer, delivery, writer)] = writers(read(False, msgspec.json.encode({**base, **asked}), b""), served, [1])
        [choice] = answer.choices
        assert choice.record is not None
        for delta in deltas(ids, 0)[:-1]:
            delivery.take(delta)
        num_before = writer.num_kept_bytes
        choice.record.add_tokens(TokenDelta("r", []), -2)
        writer.take_chunk(AnswerChunk(choice, "", ""))
        assert writer.num_kept_bytes < num_before
        written_choice = msgspec.json.decode(written(list(asyncio.run(end(writer)))))["choices"][0]
        assert written_choice["token_ids"] == ids[:-3]
        logprobs = written_choice["logprobs"]
        assert len(logprobs["content"] if asked else logprobs["tokens"]) == len(ids) - 3


async def end(writer: AnswerWriter) -> list[Part]:
    return list(await writer.end_answer())


def counted(writer: AnswerWriter) -> tuple[list[Part], int]:
    """The parts at the end of an answer, and the number of Python's instructions that the loop's thread takes for them."""
    with counting_instructions() as count:
        parts = asyncio.run(end(writer))
    return parts, count()


LONG: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (read_chat_completion, {**CHAT, "n": 8, "logprobs": True, "top_logprobs": 3}),
    "completion": (read_completion, {**COMPLETION, "n": 8, "logprobs": 3}),
}


@table("read, fields", LONG.values(), LONG)
def test_the_end_of_an_answer_does_not_grow_with_its_log_probabilities(
    read: Any, fields: dict[str, Any], served: ServedModel
) -> None:
    numbers = []
    for num_tokens in (20, 200):
        [(_, delivery, writer)] = writers(read(False, msgspec.json.encode(fields), b""), served, [1, 2])
        for index in range(8):
            for delta in deltas([300] * num_tokens, index):
                delivery.take(delta)
        num_kept = writer.num_kept_bytes
        parts, num_steps = counted(writer)
        length = num_bytes(parts)
        # What was counted while it grew is the answer, besides the frame around it.
        assert 0.6 * length < num_kept < 1.4 * length
        encoded_late = sum(len(part) for part in parts if isinstance(part, bytes))
        numbers.append((num_steps, encoded_late))
    (few_steps, few_late), (many_steps, many_late) = numbers
    # Eight choices: their texts and places of 180 tokens more, but not an entry.
    assert many_late - few_late < 8 * 180 * 12
    assert many_steps - few_steps < 8 * 180 * 10


@table(
    "read, fields",
    [
        (read_chat_completion, {**CHAT, "n": 1}),
        (read_completion, {**COMPLETION, "n": 1}),
        (read_messages, {"max_tokens": 5, "messages": CHAT["messages"], "model": "m"}),
        (
            lambda strict, body, tenant: ResponseReader(strict, None).read_chat(body, tenant),
            {"input": "hi", "model": "m"},
        ),
    ],
    ["chat", "completion", "message", "response"],
)
def test_the_text_of_an_answer_is_counted_while_it_grows(
    read: Any, fields: dict[str, Any], served: ServedModel
) -> None:
    [(_, delivery, writer)] = writers(read(False, msgspec.json.encode(fields), b""), served, [1, 2])
    ids = served.tokenizer.encode_text("word " * 50)
    for delta in deltas(ids, 0):
        delivery.take(delta)
    assert writer.num_kept_bytes >= len("word " * 50)


def test_a_whole_answer_without_memory_ends_its_work(tiny_qwen3_vl: Path) -> None:
    """Before, nothing bounded it until its end."""
    with scripted.running(tiny_qwen3_vl, GatewayConfig(max_request_memory_bytes=1 << 20)) as gateway:
        entry = logprob(1, 20)
        gateway.worker.script = [*[TokenDelta("r", [300], logprobs=[entry])] * 4000, 600.0]
        answer = gateway.chat(logprobs=True, top_logprobs=20, max_tokens=4050)
        assert answer.status == 429
        assert "log probabilities" in answer.json["error"]["message"]
        wait_until(lambda: gateway.worker.num_aborted and not gateway.application.limits.memory.num_bytes)
        gateway.answer_two_tokens()
        assert gateway.chat().status == 200
