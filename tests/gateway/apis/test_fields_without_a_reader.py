"""What a client says is obeyed, named in a warning or refused by its field, in each API. # F13"""

from typing import Any

import msgspec
import pytest
import scripted
from tables import table

from saccade.gateway import parameters
from saccade.gateway.apis import text_files
from saccade.gateway.apis.chat.reader import parse_chat
from saccade.gateway.apis.responses.conversation import read_conversation
from saccade.gateway.apis.responses.reader import parse_response
from saccade.gateway.prompt import media_parts
from saccade.gateway.prompt.media_options import NO_OPTIONS

CHATS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
COMPLETIONS, TOKENIZE, COUNT = "/v1/completions", "/tokenize", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
URL = "data:image/png;base64,aGk="
TEXT_FILE = "data:text/plain;base64,aGk="


def chat(*turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [*(turns or (USER,))], **fields}


def answered(**fields: Any) -> dict[str, Any]:
    return chat(USER, {"role": "assistant", "content": "yes", **fields}, USER)


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def allowed_in_responses(*tools: dict[str, Any]) -> dict[str, Any]:
    return {
        "input": "hi",
        "tools": [FUNCTION, {"type": "web_search"}, {"type": "local_shell"}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": list(tools)},
    }


def said(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}]}


def ask(gateway: scripted.Gateway, path: str, body: dict[str, Any]) -> scripted.Answer:
    fields = {"max_tokens": 9} if path == MESSAGES else {}
    return gateway.ask("POST", path, {"model": "tiny", **fields, **body})


@table(
    ("path", "body", "param"),
    [
        (CHATS, chat({**USER, "tool_call_id": "a"}), "messages[0].tool_call_id"),
        (CHATS, chat({"role": "system", "content": "a", "tool_call_id": "a"}, USER), "messages[0].tool_call_id"),
        (CHATS, answered(tool_call_id="a"), "messages[1].tool_call_id"),
        (TOKENIZE, chat({**USER, "tool_call_id": "a"}), "messages[0].tool_call_id"),
        (CHATS, chat({**USER, "tool_calls": [CALL]}), "messages[0].tool_calls"),
        (CHATS, chat({**USER, "reasoning": "a"}), "messages[0].reasoning"),
        (CHATS, chat({**USER, "refusal": "a"}), "messages[0].refusal"),
        (CHATS, answered(reasoning="a", reasoning_content="b"), "messages[1].reasoning"),
        (CHATS, chat(tools=[TOOL], tool_choice=allowed("g")), "tool_choice.allowed_tools.tools[0]"),
        (CHATS, chat(tools=[TOOL], tool_choice=allowed("f", "g")), "tool_choice.allowed_tools.tools[1]"),
        (CHATS, chat(tools=[TOOL], tool_choice=allowed("g", mode="required")), "tool_choice.allowed_tools.tools[0]"),
        (CHATS, chat(tool_choice=allowed("f")), "tool_choice.allowed_tools.tools[0]"),
        (RESPONSES, allowed_in_responses({"type": "function", "name": "g"}), "tool_choice.tools[0]"),
        (RESPONSES, allowed_in_responses(FUNCTION, {"type": "mcp"}), "tool_choice.tools[1]"),
        (RESPONSES, allowed_in_responses({**FUNCTION, "namespace": "n"}), "tool_choice.tools[0]"),
        (RESPONSES, said({"type": "input_image", "image_url": URL, "file_id": "a"}), "input[0].content[0].file_id"),
        (RESPONSES, said({"type": "input_file", "file_data": TEXT_FILE, "file_url": "a"}), "input[0].content[0].file_url"),
        (RESPONSES, said({"type": "input_file", "file_data": URL, "file_id": "a"}), "input[0].content[0].file_id"),
        (RESPONSES, said({"type": "input_file", "filename": "a"}), "input[0].content[0].file_data"),
        (CHATS, chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL, "detail": "low"}, "detail": "high"}]}), "messages[0].content[0].detail"),
        (CHATS, chat({"role": "user", "content": [{"type": "file", "file": {"file_data": TEXT_FILE}, "detail": "low"}]}), "messages[0].content[0].detail"),
        (RESPONSES, said({"type": "input_file", "file_data": TEXT_FILE, "detail": "low"}), "input[0].content[0].detail"),
        *((CHATS, chat(**{name: "a"}), name) for name in ("system", "instructions", "input", "prompt")),
        (CHATS, chat(system=[{"type": "text", "text": "a"}]), "system"),
        *((MESSAGES, chat(**{name: "a"}), name) for name in ("instructions", "input", "prompt")),
        *((COUNT, chat(**{name: "a"}), name) for name in ("instructions", "input", "prompt")),
        (RESPONSES, {"input": "a", "messages": [USER]}, "messages"),
        (RESPONSES, {"input": "a", "system": "b"}, "system"),
        *((COMPLETIONS, {"prompt": "a", name: "b"}, name) for name in ("system", "instructions", "input")),
        ("/invocations", chat(system="a"), "system"),
    ],
)  # fmt: skip
def test_what_would_be_lost_is_refused(path: str, body: dict[str, Any], param: str, gateway: scripted.Gateway) -> None:
    refused = ask(gateway, path, body)
    assert (refused.status, refused.json["error"]["param"]) == (400, param), refused.body
    assert f"`{param}`" in refused.json["error"]["message"] or "`detail`" in refused.json["error"]["message"]


@table(
    ("path", "body"),
    [
        (CHATS, chat({**USER, "tool_call_id": None, "tool_calls": [], "reasoning": None, "refusal": ""})),
        (CHATS, answered(reasoning="a\n", reasoning_content="a")),
        (CHATS, answered(reasoning="", reasoning_content="a")),
        (CHATS, chat(tools=[TOOL], tool_choice=allowed("f"))),
        (CHATS, chat(tools=[TOOL], tool_choice=allowed())),
        (CHATS, chat(system="", instructions=None, input=[], prompt="")),
        (RESPONSES, {"input": "a", "messages": [], "system": ""}),
        (CHATS, chat(reasoning_effort="none", enable_thinking=False)),
        (MESSAGES, chat(thinking={"type": "disabled"})),
    ],
)
def test_what_says_nothing_is_not_named(path: str, body: dict[str, Any], gateway: scripted.Gateway) -> None:
    answer = ask(gateway, path, body)
    assert (answer.status, answer.headers.get("x-saccade-warning")) == (200, None), answer.body


SHELL_CALL = {"type": "local_shell_call", "call_id": "a", "action": {"type": "exec", "command": ["ls"], "odd": 1}}


@table(
    ("path", "body", "named"),
    [
        (CHATS, chat(reasoning_effort="high"), "reasoning_effort"),
        *((CHATS, chat({"role": role, "content": "a", "name": "Bo"}, USER), "name") for role in ("system", "user")),
        (CHATS, answered(name="Bo"), "name"),
        (TOKENIZE, chat({**USER, "name": "Bo"}), "name"),
        (CHATS, chat(enable_thinking=True), "enable_thinking"),
        (CHATS, chat(chat_template_kwargs={"enable_thinking": True}), "chat_template_kwargs.enable_thinking"),
        (TOKENIZE, chat(reasoning_effort="low"), "reasoning_effort"),
        (TOKENIZE, chat(enable_thinking=True), "enable_thinking"),
        (TOKENIZE, chat(USER, {"role": "system", "content": "late"}), "system turns"),
        (RESPONSES, {"input": "hi", "reasoning": {"effort": "low"}}, "reasoning.effort"),
        (MESSAGES, chat(output_config={"effort": "low"}), "output_config.effort"),
        (MESSAGES, chat(thinking={"type": "enabled", "budget_tokens": 9}), "thinking.type"),
        (COUNT, chat(output_config={"effort": "max"}), "output_config.effort"),
        (RESPONSES, {"input": [USER, SHELL_CALL]}, "input[1].action.odd"),
        (RESPONSES, allowed_in_responses(FUNCTION, {"type": "web_search"}), "web_search"),
        (CHATS, chat({"role": "user", "content": [{"type": "text", "text": "a", "detail": "low"}]}), "messages[0].content[0].detail"),
    ],
)  # fmt: skip
def test_what_nothing_obeys_is_named(path: str, body: dict[str, Any], named: str, gateway: scripted.Gateway) -> None:
    answer = ask(gateway, path, body)
    assert answer.status == 200, answer.body
    assert named in answer.headers.get("x-saccade-warning", "")


@table("name", ["image_url", "image", "file"])
def test_detail_may_stand_beside_the_image(name: str) -> None:
    held: Any = {"file_data": URL} if name == "file" else URL
    body = msgspec.json.encode(chat({"role": "user", "content": [{"type": name, name: held, "detail": "low"}]}))
    request, warning = parse_chat(body)
    [part] = request.messages[0].content  # type: ignore[misc]
    assert not isinstance(part, str)
    assert (media_parts.image_source(part, "", NO_OPTIONS).options.detail, warning) == ("low", "")  # type: ignore[union-attr]


def test_all_of_a_shells_action_comes_back(gateway: scripted.Gateway) -> None:
    action = {
        "type": "exec",
        "command": ["ls"],
        "env": {"A": "1"},
        "user": "me",
        "timeout_ms": 5,
        "working_directory": "/x",
    }
    call = {"type": "local_shell_call", "call_id": "a", "action": action}
    answer = ask(gateway, RESPONSES, {"input": [USER, call], "tools": [{"type": "local_shell"}]})
    assert answer.status == 200, answer.body
    prompt = gateway.tokenizer.decode(gateway.worker.requests[-1].token_ids)
    [_, written] = prompt.split('{"name": "local_shell", "arguments": ')
    arguments = written.partition("}\n</tool_call>")[0]
    gateway.answer_pieces("<tool_call>", f'\n{{"name": "local_shell", "arguments": {arguments}}}\n', "</tool_call>")
    again = ask(gateway, RESPONSES, {"input": "hi", "tools": [{"type": "local_shell"}]})
    assert again.json["output"][0]["action"] == action


def test_reasoning_of_an_item_may_be_a_text() -> None:
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "content": "so"},
        {"role": "assistant", "content": "a"},
    ]
    request, _ = parse_response(msgspec.json.encode({"input": items}))
    assert read_conversation(request).chat.messages[1].reasoning_content == "so"


def test_a_body_for_invocations_is_searched_once(gateway: scripted.Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    searched = list[int]()
    check_bounds = parameters.check_bounds

    def counting(body: bytes | bytearray, find_image: parameters.FindImage = parameters.find_data_url) -> bytes:
        searched.append(len(body))
        return check_bounds(body, find_image)

    monkeypatch.setattr(parameters, "check_bounds", counting)
    for body in (chat(), {"prompt": "hi"}):
        assert ask(gateway, "/invocations", body).status == 200
    assert len(searched) == 2


@table(
    ("before", "num_decoded"),
    [({}, 0), ({"filename": "a.png"}, 0), ({"filename": '"file_data":"data:image'}, 0), ({"filename": "a" * 1024}, 1)],
)
def test_an_image_in_a_file_is_not_decoded_in_search_of_text(
    before: dict[str, str], num_decoded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = list[str]()
    decode = text_files.decode

    def noting(raw: Any, decoder: Any, name: str) -> Any:
        decoded.append(name)
        return decode(raw, decoder, name)

    monkeypatch.setattr(text_files, "decode", noting)
    for url in (URL, "data:application/pdf;base64,aGk="):
        for encode in (msgspec.json.encode, lambda body: msgspec.json.encode(body).replace(b"/", b"\\/")):
            decoded.clear()
            parse_chat(
                encode(chat({"role": "user", "content": [{"type": "file", "file": {**before, "file_data": url}}]}))
            )
            assert len(decoded) == num_decoded
    text = {"filename": '"file_data":"data:image/png', "file_data": TEXT_FILE}
    [part] = (
        parse_chat(msgspec.json.encode(chat({"role": "user", "content": [{"type": "file", "file": text}]})))[0]
        .messages[0]
        .content
    )  # type: ignore[misc]
    assert part.type == "text"  # type: ignore[union-attr]


@table("field", ["image_url", "video_url"])
def test_a_text_file_with_media_is_refused_as_a_file(field: str, gateway: scripted.Gateway) -> None:
    part = {"type": "file", "file": {"file_data": TEXT_FILE}, field: {"url": URL}}
    refused = ask(gateway, CHATS, chat({"role": "user", "content": [part]}))
    assert (refused.status, refused.json["error"]["param"]) == (400, f"messages[0].content[0].{field}")
    assert "a part of type `file`" in refused.json["error"]["message"]
