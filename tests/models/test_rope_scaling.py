"""Rotary frequencies for longer contexts, against transformers."""

from typing import Any

import pytest
import torch
from tables import table

from saccade.errors import StartupError
from saccade.models.backbones.rope_scaling import read_rope
from saccade.nn.rope import cos_sin, inverse_frequencies

PAIRS = 16
SHORT, LONG = [1 + pair / 20 for pair in range(PAIRS)], [1 + pair / 2 for pair in range(PAIRS)]
TEXT: dict[str, Any] = {"rope_theta": 10000.0, "max_position_embeddings": 16384}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
LONGROPE = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
ORIGINAL = {"original_max_position_embeddings": 4096}


def reference(text: dict[str, Any], length: int) -> tuple[torch.Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # transformers looks for the original length of longrope beside its factors.
    scaling = {**text["rope_scaling"], **{key: text[key] for key in ORIGINAL if key in text}}
    config = LlamaConfig(**{**text, "rope_scaling": scaling}, hidden_size=8 * PAIRS, num_attention_heads=4)
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, seq_len=length)
    return frequencies, magnitude


@table("length", [4096, 4097])
@table(
    "changes",
    [
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": {**LLAMA3, "low_freq_factor": 2.0}, "rope_theta": 500000.0},
        {"rope_scaling": LONGROPE, **ORIGINAL},
        {"rope_scaling": {**LONGROPE, "factor": 8.0}, **ORIGINAL},
        {"rope_scaling": {**LONGROPE, "attention_factor": 1.5}, **ORIGINAL},
        {"rope_scaling": {**LONGROPE, **ORIGINAL}},
        {"rope_scaling": LONGROPE, **ORIGINAL, "max_position_embeddings": 4096},
    ],
)
def test_frequencies_equal_the_reference(changes: dict[str, Any], length: int) -> None:
    text = {**TEXT, **changes}
    expected, magnitude = reference(text, length)
    rope = read_rope(text, 2 * PAIRS, length)
    frequencies = inverse_frequencies(rope.theta, 2 * PAIRS, torch.device("cpu"), rope.divisors)
    torch.testing.assert_close(frequencies, expected, rtol=3e-7, atol=0)
    assert rope.magnitude == pytest.approx(magnitude, rel=1e-12)


def test_early_name_of_longrope() -> None:
    named = [
        read_rope({**TEXT, **ORIGINAL, "rope_scaling": {**LONGROPE, "type": kind}}, 32, 9999)
        for kind in ("su", "longrope")
    ]
    assert named[0] == named[1]


@pytest.mark.parametrize(
    "text", [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}]
)
def test_without_scaling(text: dict[str, Any]) -> None:
    rope = read_rope({**TEXT, **text}, 2 * PAIRS, 16384)
    assert (set(rope.divisors), rope.magnitude) == ({1.0}, 1.0)
    plain = inverse_frequencies(rope.theta, 2 * PAIRS, torch.device("cpu"))
    assert torch.equal(inverse_frequencies(rope.theta, 2 * PAIRS, torch.device("cpu"), rope.divisors), plain)


def test_magnitude_multiplies_cosine_and_sine() -> None:
    angles = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for scaled, plain in zip(cos_sin(angles, torch.float32, 1.5), cos_sin(angles, torch.float32), strict=True):
        torch.testing.assert_close(scaled, plain * 1.5)


@table(
    ("scaling", "words"),
    [
        ({"rope_type": "dynamic"}, "'dynamic'.*known: default, linear"),
        ({"type": "linear"}, "factor"),
        ({"type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor"),
        ({**LONGROPE, "long_factor": LONG[1:]}, "`long_factor` must list 16"),
        ({**LONGROPE, "short_factor": None}, "`short_factor` must list 16"),
        ({**LONGROPE, "short_factor": [0, *SHORT[1:]]}, "`short_factor` must list 16"),
        ("linear", "rope_scaling"),
    ],
)
def test_wrong_scaling_names_the_key(scaling: object, words: str) -> None:
    with pytest.raises(StartupError, match=words):
        read_rope({**TEXT, **ORIGINAL, "rope_scaling": scaling}, 2 * PAIRS, 16384)
