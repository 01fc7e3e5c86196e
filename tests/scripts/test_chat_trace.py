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
    longer = chat_trace.Phase([(f"gateway/{number}.py", ["f"]) for number in range(400)], 400)
    assert len(chat_trace.passed_budgets(longer, [longer, longer, longer])) == 2
