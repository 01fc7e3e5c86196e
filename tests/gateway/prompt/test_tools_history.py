"""Calls and results of earlier turns are written by the model's template, or refused. F13"""

from typing import Any

import pytest
from tables import table

from saccade.errors import UnsupportedParameter
from saccade.gateway.prompt.tools import check_history, place_result_images
from saccade.tokenization.chat_template import ChatTemplate

WRITES_ALL = "{% for m in messages %}{{ m.role }}: {{ m.content }} {{ m.tool_calls or '' }}\n{% endfor %}"
FIRST_CALL_ONLY = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }} {{ m.tool_calls[0] if m.tool_calls }}\n{% endfor %}"
)
NO_CALLS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
NO_RESULTS = WRITES_ALL.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}")
RAISES = "{% for m in messages %}{% if m.tool_calls %}{{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor %}"
FUNCTION = {"name": "f", "arguments": {}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": FUNCTION}]}
HISTORY: list[Any] = [{"role": "user", "content": "a"}, CALLING, {"role": "tool", "tool_call_id": "a", "content": "b"}]


@pytest.mark.parametrize("source", [WRITES_ALL, RAISES])
def test_template_that_writes_or_refuses_calls_decides(source: str) -> None:
    check_history(HISTORY, ChatTemplate(source, [], {}))


@pytest.mark.parametrize(
    ("source", "field"),
    [
        (NO_CALLS, "messages[1].tool_calls"),
        (FIRST_CALL_ONLY, "messages[1].tool_calls"),
        (NO_RESULTS, "messages[2].role"),
    ],
)
def test_calls_that_a_template_would_lose_are_refused(source: str, field: str) -> None:
    template = ChatTemplate(source, [], {})
    with pytest.raises(UnsupportedParameter) as raised:
        check_history(HISTORY, template)
    assert raised.value.param == field
    check_history(HISTORY[:1], template)


IMAGE, VIDEO = {"type": "image"}, {"type": "video"}
PARTS = "{% for p in m.content %}{{ '<pad>' if p.type == 'image' else p.text }}{% endfor %}"
WRITES_IMAGES = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}{% endfor %}"
)
TEXT_RESULTS = WRITES_IMAGES.replace("m.content is string", "m.content is string or m.role == 'tool'")
REFUSES = WRITES_IMAGES.replace(PARTS, "{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}" + PARTS)


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def result(*parts: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "a", "content": parts[0] if isinstance(parts[0], str) else list(parts)}


def turn(role: str, *parts: Any) -> dict[str, Any]:
    return {"role": role, "content": parts[0] if isinstance(parts[0], str) else list(parts)}


@table(
    "source, loses",
    [(WRITES_IMAGES, False), (TEXT_RESULTS, True), (REFUSES, True)],
    ["writes them", "writes parts as they are", "refuses them"],
)
def test_template_may_lose_images_of_results(source: str, loses: bool) -> None:
    assert ChatTemplate(source, ["<pad>"], {}).loses_result_images == loses


@table(
    "messages, placed",
    [
        ([result(text("b"), IMAGE, text("c"))], [result("b\nc"), turn("user", IMAGE)]),
        ([result(IMAGE), turn("user", "d")], [result(""), turn("user", IMAGE, text("d"))]),
        (
            [result(VIDEO), turn("assistant", "d"), turn("user", IMAGE)],
            [result(""), turn("user", VIDEO), turn("assistant", "d"), turn("user", IMAGE)],
        ),
        (
            [result(IMAGE), result("e"), result(VIDEO), turn("user", IMAGE)],
            [result(""), result("e"), result(""), turn("user", IMAGE, VIDEO, IMAGE)],
        ),
        ([result(text("b"))], [result(text("b"))]),
    ],
    ["last", "before the user's turn", "before the assistant's turn", "two results", "no image"],
)
def test_images_of_results_go_to_the_next_turn_of_the_user(messages: Any, placed: Any) -> None:
    assert place_result_images(messages, ChatTemplate(TEXT_RESULTS, ["<pad>"], {})) == placed
    assert place_result_images(messages, ChatTemplate(WRITES_IMAGES, ["<pad>"], {})) == messages
