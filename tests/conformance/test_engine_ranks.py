"""Networks cut over processes answer as their oracles do."""

from pathlib import Path
from typing import Any

import engines
import msgspec
import pytest
from oracle_checks import PROMPTS, check
from references.networks import Oracle


@pytest.mark.aspect("TP")
@pytest.mark.sampled(2)
@pytest.mark.conformance
@pytest.mark.parametrize(
    "settings",
    [
        {"mm_encoder_tp_mode": "data"},
        {"mm_encoder_tp_mode": "data", "max_num_batched_tokens": 16},
        {"mm_encoder_tp_mode": "weights"},
        {"attention_tensor_parallel_size": 1, "max_num_batched_tokens": 16},
        {"attention_tensor_parallel_size": 1, "mm_encoder_tp_mode": "weights"},
    ],
    ids=str,
)
def test_two_ranks_equal_the_reference(folder: Path, oracle: Oracle, settings: dict[str, Any]) -> None:  # [eng] 37, B8
    with engines.on_ranks(folder, **settings) as subject:
        logits = engines.record_logits(subject)
        asked = [
            engines.request(folder, parts, name, number, max_tokens=12)
            for number, (name, parts) in enumerate(PROMPTS.items())
        ]
        told = engines.drain(subject, *asked).answers
        again = [msgspec.structs.replace(one, request_id=f"{one.request_id}, cached") for one in asked]
        told |= engines.drain(subject, *again).answers
    for one in (*asked, *again):
        check(oracle, one, told[one.request_id].token_ids, logits[one.request_id])
    assert all(told[one.request_id].num_cached_tokens for one in again)
