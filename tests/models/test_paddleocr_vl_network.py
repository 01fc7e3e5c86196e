"""Spec and network of PaddleOCR-VL against transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import build, check_features, config_of
from references.networks import RasterOracle
from safetensors.torch import load_file
from tables import table

from saccade.errors import StartupError
from saccade.models.paddleocr_vl.spec import Spec
from saccade.models.spec import MediaShape, Paged
from saccade.nn.backends.torch_sdpa import VisionAttentionBackend
from saccade.nn.layerwise import complete

SIZES = [(56, 56), (150, 100), (90, 230), (60, 700), (5, 40)]
"""(width, height)"""

Folder = Callable[[str], Path]
NAME = "paddleocr_vl"


def test_features_equal_the_reference(network_folder: Folder) -> None:  # A10
    check_features(RasterOracle(network_folder(NAME)), network_folder(NAME), SIZES)


@torch.inference_mode()
def test_encode_never_looks_at_the_device(network_folder: Folder) -> None:
    """C3, [eng] 35: a meta tensor has no content to look at."""
    network = build(config_of(network_folder(NAME)))
    network.finish()
    metadata = network.prepare([MediaShape((1, 10, 14)), MediaShape((1, 2, 6))], VisionAttentionBackend())
    features = complete(network.encode(torch.empty(152 * 588, dtype=torch.uint8, device="meta"), metadata))
    assert len(features) == 38


def test_tensors_that_transformers_writes_are_found_too(network_folder: Folder) -> None:
    network = build(config_of(network_folder(NAME)))
    for released in load_file(network_folder(NAME) / "model.safetensors"):
        saved = released.replace("mlp_AR.", "model.projector.").replace("visual.", "model.visual.", 1)
        if released.startswith("model."):
            saved = released.replace("model.", "model.language_model.", 1)
        located = network.locate(released)
        assert network.locate(saved) == located
        assert located is not None or "head.probe" in released or "packing_position" in released


def test_empty_config_has_the_release() -> None:
    from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration

    reference = PaddleOCRVLConfig()
    with torch.device("meta"):
        sizes = [parameter.numel() for parameter in PaddleOCRVLForConditionalGeneration(reference).parameters()]
    config = {"architectures": ["PaddleOCRVLForConditionalGeneration"], "image_token_id": 100295, "vision_config": {}}
    spec = Spec.read_config(config)
    text, vision = reference.text_config, reference.vision_config
    assert spec.kv_specs == (Paged(text.num_key_value_heads, text.head_dim, text.head_dim),) * text.num_hidden_layers
    assert (spec.text.norm_eps, spec.text.rope.theta) == (text.rms_norm_eps, text.rope_parameters["rope_theta"])
    assert (spec.max_position_embeddings, spec.text.mrope_section) == (131072, (16, 24, 24))
    assert (spec.vision.activation, spec.vision.norm_eps) == (vision.hidden_act, vision.layer_norm_eps)
    network = build(config)
    assert network.lm_head is None, "the embedding is tied unless config.json says otherwise"
    assert sum(parameter.numel() for parameter in network.parameters()) == sum(sizes)


def test_biases_are_read(network_folder: Folder) -> None:
    network = build(config_of(network_folder(NAME)) | {"use_bias": True})
    biases = [name for name, _ in network.language_model.layers[0].named_parameters() if name.endswith("bias")]
    parts = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert biases == [f"{part}.bias" for part in parts]


@table(
    ("changes", "words"),
    [
        ({"vision_config": {"num_attention_heads": 5}}, "num_attention_heads"),
        ({"vision_config": {"num_attention_heads": 24, "hidden_size": 48}}, "num_attention_heads"),
        ({"vision_config": 5}, "vision_config"),
        ({"vision_config": {"hidden_act": "relu"}}, "hidden_act"),
        ({"image_token_id": 10**6}, "image_token_id"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2, 3]}}, "mrope_section"),
    ],
)
def test_a_wrong_config_names_the_key(changes: dict[str, Any], words: str, network_folder: Folder) -> None:
    with pytest.raises(StartupError, match=words):
        Spec.read_config(json.loads((network_folder(NAME) / "config.json").read_text()) | changes)
