"""A prefill engine and a decode engine answer as one engine does, for every checkpoint. [eng] 40"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import engines
import msgspec
import pytest
import splits
from checkpoints import NETWORKS
from references.networks import ORACLES

from saccade.protocol.request import EngineRequest

pytestmark = pytest.mark.ci

EVERYDAY = ("qwen3_vl", "qwen3_5", "kimi_k25")
"""Keys and values; with recurrent states; latents."""

PROMPTS: dict[str, list[Any]] = {
    "text": [37],
    "text of whole blocks": [48],
    "two images": [3, ((96, 160), 2), 6, ((320, 64), 3), 8],
    "image last": [40, ((96, 96), 5)],
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
    several = engines.request(folder, PROMPTS["two images"], "several", 9, max_tokens=6, temperature=1.2, seed=3)
    return [*greedy, msgspec.structs.replace(several, num_samples=3)]


@pytest.mark.parametrize("name", CASES)
def test_two_engines_answer_as_one(network_folder: Callable[[str], Path], name: str) -> None:
    """Bit for bit while each computes one request at a time; together, as the family's float32 allows.

    Beside other requests a row's sums are added in another order, and which requests share a step depends on time.
    """
    folder = network_folder(name)
    requests = asked(folder)
    single = engines.engine(folder, num_blocks=512)
    expected = {key: answer for one in requests for key, answer in engines.drain(single, one).answers.items()}
    with splits.pair_of(folder, num_blocks=512) as pair:
        for one in requests:
            check(pair.answers(one), expected, one, "", atol=0)
        computed = pair.decode.load().step_tokens_total
        together = pair.answers(
            *(msgspec.structs.replace(one, request_id=f"{one.request_id} again") for one in requests)
        )
        for one in requests:
            check(together, expected, one, " again", ORACLES[name].atol)
        assert pair.decode.load().encoded_items_total == 0
        assert computed == sum(len(answer.token_ids) - 1 for answer in expected.values()), (
            "the decode engine computed a prompt"
        )
        assert pair.decode.load().step_tokens_total == 2 * computed, "the decode engine computed a prompt"
    assert not pair.second.released


def check(
    answers: Mapping[str, engines.Answer],
    expected: Mapping[str, engines.Answer],
    request: EngineRequest,
    suffix: str,
    atol: float,
) -> None:
    """Each sample of *request* has the same tokens and end, and log probabilities at most *atol* apart."""
    for sample in splits.names(request):
        got = answers[sample.replace(request.request_id, request.request_id + suffix)]
        one = expected[sample]
        assert (got.token_ids, got.finish_reason, got.failure) == (one.token_ids, one.finish_reason, None)
        for ours, theirs in ((got.logprobs, one.logprobs), (got.prompt_logprobs, one.prompt_logprobs)):
            assert [each.logprob for each in ours] == pytest.approx([each.logprob for each in theirs], rel=0, abs=atol)
