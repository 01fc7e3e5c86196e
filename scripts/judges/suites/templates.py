"""Chat templates of releases, rendered by Saccade and by transformers: the same text, or refused by both."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from judges.archives import take
from judges.judge import Judge
from judges.outcomes import FAILED, PASSED, SKIPPED, Outcome
from judges.suites import llama_archive, vllm_archive
from saccade.errors import InvalidValue, StartupError
from saccade.tokenization.chat_template import ChatTemplate

LLAMA = {
    f"{llama_archive.TEMPLATES}/{name}.jinja": name
    for name in (
        "GLM-4.6", "GLM-4.7-Flash", "Kimi-K2-Instruct", "Kimi-K2-Thinking", "Kimi-K3", "MiMo-VL",
        "Mistral-Small-3.2-24B-Instruct-2506", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Qwen-Qwen2.5-7B-Instruct",
        "Qwen-Qwen3-0.6B", "Qwen-QwQ-32B", "Qwen3-Coder", "Qwen3.5-4B", "google-gemma-4-31B-it",
        "microsoft-Phi-3.5-mini-instruct", "mistralai-Ministral-3-14B-Reasoning-2512",
    )
}  # fmt: skip
VLLM = {
    f"examples/tool_chat_template_{name}.jinja": f"vllm {name}"
    for name in ("gemma4", "hermes", "mistral3", "qwen3coder")
}
TAG = re.compile(r"<\|[^|<>\s'\"]{1,40}\|>|</?think>|</?tool_call>|\[/?[A-Z_]{2,20}\]|<\|[a-z_]+>|<[a-z_]+\|>")
"""What templates write as special tokens."""
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": f'Does {name} <now> & "here".', "parameters": parameters}
    return {"type": "function", "function": function}


def call(name: str, number: int = 0, **arguments: Any) -> dict[str, Any]:
    """A call of an earlier turn."""
    return {"id": f"functions.{name}:{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def says(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    """A message."""
    return {"role": role, "content": content, **fields}


def result(content: Any, number: int = 0, name: str = "read") -> dict[str, Any]:
    """The result of a call."""
    return says("tool", content, tool_call_id=f"functions.{name}:{number}", name=name)


def text(value: str) -> dict[str, str]:
    """A part of a message."""
    return {"type": "text", "text": value}


READ = tool("read", path={"type": "string", "description": "A path"})
ADD = tool("add", numbers={"type": "array", "items": {"type": "integer"}}, deep={"type": "object", "properties": {}})
ASK, ANSWER = says("user", "What is it?"), says("assistant", "A dog.")
SYSTEM = says("system", "Be brief.")
TURN = [ASK, ANSWER]
CALLED = says("assistant", "", tool_calls=[call("read", path="a b.txt")])
TWO = [call("read", 0, path='é\n"x"'), call("add", 1, numbers=[1, 2], deep={"a": {"b": None, "c": True}})]
CHATS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "a question": ([ASK], []),
    "a system's message": ([SYSTEM, ASK], []),
    "two turns": ([*TURN, ASK], []),
    "two turns of a system": ([SYSTEM, *TURN, ASK], []),
    "white space": ([says("user", "  \n a\t\n "), says("assistant", "\n b \n"), ASK], []),
    "other scripts": ([says("user", "日本語 é 😀 ﷺ"), ANSWER, ASK], []),
    "text parts": ([says("user", [text("one"), text("two")])], []),
    "an image": ([says("user", [{"type": "image"}, text("What is it?")])], []),
    "images in two turns": ([says("user", [text("a"), {"type": "image"}]), ANSWER, says("user", [{"type": "image"}])], []),
    "two questions": ([ASK, ASK], []),
    "an empty question": ([says("user", "")], []),
    "reasoning": ([ASK, says("assistant", "A dog.", reasoning_content="It barks."), ASK], []),
    "reasoning in the text": ([ASK, says("assistant", "<think>\nIt barks.\n</think>\n\nA dog."), ASK], []),
    "a tool": ([ASK], [READ]),
    "two tools and a system": ([SYSTEM, ASK], [READ, ADD]),
    "a call": ([ASK, CALLED, result("text")], [READ]),
    "a call of a system": ([SYSTEM, ASK, CALLED, result("text")], [READ, ADD]),
    "a call and its answer": ([ASK, CALLED, result("text"), ANSWER, ASK], [READ]),
    "a call with text": ([ASK, {**CALLED, "content": "I look."}, result('{"a": [1, "</x>"]}')], [READ]),
    "a call with reasoning": ([ASK, {**CALLED, "reasoning_content": "I must."}, result("text"), ASK], [READ]),
    "two calls": ([ASK, says("assistant", "", tool_calls=TWO), result("a"), result("3", 1, "add")], [READ, ADD]),
    "two rounds": ([ASK, CALLED, result("a"), CALLED, result("b"), ANSWER], [READ]),
    "a result in parts": ([ASK, CALLED, result([text("one"), text("two")])], [READ]),
    "a developer's message": ([says("developer", "Be brief."), ASK], []),
    "an answer first": ([ANSWER, ASK], []),
}  # fmt: skip
VARIANTS: Mapping[str, tuple[bool, dict[str, Any]]] = {
    "": (True, {}),
    ", no generation prompt": (False, {}),
    ", no thinking": (True, {"enable_thinking": False, "thinking": False}),
}


@dataclass(frozen=True)
class Chat:
    """A chat and its variables."""

    name: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    add_generation_prompt: bool = True
    switches: Mapping[str, Any] = field(default_factory=dict)


def chats() -> Iterator[Chat]:
    """All chats in all variants."""
    for name, (messages, tools) in CHATS.items():
        for variant, (adds, switches) in VARIANTS.items():
            yield Chat(name + variant, messages, tools, adds, switches)


def ours(template: ChatTemplate, chat: Chat) -> str | None:
    """Saccade's text, None if it refuses."""
    try:
        segments = template.render(chat.messages, chat.add_generation_prompt, chat.switches, tuple(chat.tools))
        return "".join(segment.text for segment in segments)
    except InvalidValue:
        return None


def theirs(source: str, chat: Chat) -> str | None:
    """transformers' text, None if the template fails."""
    try:
        rendered, _ = render_jinja_template(
            conversations=[chat.messages],
            chat_template=source,
            tools=chat.tools or None,
            add_generation_prompt=chat.add_generation_prompt,
            **VARIABLES,
            **chat.switches,
        )
        return str(rendered[0])
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError):
        return None


def judge_release(release: str, source: str, skips: frozenset[str]) -> Iterator[Outcome]:
    """Render all chats with a release's template."""
    try:
        template = ChatTemplate(source, set(TAG.findall(source)), VARIABLES)
    except StartupError as error:
        yield Outcome(f"{release}::the template", FAILED, str(error))
        return
    for chat in chats():
        name = f"{release}::{chat.name}"
        if name in skips:
            yield Outcome(name, SKIPPED)
            continue
        got, expected = ours(template, chat), theirs(source, chat)
        yield Outcome(name, PASSED if got == expected else FAILED, f"{got!r}\nnot {expected!r}")


def run(cache: Path, skips: frozenset[str]) -> Iterator[Outcome]:
    """Render all chats with all releases' templates."""
    for archive, files in ((llama_archive.ARCHIVE, LLAMA), (vllm_archive.ARCHIVE, VLLM)):
        folder = take(archive, files, cache)
        for file, release in files.items():
            yield from judge_release(release, (folder / file).read_text(), skips)


SAYS = """\
The templates of 20 releases, as llama.cpp and vLLM ship them, render 75 chats of Saccade's own: turns, parts, images,
reasoning, tools, calls and results. The text must equal that of transformers. A chat that both refuse passes. Left out
are the templates of families that Saccade does not serve."""
JUDGE = Judge("templates", f"{llama_archive.ARCHIVE.release}, {vllm_archive.ARCHIVE.release}", SAYS, run)
