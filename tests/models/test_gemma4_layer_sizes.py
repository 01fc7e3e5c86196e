"""Gemma 4's sizes of heads, in the form of the releases and in that of transformers from 5.15 on. # A1"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers
from checkpoints import gemma4
from networks import config_of
from tables import table

from saccade import models
from saccade.errors import StartupError
from saccade.models.backbones.layer_types import FULL, SLIDING
from saccade.models.gemma4.layer_sizes import layer_sizes

GLOBAL = ("global_head_dim", "num_global_key_value_heads")
LAYERS = [SLIDING, FULL, SLIDING, FULL]
PLAIN = {"head_dim": 16, "num_key_value_heads": 2, "attention_k_eq_v": True}
OVERRIDE = {"head_dim": 32, "num_key_value_heads": 1}
BOTH: dict[Any, Any] = {"1": OVERRIDE, "3": OVERRIDE}


def sizes(**keys: Any) -> Mapping[str, tuple[int, int]]:
    return {name: tuple(one) for name, one in layer_sizes({**PLAIN, **keys}, LAYERS).items()}


@pytest.mark.parametrize("keeps_both", [False, True])
@pytest.mark.parametrize("name", gemma4.RELEASES)
def test_what_transformers_writes_is_the_same_network(
    name: str, keeps_both: bool, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    config = config_of(checkpoint(name))
    transformers.AutoConfig.from_pretrained(checkpoint(name)).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    text = written["text_config"]
    assert "per_layer_config" in text
    assert not {*GLOBAL} & text.keys()
    if keeps_both:
        text |= {key: config["text_config"][key] for key in GLOBAL}
    written["architectures"] = config["architectures"]
    family = models.family_of(config)
    assert models.load_spec(family, written) == models.load_spec(family, config)


@table(
    ("keys", "full"),
    [
        ({}, (512, 2)),
        ({"global_head_dim": 32}, (32, 2)),
        ({"global_head_dim": 32, "num_global_key_value_heads": 1}, (32, 1)),
        ({"num_global_key_value_heads": 1, "attention_k_eq_v": False}, (512, 2)),
        ({"per_layer_config": BOTH}, (32, 1)),
        ({"per_layer_config": {1: OVERRIDE, 3: OVERRIDE}}, (32, 1)),
        ({"per_layer_config": {"01": OVERRIDE, "03": OVERRIDE}}, (32, 1)),
        ({"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 32, "num_key_value_heads": 2}}}, (32, 2)),
        ({"per_layer_config": BOTH, "attention_k_eq_v": False}, (32, 1)),
        ({"per_layer_config": {**BOTH, "0": {"head_dim": 16}, "2": {"skip": []}}}, (32, 1)),
        ({"per_layer_config": {}}, (16, 2)),
        ({"per_layer_config": None}, (16, 2)),
        ({"per_layer_config": BOTH, "global_head_dim": 32, "num_global_key_value_heads": 1}, (32, 1)),
        ({"per_layer_config": BOTH, "global_head_dim": None, "num_global_key_value_heads": None}, (32, 1)),
    ],
)
def test_sizes_of_layers_that_attend_to_all_tokens(keys: dict[str, Any], full: tuple[int, int]) -> None:
    assert sizes(**keys) == {SLIDING: (16, 2), FULL: full}


def test_layers_with_a_window_may_have_sizes_of_their_own() -> None:
    found = sizes(per_layer_config={"0": {"head_dim": 8}, "2": {"head_dim": 8}})
    assert found == {SLIDING: (8, 2), FULL: (16, 2)}


@table(
    ("keys", "words"),
    [
        ({"per_layer_config": {"1": OVERRIDE}}, "per_layer_config.*full_attention different sizes"),
        ({"per_layer_config": {**BOTH, "0": {"head_dim": 8}}}, "per_layer_config.*sliding_attention different sizes"),
        ({"per_layer_config": {**BOTH, "4": OVERRIDE}}, "per_layer_config.*from 0 to 3"),
        ({"per_layer_config": {**BOTH, "-1": OVERRIDE}}, "per_layer_config.*from 0 to 3"),
        ({"per_layer_config": {"first": OVERRIDE}}, "per_layer_config.*'first'"),
        ({"per_layer_config": {"1": 32}}, "per_layer_config.*under '1'"),
        ({"per_layer_config": [OVERRIDE]}, "per_layer_config"),
        ({"per_layer_config": {"1": {"intermediate_size": 9}}}, "per_layer_config.*intermediate_size"),
        ({"per_layer_config": {"1": {"skip": ["mlp"]}}}, "per_layer_config.*skip"),
        ({"per_layer_config": {"1": {"head_dim": 0}, "3": {"head_dim": 0}}}, "head_dim"),
        ({"per_layer_config": BOTH, "global_head_dim": 64}, "global_head_dim.*64.*per_layer_config.*32"),
        (
            {"per_layer_config": BOTH, "num_global_key_value_heads": 2},
            "num_global_key_value_heads.*2.*per_layer_config",
        ),
        ({"per_layer_config": {}, "global_head_dim": 32}, "global_head_dim.*per_layer_config"),
    ],
)
def test_other_sizes_are_refused_by_name(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        sizes(**keys)
