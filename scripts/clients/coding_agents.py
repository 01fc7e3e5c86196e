"""Gateways for coding agents: real ones, whose worker writes by a script what a model would write for the task.

The task: read a file, look at an image, change the file, say so. The calls are written in the form of the family, for
the tools that the agent declares; the number of results in the prompt says which turn it is. The templates lose system
turns as those of the releases do.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import scripted
from checkpoints import CHECKPOINTS

from saccade.connectors.sink import Sink, Stream
from saccade.protocol.request import EngineRequest

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
"""Has the settings of each agent, which the programs take from there."""

CONTEXT = 500_000
"""Tokens: an agent's first request has some 30,000 of a release, and tiny vocabularies need several times as many."""

TASK_FILE, TASK_IMAGE = "notes.txt", "image.png"
BEFORE, AFTER = "The door is red.\n", "The door is green.\n"
SAYS = "The door is green now."

IMAGE_TURN = 1
"""The turn whose result is the image."""

Call = tuple[str, dict[str, Any]]


def _shell(folder: Path) -> list[Call]:
    """Codex's calls."""
    return [
        ("exec_command", {"cmd": f"cat {TASK_FILE}"}),
        ("view_image", {"path": str(folder / TASK_IMAGE)}),
        ("exec_command", {"cmd": f"sed -i s/red/green/ {TASK_FILE}"}),
    ]


def _files(folder: Path) -> list[Call]:
    """Claude Code's calls."""
    return [
        ("Read", {"file_path": str(folder / TASK_FILE)}),
        ("Read", {"file_path": str(folder / TASK_IMAGE)}),
        ("Edit", {"file_path": str(folder / TASK_FILE), "old_string": "red", "new_string": "green"}),
    ]


def _small_files(folder: Path) -> list[Call]:
    """Qwen Code's calls."""
    names = {"Read": "read_file", "Edit": "edit"}
    return [(names[name], values) for name, values in _files(folder)]


def _file_paths(folder: Path) -> list[Call]:
    """opencode's calls."""
    names = {"file_path": "filePath", "old_string": "oldString", "new_string": "newString"}
    return [(name.lower(), {names[key]: value for key, value in values.items()}) for name, values in _files(folder)]


def _editor(folder: Path) -> list[Call]:
    """Cline's calls."""
    path = str(folder / TASK_FILE)
    return [
        ("read_files", {"files": [{"path": path}]}),
        ("read_files", {"files": [{"path": str(folder / TASK_IMAGE)}]}),
        ("editor", {"path": path, "old_text": "red", "new_text": "green"}),
    ]


CALLS: Mapping[str, Callable[[Path], list[Call]]] = {
    "exec_command": _shell,
    "run_shell_command": _small_files,
    "todowrite": _file_paths,
    "read_files": _editor,
    "Edit": _files,
}
"""By the name of a tool that only that agent declares."""


def _hermes(call: Call) -> list[str]:
    return ["<tool_call>", json.dumps({"name": call[0], "arguments": call[1]}), "</tool_call>"]


def _qwen3_coder(call: Call) -> list[str]:
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in call[1].items()}
    values = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in texts.items())
    return ["Now.", "</think>", "\n\n", "<tool_call>", f"\n<function={call[0]}>\n{values}</function>\n", "</tool_call>"]


def _gemma4(call: Call) -> list[str]:
    return ["<|tool_call>", f"call:{call[0]}", *_gemma4_value(call[1]), "<tool_call|>"]


def _gemma4_value(value: Any) -> list[str]:
    if isinstance(value, str):
        return ['<|"|>', value, '<|"|>']
    if isinstance(value, list):
        return ["[", *chain.from_iterable(map(_gemma4_value, value)), "]"]
    fields = (
        [f"{',' if place else ''}{name}:", *_gemma4_value(one)] for place, (name, one) in enumerate(value.items())
    )
    return ["{", *chain.from_iterable(fields), "}"]


@dataclass(frozen=True)
class Form:
    """How the model of a *checkpoint* writes a call, and an answer after *thinking*; *result* begins each result."""

    checkpoint: str
    call: Callable[[Call], list[str]]
    thinking: tuple[str, ...] = ()
    result: str = "<tool_response>\n"


FORMS: Mapping[str, Form] = {
    "QWEN3_VL": Form("qwen3_vl", _hermes),
    "QWEN3_5": Form("qwen3_5", _qwen3_coder, ("Done.", "</think>", "\n\n")),
    "GEMMA4": Form("gemma4_e2b", _gemma4, result="<|tool_response>response:"),
}


def play(gateway: scripted.Gateway, form: Form, folder: Path) -> None:
    """Have the worker of *gateway* do the task in *folder*, a turn for each request."""
    generate = gateway.worker.generate

    def play_turn(request: EngineRequest, sink: Sink, chat: object) -> Stream:
        prompt = gateway.tokenizer.decode(request.token_ids)
        turns = next((calls(folder) for name, calls in CALLS.items() if name in prompt), [])
        number = prompt.count(form.result)
        pieces = form.call(turns[number]) if number < len(turns) else [*form.thinking, SAYS]
        if number > IMAGE_TURN and not request.media:
            pieces = [*form.thinking, "The image has not come."]
        gateway.answer_pieces(*pieces)
        return generate(request, sink, chat)

    gateway.worker.generate = play_turn  # type: ignore[method-assign]


@contextlib.contextmanager
def agent_gateways(folder: Path) -> Iterator[dict[str, str]]:
    """Run a gateway for each form; yield its root as programs find it in their environment."""
    task = folder / "task"
    task.mkdir()
    with contextlib.ExitStack() as running:
        roots = {}
        for name, form in FORMS.items():
            model = folder / form.checkpoint
            model.mkdir()
            CHECKPOINTS[form.checkpoint](model)
            gateway = running.enter_context(scripted.running(model, max_model_len=CONTEXT))
            play(gateway, form, task)
            roots[f"AGENT_{name}_ROOT"] = f"http://127.0.0.1:{gateway.port}"
        yield {
            **roots,
            "AGENT_PAGE": str(PAGE),
            "AGENT_FOLDER": str(task),
            "AGENT_BEFORE": BEFORE,
            "AGENT_AFTER": AFTER,
            "AGENT_SAYS": SAYS,
        }
