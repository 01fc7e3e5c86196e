"""Tokens that are proposed and verified together are answered as one by one, by every family."""

from pathlib import Path

import engines
import pytest
from oracle_checks import PROMPTS

NGRAM = '{"method": "ngram", "num_speculative_tokens": 4}'


@pytest.mark.aspect("drafts")
@pytest.mark.sampled(1)
@pytest.mark.conformance
@pytest.mark.parametrize("wrong", [0, 2, 3])
def test_proposals_change_no_token(folder: Path, wrong: int) -> None:
    asked = [
        engines.request(folder, parts, f"{name} {temperature}", max_tokens=40, temperature=temperature, seed=number)
        for number, (name, parts) in enumerate(PROMPTS.items())
        for temperature in (0.0, 1.0)
    ]
    known = engines.drain(engines.engine(folder), *asked).answers
    subject = engines.speculating(
        engines.engine(folder, speculative_config=NGRAM, state_snapshot_blocks=1), known, wrong
    )
    found = engines.drain(engines.poison(subject), *asked).answers
    assert {name: answer.token_ids for name, answer in found.items()} == {
        name: answer.token_ids for name, answer in known.items()
    }
    load = subject.load()
    assert load.draft_tokens_total > load.accepted_tokens_total > 0 if wrong else load.accepted_tokens_total > 100
