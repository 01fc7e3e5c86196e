"""Spec and network of Gemma 3 against transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import build, check_features, config_of, with_value
from references.networks import SoftTokensOracle
from safetensors.torch import load_file
from tables import table

from saccade.errors import InvalidValue, StartupError
from saccade.models.backbones.layer_types import FULL, SLIDING
from saccade.models.backbones.windowed_config import PATTERN, STYLE, WindowedConfig
from saccade.models.gemma3.settings import VISION_DEFAULTS
from saccade.models.gemma3.spec import Spec
from saccade.models.spec import Paged

SIZES = [(1, 1), (56, 56), (150, 100), (700, 30), (30, 700)]
"""(width, height)"""

Folder = Callable[[str], Path]
NAME = "gemma3"
PREPROCESSOR = {"size": {"height": 64, "width": 64}}
WHOLE: dict[str, Any] = {"preprocessor": {"size": {"height": 896, "width": 896}}}


def test_features_equal_the_reference(network_folder: Folder) -> None:  # A10
    check_features(SoftTokensOracle(network_folder(NAME)), network_folder(NAME), SIZES)


def test_tensors_that_transformers_writes_are_found_too(network_folder: Folder) -> None:
    network = build(config_of(network_folder(NAME)), PREPROCESSOR)
    for released in load_file(network_folder(NAME) / "model.safetensors"):
        saved = f"model.{released}"
        for theirs, ours in (
            ("language_model.model.", "model.language_model."),
            ("vision_tower.vision_model.", "model.vision_tower."),
        ):
            if released.startswith(theirs):
                saved = released.replace(theirs, ours)
        located = network.locate(released)
        assert located is not None
        assert network.locate(saved) == located


def test_release_has_as_many_parameters_as_the_reference() -> None:
    """As 4B is written: what the class has by default is absent. Only the tower's unused head differs."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    vision = {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "vision_config": vision}
    reference = Gemma3Config.from_dict(config)
    with torch.device("meta"):
        sizes = [parameter.numel() for parameter in Gemma3ForConditionalGeneration(reference).parameters()]
    network = build(config, WHOLE["preprocessor"])
    full, sliding = Paged(4, 256, 256), Paged(4, 256, 256, 1024)
    assert network.spec.kv_specs[:12] == ((sliding,) * 5 + (full,)) * 2
    assert network.spec.text.rope.divisors == (8.0,) * 128
    assert network.spec.longest_whole == 256
    assert network.spec.vocab_size == 262_208
    assert sum(parameter.numel() for parameter in network.parameters()) == sum(sizes)
    assert round(sum(sizes) / 1e9, 1) == 4.3


def test_missing_keys_have_the_defaults_of_the_reference() -> None:
    from transformers import Gemma3Config, Gemma3TextConfig, SiglipVisionConfig

    text: Any = Gemma3TextConfig()
    stated = {key: value for key, value in STYLE.defaults.items() if key != PATTERN}
    assert {key: getattr(text, key) for key in stated} == stated
    assert text.layer_types.index(FULL) + 1 == STYLE.defaults[PATTERN]
    vision: Any = SiglipVisionConfig()
    assert {key: getattr(vision, key) for key in VISION_DEFAULTS} == dict(VISION_DEFAULTS)
    spec = Spec.read_config({"text_config": {}, "vision_config": {"image_size": 256}})
    assert spec.placeholder_of == {"image": Gemma3Config().image_token_index}
    assert spec.text.tied
    assert [kind.rope.theta for kind in spec.text.kinds[4:6]] == [10_000.0, 1_000_000.0]


BOTH = {
    SLIDING: {"rope_type": "default", "rope_theta": 500.0},
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 7000.0},
}
PLAIN = {**BOTH, FULL: {"rope_type": "default", "rope_theta": 7000.0}}


@table(
    "keys",
    [
        {"rope_parameters": BOTH},
        {"rope_theta": 7000.0, "rope_local_base_freq": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_parameters": PLAIN, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ],
)
def test_older_and_newer_files_name_the_same_frequencies(keys: Any) -> None:
    kinds = WindowedConfig.read_decoder({"tie_word_embeddings": True, "num_hidden_layers": 6, **keys}).kinds
    assert [kind.rope.theta for kind in kinds[4:]] == [500.0, 7000.0]
    assert [kind.rope.divisors[0] for kind in kinds[4:]] == [1.0, 8.0]


def test_layers_may_be_listed() -> None:
    kinds = WindowedConfig.read_decoder({"num_hidden_layers": 2, "layer_types": [FULL, SLIDING]}).kinds
    assert [kind.window for kind in kinds] == [None, 4096]


@table(
    ("path", "value", "words"),
    [
        ("text_config", 5, "text_config"),
        ("text_config.hidden_activation", "silu", "hidden_activation"),
        ("text_config.use_bidirectional_attention", True, "use_bidirectional_attention"),
        ("text_config.attn_logit_softcapping", 50.0, "attn_logit_softcapping"),
        ("text_config.final_logit_softcapping", 30.0, "final_logit_softcapping"),
        ("text_config.num_key_value_heads", 3, "num_key_value_heads"),
        ("text_config.layer_types", ["full_attention"], "layer_types"),
        ("text_config.layer_types", ["sliding_attention"] * 4, "at least one layer of full_attention"),
        ("text_config.rope_parameters", {"rope_theta": 5.0}, "rope_parameters"),
        ("text_config.query_pre_attn_scalar", 0, "query_pre_attn_scalar"),
        ("vision_config.model_type", "clip_vision_model", "model_type"),
        ("image_token_index", 10**6, "image_token_index"),
        ("mm_tokens_per_image", 15, "mm_tokens_per_image"),
    ],
)
def test_a_wrong_config_names_the_key(path: str, value: object, words: str, network_folder: Folder) -> None:
    with pytest.raises(StartupError, match=words):
        Spec.read_config(with_value(config_of(network_folder(NAME)), path, value))


def test_another_grid_is_refused(network_folder: Folder) -> None:
    spec = Spec.read_config(config_of(network_folder(NAME)))
    assert spec.item_tokens((1, 8, 8)) == 16
    with pytest.raises(InvalidValue, match="8 rows and 8 columns"):
        spec.item_tokens((1, 8, 16))
