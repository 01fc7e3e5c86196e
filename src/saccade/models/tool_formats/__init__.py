"""The tool call formats, by the names of vLLM's parsers.

Each has a file with its tags, parser, grammar and template form.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from saccade.models.tool_formats import gemma4, glm45, hermes, kimi_k2, kimi_k3, qwen3_coder
from saccade.models.tool_formats.form import CallConstraint, ToolCallTokens, ToolFormat
from saccade.tokenization.markup import Markup
from saccade.tokenization.tokenizer import Tokenizer

FORMATS: Final[Mapping[str, ToolFormat]] = MappingProxyType(
    {
        "hermes": hermes.FORMAT,
        "qwen3_coder": qwen3_coder.FORMAT,
        "kimi_k2": kimi_k2.FORMAT,
        "kimi_k3": kimi_k3.FORMAT,
        "glm45": glm45.FORMAT,
        "gemma4": gemma4.FORMAT,
    }
)


def tool_call_tokens(tokenizer: Tokenizer, name: str | None) -> ToolCallTokens | None:
    """Return the tag ids of the format *name*, or None if the vocabulary lacks one of the tags."""
    if name is None:
        return None
    if FORMATS[name].markup is not None:
        return FORMATS[name].markup if Markup.of_tokenizer(tokenizer) is not None else None
    token_ids = [None if tag is None else tokenizer.token_id(tag) for tag in FORMATS[name].tags]
    is_lacking = any(tag is not None and one is None for tag, one in zip(FORMATS[name].tags, token_ids, strict=True))
    return None if is_lacking else ToolCallTokens(name, *token_ids)  # type: ignore[arg-type]


def write_grammar(calls: CallConstraint) -> str:
    """Return the Lark grammar of *calls*, whose schemas can be enforced."""
    return FORMATS[calls.tokens.format].grammar(calls)
