"""What agents send and read in chats: reasoning under both names, damaged calls in a history, some tools of many. F13"""

from typing import Any

import scripted
from tables import table

CHATS = "/v1/chat/completions"
QUESTION = {"role": "user", "content": "hi"}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("look", "read")
]


def post(gateway: scripted.Gateway, path: str = CHATS, **body: Any) -> scripted.Answer:
    answer = gateway.ask("POST", path, {"model": "tiny", "messages": [QUESTION], **body})
    assert answer.status == 200, answer.body
    return answer


def prompt_of(gateway: scripted.Gateway) -> str:
    return gateway.tokenizer.decode(gateway.worker.requests[-1].token_ids)


@table("stream", [False, True])
@table("shows", [True, False])
def test_reasoning_has_both_names(stream: bool, shows: bool, gateway: scripted.Gateway) -> None:
    gateway.answer_pieces("<think>", "Hm", "</think>", "Yes")
    answer = post(gateway, stream=stream, include_reasoning=shows)
    if stream:
        turns = [choice["delta"] for event in answer.events[:-1] for choice in event["choices"]]
    else:
        turns = [choice["message"] for choice in answer.json["choices"]]
    names = [(turn.get("reasoning"), turn.get("reasoning_content")) for turn in turns]
    assert all(one == other for one, other in names)
    assert any(one for one, _ in names) == shows
    # A turn that has both is written once.
    whole = {"role": "assistant", "content": "Yes", "reasoning": "Hm", "reasoning_content": "Hm"}
    post(gateway, messages=[QUESTION, whole, QUESTION])


DAMAGED = ('{"at": ', "", "at it", "[1]", '"at"', "null", '{"at": 1}}', "<|im_end|>")


@table("arguments", DAMAGED)
@table("path", [CHATS, "/v1/responses"])
def test_a_damaged_call_does_not_end_a_conversation(path: str, arguments: str, gateway: scripted.Gateway) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c", "content": "not JSON"}
    body: dict[str, Any] = {"messages": [QUESTION, {"role": "assistant", "tool_calls": [call]}, result]}
    if path != CHATS:
        item = {"type": "function_call", "call_id": "c", "name": "look", "arguments": arguments}
        output = {"type": "function_call_output", "call_id": "c", "output": "not JSON"}
        body = {"messages": None, "input": [QUESTION, item, output]}
    post(gateway, path, **body)
    prompt = prompt_of(gateway)
    assert f'"arguments": {arguments or "{}"}' in prompt
    assert "not JSON" in prompt
    # The end of each turn, and no other.
    assert gateway.worker.requests[-1].token_ids.count(gateway.tokenizer.special_tokens["<|im_end|>"]) == 3


@table("names", [["look"], ["look", "read"], []])
def test_allowed_tools_are_the_declared_ones(names: list[str], gateway: scripted.Gateway) -> None:
    allowed = [tool for tool in TOOLS if tool["function"]["name"] in names]  # type: ignore[index]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": allowed}}
    post(gateway, tools=TOOLS, tool_choice=choice)
    declared = prompt_of(gateway).partition("<tools>\n")[2]
    assert [name for name in ("look", "read") if f'"name": "{name}"' in declared] == names


def test_allowed_tools_that_are_none_are_refused(gateway: scripted.Gateway) -> None:
    for allowed in ({"mode": "required", "tools": []}, {"mode": "some", "tools": []}, {"mode": "auto", "tools": [{}]}):
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        refused = gateway.ask("POST", CHATS, {"messages": [QUESTION], "tools": TOOLS, "tool_choice": choice})
        assert (refused.status, refused.json["error"]["param"]) == (400, "tool_choice")
