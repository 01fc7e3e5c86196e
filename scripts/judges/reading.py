"""Texts as models write them, read by Saccade's reader of answers: reasoning, content, calls of tools.

The tags of a text become the model's tokens, all else is text, as a model writes it.
"""

import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path += map(str, [Path(__file__).parents[2] / "tests", *Path(__file__).parents[2].glob("tests/support/*")])

from checkpoints import CHECKPOINTS

from saccade.gateway.chat import Chat
from saccade.gateway.chat_request import ChatMessage, ChatRequest
from saccade.gateway.output.call_reader import joined_calls
from saccade.gateway.output.choice import AnswerChunk, GeneratedChoice, choices_of
from saccade.gateway.served_models.served_model import Parsers, ServedModel
from saccade.models.family import ReasoningParser, ToolParser
from saccade.models.files import read_model_files
from saccade.protocol.output import FinishReason, TokenDelta
from saccade.tokenization.tokenizer import Tokenizer

CONTEXT = 32768
WHOLE = 10**6
TAGS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>",
)  # fmt: skip
"""Tokens of vocabularies that are not marked as special."""


@dataclass(frozen=True)
class Reading:
    """What an answer says; a call is its name and its arguments, a JSON object as text."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    ids: tuple[str, ...] = ()


@cache
def served(checkpoint: str, tool_calls: ToolParser = "auto", reasoning: ReasoningParser = "auto") -> ServedModel:
    """The gateway's part of a tiny checkpoint, with vocabulary and template as the release's."""
    with tempfile.TemporaryDirectory() as folder:
        files = read_model_files(CHECKPOINTS[checkpoint](Path(folder)))
    return ServedModel.from_files("model", files, CONTEXT, parsers=Parsers(tool_calls, reasoning))


@cache
def _tags(tokenizer: Tokenizer) -> tuple[Mapping[str, int], re.Pattern[str]]:
    ids = {tag: tokenizer.token_id(tag) for tag in TAGS} | dict(tokenizer.special_tokens)
    found = {tag: number for tag, number in ids.items() if number is not None}
    return found, re.compile("(" + "|".join(re.escape(tag) for tag in sorted(found, key=len, reverse=True)) + ")")


def tokens(model: ServedModel, text: str) -> list[int]:
    """The tokens of *text*."""
    ids, pattern = _tags(model.tokenizer)
    start = len(model.tokenizer.encode_text(""))
    found: list[int] = []
    for piece in pattern.split(text):
        found += [ids[piece]] if piece in ids else model.tokenizer.encode_text(piece)[start:] if piece else []
    return found


def choice(model: ServedModel, prompt: str, tools: Sequence[dict[str, Any]], **fields: Any) -> GeneratedChoice:
    """An answer after the text *prompt*, before its first token; *fields* are those of a chat's request."""
    request = ChatRequest(messages=[ChatMessage("user", "")], tools=list(tools), **fields)
    (made,) = choices_of(request, Chat([], 0, [], True, {}, tuple(tools)), model, tokens(model, prompt))
    return made


def chunks(made: GeneratedChoice, pieces: Iterable[Sequence[int]], *, ends: bool = True) -> Iterator[AnswerChunk]:
    """Read *pieces* of tokens; the answer *ends* by itself after the last."""
    for piece in pieces:
        yield made.take_delta(TokenDelta("request", list(piece), None))
    if ends:
        yield made.take_delta(TokenDelta("request", [], FinishReason.STOP))


def read(
    model: ServedModel, prompt: str, text: str, tools: Sequence[dict[str, Any]], size: int = WHOLE, ends: bool = True
) -> Reading:
    """Read an answer in pieces of *size* tokens."""
    ids = tokens(model, text)
    pieces = [ids[start : start + size] for start in range(0, len(ids), size)]
    return together(chunks(choice(model, prompt, tools), pieces, ends=ends))


def together(found: Iterable[AnswerChunk]) -> Reading:
    """What *found* says together."""
    all_chunks = list(found)
    calls = joined_calls(call for chunk in all_chunks for call in chunk.calls)
    return Reading(
        "".join(chunk.reasoning for chunk in all_chunks),
        "".join(chunk.content for chunk in all_chunks),
        tuple((call.name, call.arguments) for call in calls),
        tuple(call.id for call in calls),
    )
