"""Calls and results of earlier turns are written by the model's template, or refused. F13"""

from typing import Any

import pytest

from saccade.errors import UnsupportedParameter
from saccade.gateway.prompt.tools import check_history
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
