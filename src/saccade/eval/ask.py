"""Asks a server the questions of a source, and scores its answers."""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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


class ScoredAnswer(msgspec.Struct, frozen=True):
    """An answer to a question, and its *score* from 0 to 1. *run* numbers the answers to a question, from 0.

    If there is an *error*, the score is 0, and *example* says what went wrong.
    """

    number: int
    run: int
    name: str
    categories: Sequence[str]
    question: str
    expected: Sequence[str]
    text: str
    score: float
    finish_reason: str | None
    completion_tokens: int
    ms: float
    error: str | None
    example: str | None


class Side(NamedTuple):
    """One server's answers, of which *num_new* are new and took *wall_seconds*."""

    server: Server
    answers: list[ScoredAnswer]
    num_new: int
    wall_seconds: float


def open_journal(settings: EvalSettings, source: Source) -> Journal:
    """Open the file of answers. Raises StartupError."""
    path = settings.answers or Path(f"eval-{source.name}.jsonl")
    return Journal(path, _key, lambda line: line["error"] is None)


def _key(line: Mapping[str, Any]) -> object:
    """Return the key of a line. Another model, setting or text gives the request another digest."""
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
    if settings.max_tokens or not (settings.thinking or settings.cot):
        fields["max_tokens"] = settings.max_tokens or DEFAULT_MAX_TOKENS
    if settings.temperature:
        fields["seed"] = run
    if settings.thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": settings.thinking}
    return msgspec.json.encode(fields | msgspec.json.decode(settings.extra_body or "{}", type=dict[str, object]))


async def examine(
    server: Server, source: Source, settings: EvalSettings, journal: Journal, tell: Callable[[int], None]
) -> Side:
    """Ask the questions that *journal* does not have. *tell* gets the number of answers after each one.

    Raises StartupError.
    """
    answers: list[ScoredAnswer] = []
    num_old, begin = len(journal.results), time.perf_counter()

    def items() -> Iterator[tuple[Question, int, bytes]]:
        for question in source.questions():
            yield from ((question, run, body(server, question, run, settings)) for run in range(settings.runs))

    async def ask(item: tuple[Question, int, bytes]) -> None:
        question, run, content = item
        digest = blake3.blake3(content).hexdigest(length=16)
        place: dict[str, Any] = {"server": server.root, "number": question.number, "run": run, "digest": digest}
        if (line := journal.results.get(_key(place))) is None:
            once = functools.partial(server.ask, content, Record(question.number, run, 0.0))
            record, text = await retried(once, lambda result: result[0].error in TRANSIENT)
            line = place | _outcome(record, text)
            journal.add_result(line)
        fields = {"name": question.name, "categories": question.categories, "question": question.text}
        score = 0.0 if line["error"] else question.rule(line["text"])
        answers.append(msgspec.convert({**line, **fields, "expected": question.answers, "score": score}, ScoredAnswer))
        tell(len(answers))

    await run_all(items(), ask, settings.concurrency)
    answers.sort(key=lambda one: (one.number, one.run))
    return Side(server, answers, len(journal.results) - num_old, time.perf_counter() - begin)


def _outcome(record: Record, text: str) -> dict[str, Any]:
    """Return the other fields of a line. An answer without text is a wrong one, not an error."""
    error = None if record.error == NO_TEXT else record.error
    fields = {"text": text, "finish_reason": record.finish_reason, "completion_tokens": record.completion_tokens}
    return fields | {"ms": round(record.end_ms, 1), "error": error, "example": error and record.example}
