"""A prefill engine and a decode engine answer as one engine does, for every checkpoint. [eng] 40"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import msgspec
import pytest
import splits
from checkpoints import NETWORKS

from saccade.protocol.request import EngineRequest

EVERYDAY = ("qwen3_vl", "qwen3_5", "kimi_k25")
"""Keys and values; with recurrent states; latents."""

PROMPTS: dict[str, list[Any]] = {
    "text": [37],
    "text of whole blocks": [48],
    "two pictures": [3, ((96, 160), 2), 6, ((320, 64), 3), 8],
    "picture last": [40, ((96, 96), 5)],
}
CASES = [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.conformance) for name in NETWORKS]


def asked(folder: Path) -> list[EngineRequest]:
    """Greedy and drawn requests, with log probabilities, penalties and several samples."""
    params: list[dict[str, Any]] = [
        {"num_logprobs": 3},
        {"temperature": 1.0, "seed": 5, "presence_penalty": 0.7, "repetition_penalty": 1.2, "num_logprobs": 0},
        {"num_prompt_logprobs": 1},
    ]
    greedy = [
        engines.request(folder, parts, f"{name}, {number}", number, max_tokens=10, **params[number % len(params)])
        for number, (name, parts) in enumerate(PROMPTS.items())
    ]
    several = engines.request(folder, PROMPTS["two pictures"], "several", 9, max_tokens=6, temperature=1.2, seed=3)
    return [*greedy, msgspec.structs.replace(several, num_samples=3)]


@pytest.mark.parametrize("name", CASES)
def test_two_engines_answer_as_one(network_folder: Callable[[str], Path], name: str) -> None:
    folder = network_folder(name)
    requests = asked(folder)
    expected = engines.drain(engines.engine(folder, num_blocks=512), *requests).answers
    with splits.pair_of(folder, num_blocks=512) as pair:
        got = pair.answers(*requests)
        again = pair.answers(*(msgspec.structs.replace(one, request_id=f"{one.request_id} again") for one in requests))
        assert pair.decode.load().encoded_items_total == 0
        assert pair.decode.load().step_tokens_total == sum(len(answer.token_ids) - 1 for answer in again.values()), (
            "the decode engine computed a prompt"
        )
    assert not pair.second.released
    for one in requests:
        for sample in splits.names(one):
            check(got[sample], expected[sample])
            check(again[sample.replace(one.request_id, f"{one.request_id} again")], expected[sample])


def check(got: engines.Answer, expected: engines.Answer) -> None:
    """The same tokens, end and log probabilities."""
    assert (got.token_ids, got.finish_reason, got.failure) == (expected.token_ids, expected.finish_reason, None)
    for ours, theirs in ((got.logprobs, expected.logprobs), (got.prompt_logprobs, expected.prompt_logprobs)):
        assert len(ours) == len(theirs)
        assert [one.logprob for one in ours] == pytest.approx([one.logprob for one in theirs], abs=1e-4)
