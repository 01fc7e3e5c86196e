"""llama.cpp's test-chat.cpp, read as data: answers of models, and what its parsers make of them."""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from judges.archives import take
from judges.cpp import Call, Name, NotData, Reader
from judges.judge import Judge
from judges.outcomes import FAILED, PASSED, SKIPPED, Outcome
from judges.reading import WHOLE, Reading, read, served
from judges.suites.llama_archive import ARCHIVE, ROOT, TEMPLATES

SOURCE = f"{ROOT}/tests/test-chat.cpp"
SIZES = (WHOLE, 1, 3, 8)
"""An answer is read whole, and in pieces of so many tokens; all must give the same."""
MODELS: Mapping[str, tuple[str, str]] = {
    "Qwen3.5-4B": ("qwen3_5", "auto"),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_5", "auto"),
    "StepFun3.5-Flash": ("qwen3_5", "auto"),
    "Qwen3-Coder": ("qwen3_vl", "qwen3_coder"),
    "Qwen-QwQ-32B": ("qwen3_vl", "hermes"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("qwen3_vl", "hermes"),
    "GLM-4.6": ("glm4v", "auto"),
    "GLM-4.7-Flash": ("glm4v", "auto"),
    "Kimi-K2-Instruct": ("kimi_k25", "auto"),
    "Kimi-K2-Thinking": ("kimi_k25", "auto"),
    "moonshotai-Kimi-K2": ("kimi_k25", "auto"),
    "Kimi-K3": ("kimi_k3", "auto"),
    "google-gemma-4-31B-it": ("gemma4", "auto"),
}
"""Templates of releases whose answers have the form of a family that Saccade serves: checkpoint, form of calls."""
WITHOUT_REASONING = ("Qwen3-Coder", "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use")


@dataclass(frozen=True)
class Case:
    """An answer after a template's prompt, and what is expected of it. *line* is its place in the file."""

    template: str
    line: int
    text: str
    expected: Reading = field(default_factory=Reading)
    tools: tuple[dict[str, Any], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The template and the line."""
        return f"{self.template}::line {self.line}"


def read_cases(source: str) -> Iterator[Case]:
    """Yield the cases of the models above. One that is not plain data is left out."""
    tools, messages = read_tools(source), read_messages(source)
    template = ""
    for found in re.finditer(r'peg_tester\("models/templates/([^"]+)\.jinja"|\btst\.test(?=\()', source):
        if found[1] is not None:
            template = found[1]
            continue
        if template in MODELS:
            calls = Reader(source, found.end()).chain()
            yield make_case(template, source.count("\n", 0, found.start()) + 1, calls, tools, messages)


def read_tools(source: str) -> dict[str, dict[str, Any]]:
    """The file's tools by their names in it, in OpenAI's form."""
    found = {}
    for start in re.finditer(r"static common_chat_tool (\w+)\s*(?=\{)", source):
        found[start[1]] = tool(*Reader(source, start.end()).expression())
    return found


def tool(name: str, description: str, parameters: str) -> dict[str, Any]:
    """A tool in OpenAI's form; *parameters* are JSON."""
    function = {"name": name, "description": description, "parameters": json.loads(parameters)}
    return {"type": "function", "function": function}


def read_messages(source: str) -> dict[str, Reading]:
    """The file's expected messages by their names in it."""
    found = {}
    for start in re.finditer(
        r"(?:common_chat_msg|auto) (\w+)\s*=\s*(?=(?:simple_assist_msg|message_with_\w+)\()", source
    ):
        with contextlib.suppress(NotData):
            found[start[1]] = message(Reader(source, start.end()).expression())
    return found


def message(call: Call) -> Reading:
    """What one of the file's functions makes of its arguments."""
    given = call.arguments
    match call.function:
        case "simple_assist_msg":
            content, reasoning, name, arguments, own_id = (*given, *("",) * (5 - len(given)))
            calls = ((name, arguments),) if name else ()
            return Reading(reasoning, content, calls, (own_id,) * len(calls))
        case "message_with_tool_calls":
            return Reading("", "", ((given[0], given[1]),), ("",))
        case "message_with_tool_calls_and_reasoning":
            return Reading(given[2], "", ((given[0], given[1]),), ("",))
        case "message_with_content_and_tool_call":
            return Reading("", given[0], ((given[1], given[2]),), ("",))
        case "message_with_reasoning_and_tool_call":
            return Reading(given[0], "", ((given[1], given[2]),), ("",))
        case "message_with_reasoning_content_and_multiple_tool_calls":
            return Reading(given[0], given[1], tuple((name, text) for name, text in given[2]), ("",) * len(given[2]))
    raise NotData(call.function)


def make_case(
    template: str, line: int, calls: list[Call], tools: Mapping[str, dict[str, Any]], messages: Mapping[str, Reading]
) -> Case:
    """Build the case that a chain of *calls* describes."""
    case = Case(template, line, calls[0].arguments[0])
    options: dict[str, Any] = {}
    for call in calls[1:]:
        match call.function, call.arguments:
            case "expect", (Name(text),):
                case = replace(case, expected=messages[text])
            case "expect", (Call() as made,):
                case = replace(case, expected=message(made))
            case "expect_content", (str(text),):
                case = replace(case, expected=replace(case.expected, content=text))
            case "expect_reasoning", (str(text),):
                case = replace(case, expected=replace(case.expected, reasoning=text))
            case "expect_tool_calls", (list(made),):
                expected = tuple((one[0], one[1]) for one in made)
                ids = tuple(one[2] or "" for one in made)
                case = replace(case, expected=replace(case.expected, calls=expected, ids=ids))
            case "tools", (list(names),):
                case = replace(
                    case, tools=tuple(tools[one.text] if isinstance(one, Name) else tool(*one) for one in names)
                )
            case name, given:
                options[name] = given[0] if given else True
    return replace(case, options=options)


def prompt_of(case: Case, folder: Path) -> str:
    """The end of the template's prompt, after which the answer comes."""
    source = (folder / TEMPLATES / f"{case.template}.jinja").read_text()
    asked = [{"role": "user", "content": "Hey"}]
    thinks = case.options.get("enable_thinking", True)
    rendered, _ = render_jinja_template(
        conversations=[asked],
        chat_template=source,
        tools=list(case.tools),
        add_generation_prompt=case.options.get("add_generation_prompt", True),
        enable_thinking=thinks,
        thinking=thinks,
        bos_token="",
        eos_token="",
    )
    return str(rendered[0])[-200:]


def judge_case(case: Case, folder: Path) -> Outcome:
    """Read the answer, whole and in pieces. White space around reasoning and content does not count."""
    checkpoint, form = MODELS[case.template]
    leaves_reasoning = case.options.get("reasoning_format") == Name("COMMON_REASONING_FORMAT_NONE")
    without = leaves_reasoning or case.template in WITHOUT_REASONING
    model = served(checkpoint, form, "none" if without else "auto")  # type: ignore[arg-type]
    prompt = prompt_of(case, folder)
    ends = not case.options.get("is_partial", False)
    wanted = plain(case.expected)
    for size in SIZES:
        got = read(model, prompt, case.text, case.tools, size, ends)
        ids = all(not own or own == given for own, given in zip(case.expected.ids, got.ids, strict=False))
        if plain(got) != wanted or not ids:
            return Outcome(case.name, FAILED, f"{case.text!r}, pieces of {size}: {got}, not {case.expected}")
    return Outcome(case.name, PASSED)


def plain(reading: Reading) -> tuple[str, str, list[tuple[str, Any]]]:
    """The reading without white space around its texts; arguments that are no JSON count as none, as in the file."""
    return reading.reasoning.strip(), reading.content.strip(), [(name, _json(text)) for name, text in reading.calls]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return ""


def run(cache: Path, skips: frozenset[str]) -> Iterable[Outcome]:
    """Judge every case."""
    folder = take(ARCHIVE, (SOURCE, TEMPLATES), cache)
    for case in read_cases((folder / SOURCE).read_text()):
        if case.name in skips:
            yield Outcome(case.name, SKIPPED)
        else:
            yield judge_case(case, folder)


SAYS = """\
The vendored tests/test-chat.cpp is read as data, by a small reader of its C++ strings. Its answers of families that
Saccade serves go through the reader of answers, whole and in pieces of 1, 3 and 8 tokens. The tags in a text are the
model's tokens. Left out are the templates of other families, its grammars and its templates' own tests."""
JUDGE = Judge("llama-answers", ARCHIVE.release, SAYS, run)
