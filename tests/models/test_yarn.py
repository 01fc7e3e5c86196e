"""YaRN's frequencies and magnitudes against transformers."""

from typing import Any

import pytest
import torch
from tables import table

from saccade.models.backbones.rope_scaling import read_rope
from saccade.nn.rope import inverse_frequencies

RELEASE = {"factor": 64.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}


@table("width", [12, 64, 128])
@table(
    "scaling",
    [
        RELEASE,
        {**RELEASE, "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16, "beta_slow": 2},
        {"factor": 4.0, "original_max_position_embeddings": 512},
        {"factor": 1.0, "original_max_position_embeddings": 512, "mscale_all_dim": 0.0},
        {**RELEASE, "attention_factor": 1.25},
        {"factor": 4.0, "original_max_position_embeddings": 512, "truncate": False},
    ],
)
def test_yarn(scaling: dict[str, Any], width: int) -> None:
    from transformers import DeepseekV3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

    whole = {"rope_type": "yarn", "rope_theta": 50000.0, **scaling}
    expected: Any = DeepseekV3Config(qk_rope_head_dim=width, max_position_embeddings=8192, rope_parameters=dict(whole))
    frequencies, magnitude = ROPE_INIT_FUNCTIONS["yarn"](expected)
    rope = read_rope({"max_position_embeddings": 8192, "rope_parameters": whole}, width, 8192)
    ours = inverse_frequencies(rope.theta, width, torch.device("cpu"), rope.divisors)
    torch.testing.assert_close(ours, frequencies, rtol=1e-6, atol=0)
    assert rope.magnitude == pytest.approx(magnitude)
    assert rope.score_factor == pytest.approx(yarn_apply_mscale(whole, 1.0))
