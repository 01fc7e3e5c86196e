"""Grammars are tried once, kept, and tried in turns that are fair between clients."""

import asyncio
import json
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from grammar_trials import children
from waiting import until

from saccade.errors import InternalError, QueueFull
from saccade.gateway.limited_child import ChildLimits
from saccade.gateway.structured_output import trial
from saccade.gateway.structured_output.constraint import Constraint
from saccade.gateway.structured_output.grammars import MAX_WAITING, TRIALS_OF_A_CLIENT, RequestGrammars
from saccade.gateway.structured_output.trial import LIMITS, NICENESS

SHORT = Constraint("regex", "[ab]+", "guided_regex")


def endless(number: int) -> Constraint:
    """Takes minutes to compile: each part doubles the states."""
    letters = "abcdefghijklmnopqrstuv"
    schema = {"allOf": [{"type": "string", "pattern": f".*{letter}.*{number}"} for letter in letters]}
    return Constraint("json_schema", json.dumps(schema), "response_format.json_schema.schema")


@pytest_asyncio.fixture
async def grammars() -> AsyncIterator[RequestGrammars]:
    """Grammars whose trials may take a minute of the CPU."""
    subject = RequestGrammars(ChildLimits(60, LIMITS.memory_bytes))
    yield subject
    subject.close()


def asking(grammars: RequestGrammars, constraint: Constraint, client: str) -> asyncio.Task[object]:
    return asyncio.create_task(grammars.grammar_of(constraint, client.encode(), client))


async def leave(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# F13
def test_a_trial_that_fails_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = RequestGrammars()

    async def run() -> None:
        with monkeypatch.context() as broken:
            broken.setattr(trial, "PROGRAM", "saccade.gateway.no_such_module")
            with pytest.raises(InternalError):
                await grammars.grammar_of(SHORT)
        held = await grammars.grammar_of(SHORT)
        assert (held.grammar.kind, held.grammar.text) == ("regex", "[ab]+")

    asyncio.run(run())
    grammars.close()


async def test_a_client_that_goes_away_does_not_end_the_trial_of_others(grammars: RequestGrammars) -> None:
    gone, stays = (asking(grammars, SHORT, "a") for _ in range(2))
    await asyncio.sleep(0)
    await leave(gone)
    await stays


async def test_trial_without_waiters_is_ended(grammars: RequestGrammars) -> None:
    both = [asking(grammars, endless(1), "a") for _ in range(2)]
    await until(children)
    (child,) = children()
    await until(lambda: child.nice() == min(19, os.nice(0) + NICENESS))
    await leave(both[0])
    assert child.is_running()
    await leave(both[1])
    await until(lambda: not child.is_running())


async def test_one_client_does_not_keep_others_waiting(grammars: RequestGrammars) -> None:
    evil = [asking(grammars, endless(number), "evil") for number in range(TRIALS_OF_A_CLIENT + MAX_WAITING)]
    await until(lambda: len(children()) == TRIALS_OF_A_CLIENT)
    refused = [task for task in evil if task.done()]
    assert len(refused) == MAX_WAITING // 4
    with pytest.raises(QueueFull, match="share of the new grammars"):
        await refused[0]
    lab = asking(grammars, SHORT, "lab")
    # Its turn is there at once, although none of evil's ends.
    await lab
    assert len(children()) == TRIALS_OF_A_CLIENT
    await leave(*evil)
    await until(lambda: not children())


async def test_tenants_learn_nothing_of_one_anothers_grammars(
    grammars: RequestGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    await grammars.grammar_of(SHORT, b"salt of one")
    monkeypatch.setattr(trial, "PROGRAM", "saccade.gateway.no_such_module")
    await grammars.grammar_of(SHORT, b"salt of one")
    with pytest.raises(InternalError):
        await grammars.grammar_of(SHORT, b"salt of another")
