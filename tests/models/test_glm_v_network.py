"""Specs and networks of GLM-4.xV and GLM-OCR against transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import build, check_features, config_of, with_value
from references.networks import GlmOracle
from safetensors.torch import load_file
from tables import table

from saccade.errors import StartupError
from saccade.models.glm_v.spec import OcrSpec, Spec
from saccade.models.spec import MediaShape
from saccade.nn.backends.torch_sdpa import VisionAttentionBackend
from saccade.nn.layerwise import complete

SIZES = [(56, 56), (150, 100), (90, 230), (60, 700), (5, 40)]
"""(width, height)"""

Folder = Callable[[str], Path]
NAMES = ["glm4v", "glm4v_moe", "glm46v", "glm_ocr"]


@pytest.mark.parametrize("name", ["glm4v", "glm_ocr"])
def test_features_equal_the_reference(name: str, network_folder: Folder) -> None:  # A10
    folder = network_folder(name)
    check_features(GlmOracle(folder), folder, SIZES)


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_encode_never_looks_at_the_device(name: str, network_folder: Folder) -> None:
    """C3, [eng] 35: a meta tensor has no content to look at."""
    network = build(config_of(network_folder(name)))
    network.finish()
    metadata = network.prepare([MediaShape((1, 10, 14)), MediaShape((1, 2, 6))], VisionAttentionBackend())
    features = complete(network.encode(torch.empty(152 * 588, dtype=torch.uint8, device="meta"), metadata))
    assert len(features) == 38


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_but_the_drafts_has_a_place(name: str, network_folder: Folder) -> None:
    network = build(config_of(network_folder(name)))
    parameters = set(network.state_dict())
    for released in load_file(network_folder(name) / "model.safetensors"):
        located = network.locate(released)
        if ".layers.4." in released:
            assert located is None
        else:
            assert located is not None
            assert located.parameter in parameters
        assert network.locate(released.removeprefix("model.")) == located


def test_sizes_of_the_releases() -> None:
    """GLM-4.5V has 108 billion parameters with both embeddings, and no bias after its attention."""
    config = {
        "architectures": ["Glm4vMoeForConditionalGeneration"], "image_token_id": 151363,
        "text_config": {
            "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
            "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 65536,
            "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "attention_bias": True,
            "partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]},
        },
        "vision_config": {
            "depth": 24, "hidden_size": 1536, "num_heads": 12, "patch_size": 14, "spatial_merge_size": 2,
            "out_hidden_size": 4096, "intermediate_size": 10944,
        },
    }  # fmt: skip
    network = build(config)
    total = sum(parameter.numel() for parameter in network.parameters())
    assert round(total / 1e9) == 108
    assert network.spec.text.mrope_section == (8, 12, 12)
    assert network.language_model.layers[0].self_attn.o_proj.bias is None


@table(
    ("name", "path", "value", "words"),
    [
        ("glm4v", "vision_config.num_heads", 5, "num_heads"),
        ("glm4v", "vision_config.out_hidden_size", 5, "out_hidden_size"),
        ("glm4v", "vision_config.hidden_act", "relu", "hidden_act"),
        ("glm4v", "image_token_id", 10**6, "image_token_id"),
        ("glm4v", "text_config.rope_scaling.mrope_section", [1, 2, 4], "mrope_section"),
        ("glm4v_moe", "text_config.topk_group", 3, "topk_group"),
        ("glm4v_moe", "text_config.use_qk_norm", True, "use_qk_norm"),
        ("glm_ocr", "vision_config", 5, "vision_config"),
    ],
)
def test_a_wrong_config_names_the_key(name: str, path: str, value: object, words: str, network_folder: Folder) -> None:
    read: Any = OcrSpec.read_config if name == "glm_ocr" else Spec.read_config
    with pytest.raises(StartupError, match=words):
        read(with_value(config_of(network_folder(name)), path, value))
