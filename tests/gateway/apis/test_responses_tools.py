"""Tools and histories of Responses as agents send them: functions for the model, the client's own items back. F13"""

import json
from typing import Any

import openai
import scripted
from tables import table

PATH = "/v1/responses"
QUESTION = {"role": "user", "content": "hi"}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
SHELL = {"type": "local_shell"}
SPACE = {"type": "namespace", "name": "mcp__disk", "description": "Of the disk.", "tools": [LOOK, PATCH]}
ENDED = {**SPACE, "name": "mcp__disk__"}
HOSTED = (
    "web_search", "web_search_preview", "file_search", "image_generation", "mcp", "tool_search", "code_interpreter",
    "computer_use_preview", "shell", "apply_patch",
)  # fmt: skip


def ask(gateway: scripted.Gateway, *calls: tuple[str, Any], stream: bool = False, **body: Any) -> Any:
    """Return the answer of a model that writes *calls*: whole, or its last event's and the types of all."""
    written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    pieces = [piece for call in written for piece in ("<tool_call>", call, "</tool_call>")]
    gateway.answer_pieces(*(pieces or ["Yes"]))
    answer = gateway.ask("POST", PATH, {"model": "tiny", "input": "hi", "stream": stream, **body})
    assert answer.status == 200, answer.body
    return answer


def prompt_of(gateway: scripted.Gateway) -> str:
    return gateway.tokenizer.decode(gateway.worker.requests[-1].token_ids)


CALLS: dict[str, tuple[Any, str, Any, dict[str, Any]]] = {
    "function": (LOOK, "look", {"at": 1}, {"type": "function_call", "name": "look", "arguments": '{"at": 1}'}),
    "custom": (
        PATCH, "apply_patch", {"input": 'a\n"b"'},
        {"type": "custom_tool_call", "name": "apply_patch", "input": 'a\n"b"'},
    ),
    "custom without its object": (
        PATCH, "apply_patch", {"patch": "a"},
        {"type": "custom_tool_call", "name": "apply_patch", "input": '{"patch": "a"}'},
    ),
    "function of a namespace": (
        SPACE, "mcp__disk__look", {},
        {"type": "function_call", "name": "look", "namespace": "mcp__disk", "arguments": "{}"},
    ),
    "custom of a namespace": (
        SPACE, "mcp__disk__apply_patch", {"input": "a"},
        {"type": "custom_tool_call", "name": "apply_patch", "namespace": "mcp__disk", "input": "a"},
    ),
    "namespace that ends in lines": (
        ENDED, "mcp__disk__look", {},
        {"type": "function_call", "name": "look", "namespace": "mcp__disk__", "arguments": "{}"},
    ),
    "local shell": (
        SHELL, "local_shell", {"command": ["ls", "-l"], "timeout_ms": 9},
        {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls", "-l"], "timeout_ms": 9}},
    ),
    "local shell with a text": (
        SHELL, "local_shell", {"command": "ls -l"},
        {"type": "local_shell_call", "action": {"type": "exec", "command": ["sh", "-c", "ls -l"]}},
    ),
}  # fmt: skip


@table("name", CALLS)
@table("as_item", [False, True], ["in tools", "in an item"])
def test_calls_come_back_as_the_clients_tools(name: str, as_item: bool, gateway: scripted.Gateway) -> None:
    tool, function, arguments, expected = CALLS[name]
    body: dict[str, Any] = {"tools": [LOOK, tool] if tool is not LOOK else [tool]}
    if as_item:
        body = {"input": [{"type": "additional_tools", "role": "developer", "tools": body["tools"]}, QUESTION]}
    answer = ask(gateway, (function, arguments), **body).json
    [item] = answer["output"]
    action = item.get("action", {})
    item["action"] = {key: value for key, value in action.items() if value}
    assert {key: item[key] for key in expected} == expected
    assert ("namespace" in item) == ("namespace" in expected)
    # The history with this item and its result has the same call.
    kind = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
    result = {"type": kind.get(item["type"], "local_shell_call_output"), "call_id": item["call_id"], "output": "done"}
    history = [QUESTION, {**item, "action": action} if action else item, result]
    before = [body["input"][0]] if as_item else []
    assert ask(gateway, **{**body, "input": before + history}).json["output"][0]["type"] == "message"
    prompt = prompt_of(gateway)
    assert f'"name": "{function}"' in prompt.split("<|im_start|>assistant")[1]
    assert "<tool_response>\ndone\n</tool_response>" in prompt


@table("name", CALLS)
def test_events_of_calls(name: str, gateway: scripted.Gateway) -> None:
    tool, function, arguments, expected = CALLS[name]
    gateway.answer_pieces("<tool_call>", json.dumps({"name": function, "arguments": arguments}), "</tool_call>")
    with gateway.client() as client:
        tools: Any = [tool]
        events = list(client.responses.create(model="tiny", input="hi", tools=tools, stream=True))
    of_call = [event for event in events if "item" in event.type or "call" in event.type]
    kinds = {"function_call": "function_call_arguments", "custom_tool_call": "custom_tool_call_input"}
    kind = kinds.get(expected["type"])
    middle = [f"response.{kind}.delta", f"response.{kind}.done"] if kind else []
    assert [one.type for one in of_call] == ["response.output_item.added", *middle, "response.output_item.done"]
    first, last = of_call[0].to_dict()["item"], of_call[-1].to_dict()["item"]
    assert (first["status"], last["status"]) == ("in_progress", "completed")  # type: ignore[index]
    assert isinstance(events[-1], openai.types.responses.ResponseCompletedEvent)
    assert events[-1].response.output[0].to_dict() == last
    text = expected.get("arguments", expected.get("input"))
    assert [event.to_dict()["delta"] for event in of_call if event.type.endswith("delta")] == ([text] if kind else [])


@table("kind", HOSTED)
def test_tools_that_a_server_runs_are_left_out(kind: str, gateway: scripted.Gateway) -> None:
    answer = ask(gateway, tools=[{"type": kind, "name": kind, "size": 3}, LOOK])
    assert answer.headers["x-saccade-warning"] == f"tools that a server runs are left out: {kind}"
    assert [tool["type"] for tool in answer.json["tools"]] == [kind, "function"]
    assert kind not in prompt_of(gateway)
    assert "look" in prompt_of(gateway)
    refused = gateway.ask("POST", PATH, {"input": "hi", "tools": [{"type": kind}], "tool_choice": {"type": kind}})
    assert (refused.status, refused.json["error"]["param"]) == (400, "tool_choice.type")


def test_a_namespace_without_tools_is_left_out_by_its_name(gateway: scripted.Gateway) -> None:
    empty = {"type": "namespace", "name": "mcp__disk", "description": "Of the disk.", "tools": []}
    answer = ask(gateway, tools=[empty, LOOK])
    assert answer.headers["x-saccade-warning"] == "namespaces without tools are left out: mcp__disk"


def test_all_that_is_told_of_a_tool_reaches_the_model(gateway: scripted.Gateway) -> None:
    ask(gateway, tools=[SPACE])
    for text in ("Of the disk.", "Edits files.", "start: /.+/"):
        assert text in prompt_of(gateway)


@table(
    "allowed, mode, declared",
    [
        ([LOOK], "auto", ["look"]),
        ([{"type": "custom", "name": "apply_patch"}, SHELL], "auto", ["apply_patch", "local_shell"]),
        ([{"type": "function", "name": "look", "namespace": "mcp__disk"}], "auto", ["mcp__disk__look"]),
        ([{"type": "web_search"}], "auto", []),
    ],
)
def test_allowed_tools_are_the_declared_ones(
    allowed: list[Any], mode: str, declared: list[str], gateway: scripted.Gateway
) -> None:
    choice = {"type": "allowed_tools", "mode": mode, "tools": allowed}
    ask(gateway, tools=[LOOK, PATCH, SHELL, SPACE, {"type": "web_search"}], tool_choice=choice)
    prompt = prompt_of(gateway)
    names = ("look", "apply_patch", "local_shell", "mcp__disk__look", "mcp__disk__apply_patch")
    assert [name for name in names if f'"name": "{name}"' in prompt.partition("<tools>\n")[2]] == declared


ACTION = {"type": "exec", "command": ["ls"]}
CALL = {"type": "local_shell_call", "call_id": "c", "action": ACTION}
LOOKED = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
PATCHED = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "a"}
IN_SPACE = "tools[0].tools[0]"


def tools(*declared: Any, **fields: Any) -> dict[str, Any]:
    return {"tools": [*declared], **fields}


def chosen(**fields: Any) -> dict[str, Any]:
    return {"tools": [LOOK, SHELL], "tool_choice": fields}


def allowed_tool(tool: Any) -> dict[str, Any]:
    return chosen(type="allowed_tools", mode="auto", tools=[tool])


def history(*items: Any) -> dict[str, Any]:
    return {"input": [QUESTION, *items]}


def added(declared: Any) -> dict[str, Any]:
    return history({"type": "additional_tools", "role": "developer", "tools": declared})


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "type": (tools({"type": 3}), "tools[0].type"),
    "no type": (tools({"name": "a"}), "tools[0].type"),
    "tool that is none": (tools(3), "tools[0]"),
    "name of a function": (tools({**LOOK, "name": 3}), "tools[0].name"),
    "description of a function": (tools({**LOOK, "description": 3}), "tools[0].description"),
    "empty description of a function": (tools({**LOOK, "description": []}), "tools[0].description"),
    "parameters of a function": (tools({**LOOK, "parameters": []}), "tools[0].parameters"),
    "strict of a function": (tools({**LOOK, "strict": "yes"}), "tools[0].strict"),
    "description of a custom tool": (tools({**PATCH, "description": 0}), "tools[0].description"),
    "format of a custom tool": (tools({**PATCH, "format": "text"}), "tools[0].format"),
    "grammar of a custom tool": (tools({**PATCH, "format": {"type": "grammar", "syntax": "lark"}}), "tools[0].format"),
    "name of a namespace": (tools({**SPACE, "name": None}), "tools[0].name"),
    "description of a namespace": (tools({**SPACE, "description": 3}), "tools[0].description"),
    "tools of a namespace": (tools({**SPACE, "tools": {}}), "tools[0].tools"),
    "tool of a namespace": (tools({**SPACE, "tools": [3]}), "tools[0].tools"),
    "type in a namespace": (tools({**SPACE, "tools": [SHELL]}), f"{IN_SPACE}.type"),
    "name in a namespace": (tools({**SPACE, "tools": [{**LOOK, "name": {}}]}), f"{IN_SPACE}.name"),
    "description in a namespace": (tools({**SPACE, "tools": [{**LOOK, "description": 3}]}), f"{IN_SPACE}.description"),
    "added tools": (added({}), "input[1].tools"),
    "added tool": (added([LOOK, 3]), "input[1].tools[1]"),
    "name of an added tool": (added([{**LOOK, "name": ""}]), "input[1].tools[0].name"),
    "added tools of brackets": (added([{**LOOK, "parameters": {"a": [0] * 100_001}}]), "input[1].tools"),
    "added tools of many bytes": (added([{**LOOK, "description": "a" * 2**20}]), "input[1].tools"),
    "added tools of two items": (
        history(*[{"type": "additional_tools", "tools": [{**LOOK, "description": "a" * 2**19}]}] * 2), "input[1].tools"
    ),
    "choice": (chosen(type=3), "tool_choice"),
    "name of the choice": (chosen(type="function", name=3), "tool_choice"),
    "namespace of the choice": (chosen(type="function", name="look", namespace=3), "tool_choice"),
    "mode of allowed tools": (chosen(type="allowed_tools", mode=3, tools=[]), "tool_choice"),
    "allowed tools": (chosen(type="allowed_tools", mode="auto", tools={}), "tool_choice"),
    "allowed tool": (allowed_tool(3), "tool_choice.tools[0]"),
    "type of an allowed tool": (allowed_tool({"type": [], "name": "look"}), "tool_choice.tools[0]"),
    "name of an allowed tool": (allowed_tool({"type": "function", "name": ["look"]}), "tool_choice.tools[0]"),
    "namespace of an allowed tool": (allowed_tool({**LOOK, "namespace": {}}), "tool_choice.tools[0]"),
    "arguments of a call": (history({**LOOKED, "arguments": {}}), "input[1].arguments"),
    "name of a call": (history({**LOOKED, "name": 3}), "input[1].name"),
    "namespace of a call": (history({**LOOKED, "namespace": []}), "input[1].namespace"),
    "id of a call": (history({**LOOKED, "call_id": 3}), "input[1].call_id"),
    "no id of a custom call": (history({**PATCHED, "call_id": None}), "input[1].call_id"),
    "input of a custom call": (history({**PATCHED, "input": {}}), "input[1].input"),
    "action of a shell call": (history({**CALL, "action": "ls"}), "input[1].action"),
    "no command of a shell call": (history({**CALL, "action": {"type": "exec"}}), "input[1].action.command"),
    "command of a shell call": (history({**CALL, "action": {**ACTION, "command": "ls"}}), "input[1].action.command"),
    "word of a shell call": (history({**CALL, "action": {**ACTION, "command": [3]}}), "input[1].action.command[0]"),
    "timeout of a shell call": (history({**CALL, "action": {**ACTION, "timeout_ms": "9"}}), "input[1].action.timeout_ms"),
    "folder of a shell call": (
        history({**CALL, "action": {**ACTION, "working_directory": {}}}), "input[1].action.working_directory"
    ),
    "output of a call": (history(LOOKED, {"type": "function_call_output", "call_id": "c", "output": {}}), "input[2].output"),
    "part of an output": (
        history(LOOKED, {"type": "function_call_output", "call_id": "c", "output": [3]}), "input[2].output[0]"
    ),
    "no id of an output": (history(LOOKED, {"type": "custom_tool_call_output", "output": ""}), "input[2].call_id"),
}  # fmt: skip


@table("name", WRONG)
def test_wrong_shapes_are_refused_by_name(name: str, gateway: scripted.Gateway) -> None:
    body, param = WRONG[name]
    gateway.answer_two_tokens()
    answer = gateway.ask("POST", PATH, {"model": "tiny", "input": "hi", **body})
    error = answer.json["error"]
    assert (answer.status, error["param"]) == (400, param), error
    assert f"`{param}`" in error["message"]
    assert error["message"].endswith(".")


ITEMS = (
    {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "q"}},
    {"type": "file_search_call", "id": "f", "queries": ["q"], "results": None, "status": "completed"},
    {"type": "image_generation_call", "id": "i", "result": None, "status": "completed"},
    {"type": "code_interpreter_call", "id": "c", "code": "1", "outputs": [], "container_id": "x"},
    {"type": "mcp_list_tools", "id": "l", "server_label": "s", "tools": [{"name": "a", "input_schema": {}}]},
    {"type": "mcp_call", "id": "m", "server_label": "s", "name": "a", "arguments": "{}", "output": "b", "error": None},
    {"type": "computer_call", "id": "c", "call_id": "d", "action": {"type": "wait"}, "pending_safety_checks": []},
    {"type": "computer_call_output", "call_id": "d", "output": {"type": "computer_screenshot", "image_url": "x"}},
    {"type": "tool_search_call", "call_id": "t", "execution": "client", "arguments": {"query": "q"}},
    {"type": "tool_search_output", "call_id": "t", "execution": "client", "tools": [LOOK], "status": "completed"},
    {"type": "compaction", "id": "cmp", "encrypted_content": "x"},
    {"type": "item_reference", "id": "msg_1"},
)


@table("item", ITEMS, [item["type"] for item in ITEMS])
def test_items_that_no_template_writes_are_skipped(item: dict[str, Any], gateway: scripted.Gateway) -> None:
    answer = ask(gateway, input=[QUESTION, item, {"role": "user", "content": "there"}])
    assert answer.headers["x-saccade-warning"] == f"items are left out: {item['type']}"
    assert "there" in prompt_of(gateway)


@table(
    "fields, warning",
    [
        ({"truncation": "auto"}, "`truncation` has no effect: a conversation that does not fit is refused"),
        ({"text": {"verbosity": "low"}}, "`text.verbosity` has no effect: chat templates know no verbosity"),
        ({"truncation": "disabled", "text": {"verbosity": "medium"}, "reasoning": {"summary": "none"}}, None),
        ({"context_management": [{"type": "compaction", "compact_threshold": 9}]}, None),
    ],
)
def test_settings_that_nothing_obeys(fields: dict[str, Any], warning: str | None, gateway: scripted.Gateway) -> None:
    assert ask(gateway, **fields).headers.get("x-saccade-warning") == warning
