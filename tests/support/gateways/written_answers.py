"""Answers as models write them, in the forms of all families, and what a client sees of them."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from saccade.gateway.chat import Chat
from saccade.gateway.chat_request import ChatRequest
from saccade.gateway.output.call_reader import GeneratedCall, joined_calls
from saccade.gateway.output.choice import GeneratedChoice, choices_of
from saccade.gateway.served_models.served_model import ServedModel
from saccade.protocol.output import FinishReason, TokenDelta

PIECES = (1, 2, 3, 5, 8)
"""Tokens of a delta; every answer is read whole, too."""

TAGS = re.compile(
    r"</?think>|</?tool_call>|</?arg_(?:key|value)>|<\|tool_call>|<tool_call\|>|<\|\"\|>|<\|channel>|<channel\|>"
    r"|<\|tool_calls_section_(?:begin|end)\|>|<\|tool_call_(?:begin|argument_begin|end)\|>"
)

PROPERTIES = {"text": {"type": "string"}, "count": {"type": "integer"}, "list": {"type": "array"}}
TOOLS: tuple[dict[str, Any], ...] = (
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": PROPERTIES}}},
    {"type": "function", "function": {"name": "look_far", "parameters": {"type": "object", "properties": {}}}},
)

Call = tuple[str, dict[str, Any]]
CUT = "the arguments of a call that is cut"


class Seen(NamedTuple):
    """What a client sees, without white space around texts, and the tokens of reasoning and of all."""

    reasoning: str
    content: str
    calls: list[Call]
    finish_reason: str | None
    num_reasoning_tokens: int
    num_tokens: int


@dataclass(frozen=True)
class Form:
    """How one family writes: *model* is its checkpoint, *thinks* the end of a prompt that opens the reasoning.

    *tags* are those that a value may hold as tokens, *end_tags* what closes a call, the innermost first.
    """

    model: str
    write: Callable[[str, dict[str, Any]], str]
    tags: tuple[str, str]
    end_tags: tuple[str, ...]
    section: tuple[str, str] = ("", "")
    thinks: str = "<think>\n"
    end_of_thought: str = "</think>"

    def calls(self, *calls: Call) -> str:
        """Return *calls* as the model writes them, in one section."""
        written = "\n".join(self.write(*call) for call in calls)
        return f"{self.section[0]}{written}{self.section[1]}"


def _hermes(name: str, arguments: dict[str, Any]) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def bare(value: Any) -> str:
    """Return a value as models write it without quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def _coder(name: str, arguments: dict[str, Any]) -> str:
    values = "".join(f"<parameter={key}>\n{bare(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def _glm(name: str, arguments: dict[str, Any]) -> str:
    values = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{bare(value)}</arg_value>\n" for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{values}</tool_call>"


def _gemma_value(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case list():
            return f"[{','.join(map(_gemma_value, value))}]"
        case dict():
            return "{" + ",".join(f"{key}:{_gemma_value(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


def _gemma(name: str, arguments: dict[str, Any]) -> str:
    return f"<|tool_call>call:{name}{_gemma_value(arguments)}<tool_call|>"


def _kimi(name: str, arguments: dict[str, Any]) -> str:
    written = json.dumps(arguments, ensure_ascii=False)
    return f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{written}<|tool_call_end|>"


FORMS = {
    "hermes": Form("qwen3_vl", _hermes, ("<tool_call>", "</tool_call>"), ("</tool_call>",)),
    "qwen3_coder": Form(
        "qwen3_5", _coder, ("<tool_call>", "</tool_call>"), ("</parameter>", "</function>", "</tool_call>")
    ),
    "glm45": Form(
        "glm4v", _glm, ("<tool_call>", "</tool_call>"), ("</arg_key>", "</arg_value>", "</tool_call>"), thinks="<think>"
    ),
    "gemma4": Form(
        "gemma4",
        _gemma,
        ("<|tool_call>", "<tool_call|>"),
        ("<tool_call|>",),
        thinks="<|channel>thought\n",
        end_of_thought="<channel|>",
    ),
    "kimi_k2": Form(
        "kimi_k25",
        _kimi,
        ("<|tool_call_begin|>", "<|tool_call_end|>"),
        ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        thinks="<think>",
    ),
}


def ids_of(model: ServedModel, text: str) -> list[int]:
    """Return the tokens of *text*: that of each tag the vocabulary has, and of the text between them."""
    start = len(model.tokenizer.encode_text(""))
    ids: list[int] = []
    place = 0
    for found in [*TAGS.finditer(text), None]:
        end = len(text) if found is None else found.start()
        if place < end:
            ids += model.tokenizer.encode_text(text[place:end])[start:]
        if found is not None:
            tag = model.tokenizer.token_id(found[0])
            ids += model.tokenizer.encode_text(found[0])[start:] if tag is None else [tag]
            place = found.end()
    return ids


def choice_of(
    model: ServedModel, prompt: str = "", tools: Sequence[dict[str, Any]] = TOOLS, **fields: Any
) -> GeneratedChoice:
    """Return the choice of a request for one answer with *tools*, after a prompt that ends in *prompt*."""
    chat = Chat([{"role": "user", "content": "What?"}], 0, [], True, {}, tuple(tools))
    [choice, *_] = choices_of(ChatRequest(messages=[], **fields), chat, model, ids_of(model, prompt))
    return choice


def read_in_pieces(choice: GeneratedChoice, ids: Sequence[int], size: int, finish: FinishReason) -> Seen:
    """Return what *choice* makes of *ids* in deltas of *size* tokens."""
    reasoning, content, pieces = "", "", list[GeneratedCall]()
    for start in range(0, len(ids) + 1, size):
        reason = finish if start + size > len(ids) else None
        chunk = choice.take_delta(TokenDelta("r", list(ids[start : start + size]), reason))
        reasoning, content = reasoning + chunk.reasoning, content + chunk.content
        pieces += chunk.calls
        if choice.finish_reason is not None:
            break
    calls = [
        (call.name, {CUT: call.arguments} if call.is_cut else json.loads(call.arguments))
        for call in joined_calls(pieces)
    ]
    seen = Seen(
        reasoning.strip(),
        content.strip(),
        calls,
        choice.finish_reason,
        choice.num_reasoning_tokens,
        choice.num_tokens,
    )
    assert choice.num_calls == len(calls)
    return seen


def read(
    model: ServedModel,
    text: str,
    prompt: str = "",
    tools: Sequence[dict[str, Any]] = TOOLS,
    finish: FinishReason = FinishReason.STOP,
    **fields: Any,
) -> Seen:
    """Return what a client sees of the answer *text*; in deltas of every size it is the same."""
    ids = ids_of(model, text)
    whole = read_in_pieces(choice_of(model, prompt, tools, **fields), ids, len(ids) + 1, finish)
    for size in PIECES:
        assert read_in_pieces(choice_of(model, prompt, tools, **fields), ids, size, finish) == whole, size
    return whole
