"""Gemma 4 with one property changed at a time, so that each shows, against the oracle. A10"""

from pathlib import Path
from typing import Any

import engines
import pytest
from checkpoints import gemma4
from oracle_checks import check
from references.networks import GemmaOracle

pytestmark = pytest.mark.conformance
VARIATIONS: dict[str, dict[str, Any]] = {
    "two images in a window": {"sliding_window": 200},
    "a window of one token": {"sliding_window": 1},
    "images causally": {"use_bidirectional_attention": None},
    "a full layer first": {"layer_types": [gemma4.FULL, gemma4.SLIDING, gemma4.SLIDING, gemma4.FULL]},
    "own keys and values": {"attention_k_eq_v": False},
    "no experts": {"enable_moe_block": False},
    "no cap": {"final_logit_softcapping": None},
    "biases": {"attention_bias": True},
    "shared keys of images": {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_variations_equal_the_reference(name: str, tmp_path: Path) -> None:
    folder = gemma4.write_network(tmp_path / "model", "gemma4", VARIATIONS[name])
    oracle, subject = GemmaOracle(folder), engines.engine(folder, max_num_batched_tokens=64)
    logits = engines.record_logits(subject)
    for request_id in ("fresh", "cached"):
        asked = engines.request(folder, [3, ((96, 160), 2), 6, ((90, 90), 3), 40], request_id, max_tokens=12)
        answer = engines.drain(subject, asked).answers[request_id]
        check(oracle, asked, answer.token_ids, logits[request_id])
