"""A chat takes no longer way through the gateway than its budget allows. # F14"""

import inspect
from collections.abc import Callable

import chat_trace
import pytest

from saccade.gateway import parameters
from saccade.gateway.apis.chat.wire import ChatCompletionChunk
from saccade.gateway.apis.chat.writer import ChatCompletionEvents
from saccade.gateway.chat import Chat

pytestmark = pytest.mark.ci


def test_chat_stays_within_its_budget() -> None:
    preparation, answer = chat_trace.trace()
    assert chat_trace.passed_budgets(preparation, answer) == []
    assert any("decode_pool" in file for file in preparation.files), "the image was not prepared"
    assert all(phase.num_calls for phase in answer), "a delta was not followed"


def test_longer_way_passes_the_budget() -> None:
    calls = chat_trace.Phase(num_calls=1000)
    functions = chat_trace.Phase(functions={("gateway/chat.py", "read", line) for line in range(1000, 1500)})
    for longer in (calls, functions):
        assert len(chat_trace.passed_budgets(longer, [longer, longer, longer])) == 2


def test_budget_leaves_a_fiftieth() -> None:
    budget = chat_trace.Budget(functions=50, calls=100, values=0)
    assert budget.allows(chat_trace.Phase(num_calls=102))
    assert not budget.allows(chat_trace.Phase(num_calls=103))


def test_values_messages_and_stateful_objects_are_told_apart() -> None:
    built = chat_trace.built(map(_entered, (Chat.of_plain, ChatCompletionEvents.__init__)))
    assert (built.values, built.messages) == ({Chat}, {ChatCompletionChunk})
    assert [one.__name__ for one in built.stateful] == ["_TextEvents"]
    assert not chat_trace.Budget(functions=3, calls=3, values=0).allows(
        chat_trace.Phase(functions={_entered(Chat.of_plain)})
    )


def test_errors_are_no_values() -> None:
    built = chat_trace.built([_entered(parameters.check_stream)])
    assert built == chat_trace.Built(frozenset(), frozenset(), frozenset())


def _entered(function: Callable[..., object]) -> tuple[str, str, int]:
    """Return *function* as the tracer notes it."""
    code = inspect.unwrap(function).__code__
    return code.co_filename.removeprefix(chat_trace.SOURCE), code.co_qualname, code.co_firstlineno
