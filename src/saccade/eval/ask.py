"""Ask a server the questions of a source, and score its answers."""

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import blake3
import msgspec

from saccade.bench.client import NO_TEXT, Record, Server
from saccade.eval.questions import Question
from saccade.eval.runner import Journal, retried, run_all
from saccade.eval.settings import EvalSettings
from saccade.eval.tasks import Source

DEFAULT_MAX_TOKENS = 1024
TRANSIENT = ("no connection", "connection broken", "stream broken off", "HTTP 429", "HTTP 502", "HTTP 503", "HTTP 504")


class Answer(msgspec.Struct, frozen=True):
    """A line of the file of answers. *digest* is of the request, *ms* the time that the answer took."""

    server: str
    number: int
    run: int
    digest: str
    text: str
    finish_reason: str | None
    completion_tokens: int
    ms: float
    error: str | None = None
    example: str | None = None


class Scored(msgspec.Struct, frozen=True):
    """An answer with its question. *score* is from 0 to 1, and 0 for an answer with an error."""

    name: str
    categories: list[str]
    question: str
    expected: list[str]
    score: float
    answer: Answer


class Side(NamedTuple):
    """The answers of one server, of which *num_new* came now, in *wall_seconds*."""

    server: Server
    answers: list[Scored]
    num_new: int
    wall_seconds: float


def open_journal(settings: EvalSettings, source: Source) -> Journal:
    """Open the file of answers. Raises StartupError."""
    path = settings.answers or Path(f"eval-{source.name}.jsonl")
    return Journal(path, key, lambda line: line["error"] is None)


def key(line: Mapping[str, Any]) -> object:
    """Return what tells an answer from others: another model, setting or text is another digest."""
    return line["server"], line["number"], line["run"], line["digest"]


def body(server: Server, question: Question, run: int, settings: EvalSettings) -> bytes:
    """Return the JSON of the request."""
    fields: dict[str, object] = {
        "model": server.model,
        "messages": [{"role": "user", "content": question.content()}],
        "temperature": settings.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    max_tokens = settings.max_tokens or (None if settings.thinking or settings.cot else DEFAULT_MAX_TOKENS)
    if max_tokens is not None:
        fields["max_tokens"] = max_tokens
    if settings.temperature:
        fields["seed"] = run
    if settings.thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": settings.thinking}
    return msgspec.json.encode(fields | msgspec.json.decode(settings.extra_body or "{}", type=dict[str, object]))


async def examine(
    server: Server, source: Source, settings: EvalSettings, journal: Journal, tell: Callable[[int], None]
) -> Side:
    """Ask what *journal* does not have. *tell* gets the number of answers after each. Raises StartupError."""
    answers: list[Scored] = []
    num_new, begin = 0, time.perf_counter()

    def items() -> Iterator[tuple[Question, int, bytes]]:
        for question in source.questions():
            yield from ((question, run, body(server, question, run, settings)) for run in range(settings.runs))

    async def ask(item: tuple[Question, int, bytes]) -> None:
        nonlocal num_new
        question, run, content = item
        place = {"server": server.root, "number": question.number, "run": run, "digest": _digest(content)}
        line = journal.results.get(key(place))
        if line is None:
            once = functools.partial(server.ask, content, Record(question.number, run, 0.0))
            record, text = await retried(once, lambda result: result[0].error in TRANSIENT)
            line = place | _outcome(record, text)
            journal.add(line)
            num_new += 1
        answer = msgspec.convert(line, Answer)
        score = 0.0 if answer.error else question.rule(answer.text)
        categories, expected = list(question.categories), list(question.answers)
        answers.append(Scored(question.name, categories, question.text, expected, score, answer))
        tell(len(answers))

    await run_all(items(), ask, settings.concurrency)
    answers.sort(key=lambda one: (one.answer.number, one.answer.run))
    return Side(server, answers, num_new, time.perf_counter() - begin)


def _digest(content: bytes) -> str:
    return blake3.blake3(content).hexdigest(length=16)


def _outcome(record: Record, text: str) -> dict[str, object]:
    """Return the other fields of an Answer. An answer without text is a wrong one, not an error."""
    is_answer = record.error in (None, NO_TEXT)
    return {
        "text": text,
        "finish_reason": record.finish_reason,
        "completion_tokens": record.completion_tokens,
        "ms": round(record.end_ms, 1),
        "error": None if is_answer else record.error,
        "example": None if is_answer else record.example,
    }
