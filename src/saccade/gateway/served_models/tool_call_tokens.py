"""The tokens that enclose tool calls in the answers of one model, by the format that its family declares."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from saccade.grammars.tool_calls import ToolCallTokens
from saccade.models.family import Family, ReasoningParser, ToolFormat, ToolParser
from saccade.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class Parsers:
    """The parsers of answers; "auto" is the one that the model's family declares, "none" parses nothing.

    The other names of *reasoning* are vLLM's parsers for the markers that "auto" looks for.
    """

    tool_calls: ToolParser = "auto"
    reasoning: ReasoningParser = "auto"

    @property
    def reads_reasoning(self) -> bool:
        return self.reasoning != "none"

    def tool_format(self, family: Family) -> ToolFormat | None:
        """Return the format of calls that is parsed in answers of a model of *family*, None for none."""
        if self.tool_calls == "auto":
            return family.tool_format
        return None if self.tool_calls == "none" else self.tool_calls


DECLARED: Final = Parsers()


@dataclass(frozen=True)
class ToolTags:
    """The tags of a format. A section may enclose the calls; *separator* divides a call's name from its arguments."""

    begin: str
    end: str
    section_begin: str | None = None
    section_end: str | None = None
    separator: str | None = None


_TOOL_CALL: Final = ToolTags("<tool_call>", "</tool_call>")
TAGS: Final[Mapping[ToolFormat, ToolTags]] = {
    "hermes": _TOOL_CALL,
    "qwen3_coder": _TOOL_CALL,
    "kimi_k2": ToolTags(
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_argument_begin|>",
    ),
}


def tool_call_tokens(tokenizer: Tokenizer, tool_format: ToolFormat | None) -> ToolCallTokens | None:
    """Return the ids for *tool_format*, None if the vocabulary lacks one of its tags."""
    if tool_format is None:
        return None
    tags = TAGS[tool_format]
    optional = (tags.section_begin, tags.section_end, tags.separator)
    begin_id, end_id = tokenizer.token_id(tags.begin), tokenizer.token_id(tags.end)
    others = [None if tag is None else tokenizer.token_id(tag) for tag in optional]
    is_lacking = any(tag is not None and token_id is None for tag, token_id in zip(optional, others, strict=True))
    if begin_id is None or end_id is None or is_lacking:
        return None
    return ToolCallTokens(tool_format, begin_id, end_id, *others)
