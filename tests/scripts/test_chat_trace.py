"""A chat takes no longer way through the gateway than its budget allows. # F14"""

import chat_trace
import pytest

pytestmark = pytest.mark.ci


def test_chat_stays_within_its_budget() -> None:
    preparation, answer = chat_trace.trace()
    assert chat_trace.passed_budgets(preparation, answer) == []
    assert any("decode_pool" in file for file in preparation.files), "the image was not prepared"
    assert all(phase.num_calls for phase in answer), "a delta was not followed"


def test_longer_way_passes_the_budget() -> None:
    calls = chat_trace.Phase(num_calls=1000)
    functions = chat_trace.Phase(functions={("gateway/chat.py", "read", line) for line in range(500)})
    for longer in (calls, functions):
        assert len(chat_trace.passed_budgets(longer, [longer, longer, longer])) == 2


def test_budget_leaves_a_tenth() -> None:
    budget = chat_trace.Budget(functions=20, calls=100)
    assert budget.allows(chat_trace.Phase(num_calls=110))
    assert not budget.allows(chat_trace.Phase(num_calls=111))
