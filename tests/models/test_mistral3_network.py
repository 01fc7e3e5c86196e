"""Spec and network of Mistral Small 3.1 against transformers."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import build, check_features, config_of, load, with_value
from references.networks import RowsOracle
from safetensors.torch import load_file
from tables import table

from saccade.errors import StartupError
from saccade.models.mistral3.spec import Spec
from saccade.models.spec import MediaShape, Paged
from saccade.nn.backends.torch_sdpa import VisionAttentionBackend
from saccade.nn.layerwise import complete

SIZES = [(1, 1), (56, 56), (150, 100), (700, 30), (30, 700)]
"""(width, height)"""

Folder = Callable[[str], Path]
NAME = "mistral3"


def test_features_equal_the_reference(network_folder: Folder) -> None:  # A10
    check_features(RowsOracle(network_folder(NAME)), network_folder(NAME), SIZES)


@torch.inference_mode()
def test_encode_never_looks_at_the_device(network_folder: Folder) -> None:
    """C3, [eng] 35: a meta tensor has no content to look at."""
    network = build(config_of(network_folder(NAME)), {"patch_size": 14})
    network.finish()
    metadata = network.prepare([MediaShape((1, 10, 14)), MediaShape((1, 2, 6))], VisionAttentionBackend())
    features = complete(network.encode(torch.empty(152 * 588, dtype=torch.uint8, device="meta"), metadata))
    assert len(features) == 38


def test_tensors_that_transformers_writes_are_found_too(network_folder: Folder) -> None:
    network = build(config_of(network_folder(NAME)), {"patch_size": 14})
    for released in load_file(network_folder(NAME) / "model.safetensors"):
        saved = f"model.{released}"
        if released.startswith("language_model.lm_head."):
            saved = released.removeprefix("language_model.")
        elif released.startswith("language_model."):
            saved = released.replace("language_model.model.", "model.language_model.")
        located = network.locate(released)
        assert located is not None
        assert network.locate(saved) == located


def test_release_has_as_many_parameters_as_the_reference() -> None:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    reference = Mistral3Config(tie_word_embeddings=False)
    with torch.device("meta"):
        sizes = [parameter.numel() for parameter in Mistral3ForConditionalGeneration(reference).parameters()]
    config: Any = reference.to_dict() | {"architectures": ["Mistral3ForConditionalGeneration"]}
    network = build(config, {"patch_size": 14})
    assert network.spec.kv_specs == (Paged(8, 128, 128),) * 40
    assert network.spec.text.rope.theta == 1e9
    assert sum(parameter.numel() for parameter in network.parameters()) == sum(sizes)
    assert round(sum(sizes) / 1e9, 1) == 24.0


def test_queries_of_ministral_grow_as_in_the_reference(network_folder: Folder) -> None:
    from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

    decoder = load(network_folder("ministral3")).language_model
    positions = torch.arange(200)
    expected = get_llama_4_attn_scale(positions[None], 0.1, 32).flatten()
    factors = decoder.rotation_at(positions.expand(3, -1), torch.float32).factors.flatten()
    assert factors.tolist() == expected.tolist()
    assert len(set(factors.tolist())) == 7


def test_missing_keys_of_ministral_have_the_defaults_of_the_reference() -> None:
    from transformers import Ministral3Config

    reference: Any = Ministral3Config()
    text = Spec.read_config({"text_config": {"model_type": "ministral3"}, "vision_config": {}}).text
    assert (text.hidden_size, text.intermediate_size, text.num_layers, text.num_heads, text.num_kv_heads) == (
        reference.hidden_size, reference.intermediate_size, reference.num_hidden_layers, reference.num_attention_heads,
        reference.num_key_value_heads,
    )  # fmt: skip
    assert (text.head_dim, text.vocab_size, text.norm_eps, text.max_position_embeddings, text.sliding_window) == (
        reference.head_dim, reference.vocab_size, reference.rms_norm_eps, reference.max_position_embeddings, None,
    )  # fmt: skip
    rope = reference.rope_parameters
    assert text.query_scaling == (rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"])
    assert (text.rope.theta, text.rope.divisors[-1], text.rope.magnitude) == (rope["rope_theta"], rope["factor"], 1.0)


@table("inside", [{}, {"original_max_position_embeddings": 64}])
@table("outside", [{}, {"original_max_position_embeddings": 96}])
def test_the_length_of_ministrals_training_is_read_in_each_place(
    inside: dict[str, Any], outside: dict[str, Any]
) -> None:
    """Also if no place has it, or the section of rotary positions is null."""
    from transformers import Ministral3Config, Ministral3Model

    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.2, **inside}
    for section in (rope, None):
        keys = {"max_position_embeddings": 512, "num_hidden_layers": 1, "rope_parameters": section, **outside}
        reference: Any = Ministral3Config(**deepcopy(keys))
        with torch.device("meta"):
            Ministral3Model(reference)  # which completes the section
        text = Spec.read_config({"text_config": {"model_type": "ministral3", **keys}, "vision_config": {}}).text
        own = reference.rope_parameters
        assert text.query_scaling == (own["llama_4_scaling_beta"], own["original_max_position_embeddings"])


def test_missing_keys_have_the_defaults_of_the_reference() -> None:
    from transformers import Mistral3Config, PixtralVisionConfig

    spec = Spec.read_config({"text_config": {}, "vision_config": {}})
    vision: Any = PixtralVisionConfig()
    assert (spec.vision.hidden_size, spec.vision.num_heads, spec.vision.depth, spec.vision.activation) == (
        vision.hidden_size, vision.num_attention_heads, vision.num_hidden_layers, vision.hidden_act,
    )  # fmt: skip
    assert (spec.vision.patch_size, spec.vision.rope_theta) == (vision.patch_size, vision.rope_parameters["rope_theta"])
    assert spec.placeholder_of == {"image": Mistral3Config().image_token_index}


@table(
    ("path", "value", "words"),
    [
        ("text_config.model_type", "mistral4", "'mistral4'; this network knows mistral, ministral3"),
        ("text_config", {"model_type": "ministral3", "rope_parameters": {"rope_theta": 5.0}}, "llama_4_scaling_beta"),
        ("text_config", 5, "text_config"),
        ("vision_config.model_type", "clip_vision_model", "model_type"),
        ("vision_config.num_attention_heads", 5, "num_attention_heads"),
        ("vision_config.hidden_act", "relu", "hidden_act"),
        ("vision_config.rope_theta", 0, "rope_theta"),
        ("vision_feature_layer", -2, "vision_feature_layer"),
        ("image_token_index", 10**6, "image_token_index"),
        ("spatial_merge_size", "2", "spatial_merge_size"),
    ],
)
def test_a_wrong_config_names_the_key(path: str, value: object, words: str, network_folder: Folder) -> None:
    with pytest.raises(StartupError, match=words):
        Spec.read_config(with_value(config_of(network_folder(NAME)), path, value))
