"""The chat template of Kimi-K3, beyond what the conformance suite compares."""

from typing import Any

import pytest
from tables import table

from saccade.errors import InvalidValue
from saccade.models.kimi_k3.template import TEMPLATE
from saccade.tokenization.chat_template import ChatTemplate

SPECIAL = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "<|media_pad|>")
CHAT = ChatTemplate(TEMPLATE, SPECIAL, {})
CALLS = [
    {"id": f"{name}_{number}", "type": "function", "function": {"name": name, "arguments": {}}}
    for number, name in enumerate("ab")
]
ASKED = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": CALLS}]


def result(call_id: str, text: str, **more: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text, **more}


def written(*messages: dict[str, Any], **switches: Any) -> str:
    return "".join(segment.text for segment in CHAT.render([*ASKED, *messages], True, switches))


@table(
    ("results", "tools"),
    [
        ([result("b_1", "B"), result("a_0", "A")], [("a", 1, "A"), ("b", 2, "B")]),
        ([result("x", "B"), result("a_0", "A")], [("a", 1, "B"), ("b", 2, "A")]),
        ([result("x", "B", name="c")], [("c", 1, "B")]),
    ],
)
def test_results_are_in_the_order_of_their_calls(results: list[Any], tools: list[tuple[str, int, str]]) -> None:
    expected = "".join(
        f'<|open|>message role="tool" tool="{name}" index="{index}"<|sep|>{text}<|close|>message<|sep|><|end_of_msg|>'
        for name, index, text in tools
    )
    assert expected in written(*results)


def test_a_result_without_a_call_is_refused() -> None:
    with pytest.raises(InvalidValue):
        written(*(result("x", "X") for _ in range(3)))


def test_a_required_call_is_asked_for_after_the_chat() -> None:
    asked = '<|open|>message role="system" type="tool-choice"<|sep|>The system is invoked with `tool_choice=required`.'
    assert asked in written(tool_choice="required")
    assert "tool-choice" not in written()


def test_effort_is_low_high_or_max() -> None:
    assert "thinking_effort=low`" in written(thinking_effort="low")
    assert "thinking_effort=max`" in written()
    assert "thinking_effort" not in written(thinking=False)
    with pytest.raises(InvalidValue):
        written(thinking_effort="medium")
