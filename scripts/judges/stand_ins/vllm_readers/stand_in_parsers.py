"""vLLM's parser classes by name, each in front of Saccade's reader of answers.

vLLM's parsers take calls of functions that no request declares, and Saccade's reader does not: the functions that a
text names are declared. In a stream the answer so far is read anew with each piece, and what is new is told.
"""

import json
import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar

from judges.reading import Reading, choice, chunks, served, together, tokens
from stand_in_protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)

from saccade.gateway.output.choice import AnswerChunk, GeneratedChoice
from saccade.gateway.served_models.served_model import ServedModel

NAMES = re.compile(
    r'"name"\s*:\s*"([\w.-]+)"|<function=([\w.-]+)|call:([\w.-]+)|<tool_call>\s*([\w.-]+)\s*(?:\n|<)'
    r'|(?:functions\.)?([\w.-]+):\d+|call tool="([\w.-]+)"'
)


NOBODY = "called-by-nobody"
"""A function that is declared always: without any, an answer is read as one that cannot have calls."""


def declared(request: Any, tools: Any, text: str) -> list[dict[str, Any]]:
    """The tools of a request or a parser, and those that *text* names, in OpenAI's form."""
    given = [_tool(one) for one in (getattr(request, "tools", None) or tools or ())]
    known = {one["function"]["name"] for one in given}
    named = {next(filter(None, found.groups())) for found in NAMES.finditer(text)} - known
    return [*given, *(_tool({"name": name}) for name in (*sorted(named), NOBODY))]


def _tool(tool: Any) -> dict[str, Any]:
    found = tool if isinstance(tool, dict) else json.loads(tool.model_dump_json())
    function = found.get("function") or {key: found.get(key) for key in ("name", "description", "parameters")}
    parameters = function.get("parameters") or {"type": "object"}
    return {"type": "function", "function": {"name": function["name"], "parameters": parameters}}


class Parser:
    """Reads whole answers and streams; *checkpoint*, *form* and *marks* are the family's."""

    checkpoint: ClassVar[str] = "qwen3_vl"
    form: ClassVar[str] = "auto"
    marks: ClassVar[str] = "auto"
    prompt: ClassVar[str] = ""

    def __init__(self, tokenizer: Any = None, tools: Any = None, **named: Any) -> None:
        if tokenizer is None:
            raise ValueError("The model tokenizer must be passed.")
        self.model_tokenizer = tokenizer
        self.tools = tools
        self.vocab = tokenizer.get_vocab()
        switches = named.get("chat_template_kwargs") or {}
        self._thinks = switches.get("enable_thinking", switches.get("thinking", True))
        self._pieces: list[str] = []
        self._chunks: list[AnswerChunk] = []
        self._declared: list[dict[str, Any]] = []
        self._made: GeneratedChoice | None = None
        self._told = Reading()

    def _choice(self, tools: list[dict[str, Any]], request: Any, with_reasoning: bool) -> GeneratedChoice:
        model = self._served(with_reasoning)
        shown = getattr(request, "include_reasoning", True)
        many = getattr(request, "parallel_tool_calls", True)
        fields = {"include_reasoning": shown is not False, "parallel_tool_calls": many is not False}
        return choice(model, self.prompt if with_reasoning and self._thinks else "", tools, **fields)

    def _served(self, with_reasoning: bool) -> ServedModel:
        return served(self.checkpoint, self.form, self.marks if with_reasoning else "none")  # type: ignore[arg-type]

    def _read(self, text: str, request: Any, *, with_tools: bool, with_reasoning: bool) -> Reading:
        tools = declared(request, self.tools, text) if with_tools else []
        ids = tokens(self._served(with_reasoning), text)
        return together(chunks(self._choice(tools, request, with_reasoning), [ids]))

    def _next(
        self, piece: str, request: Any, *, starts: bool, with_tools: bool, with_reasoning: bool, ends: bool = False
    ) -> Any:
        if starts or self._made is None:
            self._pieces, self._told, self._made = [], Reading(), None
        self._pieces.append(piece)
        tools = declared(request, self.tools, "".join(self._pieces)) if with_tools else []
        pieces = [piece]
        if self._made is None or tools != self._declared:
            self._made, self._declared, self._chunks = self._choice(tools, request, with_reasoning), tools, []
            pieces = self._pieces
        model = self._served(with_reasoning)
        self._chunks += chunks(self._made, [tokens(model, one) for one in pieces], ends=ends)
        found, told = together(self._chunks), self._told
        self._told = found
        calls = [
            DeltaToolCall(
                index=index,
                id=found.ids[index],
                type="function",
                function=DeltaFunctionCall(name=found.calls[index][0], arguments=found.calls[index][1]),
            )
            for index in range(len(told.calls), len(found.calls))
        ]
        content, reasoning = found.content[len(told.content) :], found.reasoning[len(told.reasoning) :]
        if not (content or reasoning or calls):
            return None
        return DeltaMessage(content=content or None, reasoning=reasoning or None, tool_calls=calls)

    def extract_tool_calls(self, model_output: str, request: Any = None) -> ExtractedToolCallInformation:
        """The calls of a whole answer."""
        found = self._read(model_output, request, with_tools=True, with_reasoning=False)
        calls = [
            ToolCall(id=own_id, function=FunctionCall(name=name, arguments=arguments))
            for (name, arguments), own_id in zip(found.calls, found.ids, strict=True)
        ]
        return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=found.content or None)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Any = (),
        current_token_ids: Any = (),
        delta_token_ids: Any = (),
        request: Any = None,
    ) -> Any:
        """The calls and the content of a piece."""
        return self._next(delta_text, request, starts=not previous_text, with_tools=True, with_reasoning=False)

    def extract_reasoning(self, model_output: str, request: Any = None) -> tuple[str | None, str | None]:
        """The reasoning and the content of a whole answer."""
        found = self._read(model_output, request, with_tools=False, with_reasoning=True)
        return found.reasoning or None, found.content or None

    def extract_reasoning_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *ids: Any, **named: Any
    ) -> Any:
        """The reasoning and the content of a piece."""
        return self._next(delta_text, None, starts=not previous_text, with_tools=False, with_reasoning=True)

    def parse(self, text: str, request: Any = None, *given: Any, **named: Any) -> tuple[Any, Any, Any]:
        """Reasoning, content and calls of a whole answer."""
        found = self._read(text, request, with_tools=self._has_tools(request), with_reasoning=True)
        calls = [
            FunctionCall(name=name, arguments=arguments, id=own_id)
            for (name, arguments), own_id in zip(found.calls, found.ids, strict=True)
        ]
        return found.reasoning or None, found.content or None, calls or None

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: Any,
        request: Any = None,
        prompt_token_ids: Any = None,
        finished: bool = False,
        **named: Any,
    ) -> Any:
        """Reasoning, content and calls of a piece."""
        starts = prompt_token_ids is not None and not self._pieces
        has = self._has_tools(request)
        return self._next(delta_text, request, starts=starts, ends=finished, with_tools=has, with_reasoning=True)

    def _has_tools(self, request: Any) -> bool:
        return getattr(request, "tool_choice", "auto") != "none"


class Hermes2ProToolParser(Parser):
    """Calls as JSON between tags."""

    form = "hermes"
    supports_required_and_named = True


class Qwen3EngineToolParser(Parser):
    """Qwen3-Coder's calls."""

    form = "qwen3_coder"


class BaseThinkingReasoningParser(Parser):
    """Reasoning between think tags, which the prompt may open."""


class _DeepSeekR1(Parser):
    """DeepSeek-R1's reasoning, which its prompts open."""

    prompt = "<think>\n"


class DelegatingParser(Parser):
    """A parser of calls and one of reasoning together."""

    reasoning_parser_cls: Any = None
    tool_parser_cls: Any = None

    def __init__(self, tokenizer: Any = None, tools: Any = None, **named: Any) -> None:
        parts = [part for part in (self.tool_parser_cls, self.reasoning_parser_cls) if part is not None]
        if parts and not issubclass(parts[0], Parser):
            raise NotImplementedError(str(parts[0]))
        for part in parts[:1]:
            self.checkpoint, self.form = part.checkpoint, part.form  # type: ignore[misc]
        self.prompt = getattr(self.reasoning_parser_cls, "prompt", "")  # type: ignore[misc]
        super().__init__(tokenizer, tools, **named)

    def _read(self, text: str, request: Any, *, with_tools: bool, with_reasoning: bool) -> Reading:
        return super()._read(text, request, **self._parts(with_tools, with_reasoning))

    def _next(
        self, piece: str, request: Any, *, starts: bool, with_tools: bool, with_reasoning: bool, ends: bool = False
    ) -> Any:
        return super()._next(piece, request, starts=starts, ends=ends, **self._parts(with_tools, with_reasoning))

    def _parts(self, with_tools: bool, with_reasoning: bool) -> dict[str, bool]:
        has_calls, has_reasoning = self.tool_parser_cls is not None, self.reasoning_parser_cls is not None
        return {"with_tools": with_tools and has_calls, "with_reasoning": with_reasoning and has_reasoning}


class ParserState(Enum):
    """States of vLLM's engine that its tests name."""

    CONTENT = 0
    REASONING = 1
    TOOL = 2


@dataclass(frozen=True)
class Config:
    """What tests read of an engine's configuration: the family's name and its tags."""

    name: str
    tags: tuple[str, str, str, str] = ("", "", "", "")
    thinking: bool = True
    transitions: tuple[()] = ()

    @property
    def token_id_terminals(self) -> dict[str, str]:
        """Tags by what they do."""
        names = ("THINK_START", "THINK_END", "TOOL_START", "TOOL_END")
        return dict(zip(names, self.tags, strict=True))

    @property
    def terminal_literals(self) -> set[str]:
        """All tags."""
        return set(self.tags)

    def terminal_literal(self, name: str) -> str | None:
        """The tag that does something."""
        return self.token_id_terminals.get(name)


THINK = ("<think>", "</think>")
CONFIGS = {
    "qwen3": Config("qwen3", (*THINK, "<tool_call>", "</tool_call>")),
    "glm47_moe": Config("glm47_moe", (*THINK, "<tool_call>", "</tool_call>")),
    "gemma4": Config("gemma4", ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>")),
    "kimi_k2": Config("kimi_k2", (*THINK, "<|tool_call_begin|>", "<|tool_call_end|>")),
}


class ParserEngine(Parser):
    """vLLM's engine of parsers; a family's class, or a configuration, says what it reads."""

    family: ClassVar[str] = ""

    def __init__(
        self, tokenizer: Any = None, tools: Any = None, parser_engine_config: Any = None, **named: Any
    ) -> None:
        self.parser_engine_config = parser_engine_config or CONFIGS[self.family]
        if parser_engine_config is not None:
            family = ENGINES_BY_NAME[parser_engine_config.name]
            self.checkpoint, self.form, self.prompt = family.checkpoint, family.form, family.prompt  # type: ignore[misc]
        super().__init__(tokenizer, tools, **named)
        self._thinks &= self.parser_engine_config.thinking


class Qwen3Parser(ParserEngine):
    """Qwen3.5's answers."""

    family, checkpoint, prompt = "qwen3", "qwen3_5", "<think>\n"


class Glm47MoeParser(ParserEngine):
    """GLM's answers."""

    family, checkpoint, prompt = "glm47_moe", "glm4v", "<think>"


class Gemma4Parser(ParserEngine):
    """Gemma 4's answers."""

    family, checkpoint = "gemma4", "gemma4"


class KimiK2Parser(ParserEngine):
    """Kimi-K2.5's answers."""

    family, checkpoint, prompt = "kimi_k2", "kimi_k25", "<think>"


class KimiK3Parser(Parser):
    """Kimi-K3's answers."""

    checkpoint, prompt = "kimi_k3", "<|open|>think<|sep|>"


ENGINES: dict[str, type[ParserEngine]] = {
    one.__name__: one for one in (Qwen3Parser, Glm47MoeParser, Gemma4Parser, KimiK2Parser)
}
ENGINES_BY_NAME = {one.family: one for one in ENGINES.values()}


def _config(name: str) -> Any:
    def config(thinking: bool = True, **named: Any) -> Config:
        return replace(CONFIGS[name], thinking=thinking)

    return config


qwen3_config, glm47_moe_config, gemma4_config, kimi_k2_config = map(_config, CONFIGS)
Glm47MoeModelToolParser = Glm47MoeParserToolAdapter = Glm47MoeParserReasoningAdapter = Glm47MoeParser
Gemma4EngineToolParser = Gemma4ParserToolAdapter = Gemma4ParserReasoningAdapter = Gemma4Parser
Qwen3ParserToolAdapter = Qwen3ParserReasoningAdapter = Qwen3Parser
KimiK2ToolParser = KimiK2ReasoningParser = KimiK2Parser
KimiK3ToolParser = KimiK3ReasoningParser = KimiK3Parser
ToolParser = ReasoningParser = Parser
REGISTERED: dict[str, type[Parser]] = {
    "hermes": Hermes2ProToolParser,
    "qwen3_coder": Qwen3EngineToolParser,
    "qwen3": Qwen3Parser,
    "glm45": Glm47MoeParser,
    "glm47": Glm47MoeParser,
    "gemma4": Gemma4Parser,
    "kimi_k2": KimiK2Parser,
    "kimi_k3": KimiK3Parser,
    "deepseek_r1": _DeepSeekR1,
}


class _Manager:
    """Finds parsers by name."""

    @staticmethod
    def find(name: str, *given: Any, **named: Any) -> type[Parser]:
        """Return the parser's class."""
        return REGISTERED[name]

    get_tool_parser = get_reasoning_parser = get_parser = get_parser_cls = find


ToolParserManager = ReasoningParserManager = ParserManager = _Manager
