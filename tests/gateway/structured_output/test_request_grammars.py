"""Grammars are tried once and kept."""

import asyncio

import pytest

from saccade.errors import InternalError
from saccade.gateway.structured_output import trial
from saccade.gateway.structured_output.constraint import Constraint
from saccade.gateway.structured_output.grammars import RequestGrammars


# F13
def test_a_trial_that_fails_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = RequestGrammars()
    constraint = Constraint("regex", "[ab]+", "guided_regex")

    async def run() -> None:
        with monkeypatch.context() as broken:
            broken.setattr(trial, "PROGRAM", "saccade.gateway.no_such_module")
            with pytest.raises(InternalError):
                await grammars.of(constraint)
        held = await grammars.of(constraint)
        assert (held.grammar.kind, held.grammar.text) == ("regex", "[ab]+")

    asyncio.run(run())
    grammars.close()
