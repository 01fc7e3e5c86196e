"""What --model-impl transformers refuses, each by name, before any weights are loaded. F7"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import any_architecture

from saccade import models
from saccade.engine.executor.loader import empty_network
from saccade.errors import StartupError
from saccade.gateway.served_models.served_model import ServedModel
from saccade.models.files import read_model_files
from saccade.protocol.description import ModelFiles

TEXT = any_architecture.SMALL_TEXT
SIGLIP = any_architecture.SIGLIP
TOWER = {**any_architecture.SMALL, "image_size": 56, "patch_size": 14}
CONVOLUTIONS = {**TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "lfm2_vl": ({"text_config": CONVOLUTIONS}, "layers of the kind conv"),
    "paligemma": ({"text_config": {**TEXT, "model_type": "gemma"}, "vision_config": SIGLIP}, "lets tokens attend to later ones"),
    "hunyuan_vl": ({"text_config": {**TEXT, "model_type": "hunyuan_vl_text"}}, "positions on several axes"),
    "ernie4_5_vl_moe": ({}, "needs moe_mm_token_type_ids for each token"),
    "granite4_vision": ({"deepstack_layer_map": [[1, 0]]}, "deepstack_layer_map"),
    "granite_docling": ({"text_config": {**TEXT, "model_type": "granite_docling_text"}, "vision_config": {**TOWER, "out_hidden_size": 64}}, "deepstack"),
    "glm5_next": ({}, "indexed_attention, linear_attention"),
    "qwen4_exp": ({}, "indexed_attention, linear_attention"),
    "perception_lm": (
        {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": {"model_type": "timm_wrapper"}},
        "no network for images and text of the model_type 'perception_lm'",
    ),
    "unknown": ({}, "transformers has no model_type 'unknown'"),
    "llava": ({"text_config": {**TEXT, "model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "vision_config": SIGLIP}, "rope_type is dynamic"),
}  # fmt: skip


def files_of(model_type: str, config: dict[str, Any]) -> ModelFiles:
    whole = {"model_type": model_type, "model_impl": "transformers", "image_token_id": 300, **config}
    return ModelFiles(files={"config.json": json.dumps(whole).encode()})


@pytest.mark.parametrize("model_type", REFUSED)
def test_model_is_refused_by_name(model_type: str) -> None:
    config, words = REFUSED[model_type]
    with pytest.raises(StartupError, match=words):
        empty_network(files_of(model_type, config))


def test_quantised_weights_are_refused() -> None:
    config = {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": SIGLIP,
        "quantization_config": {"bits": 4},
    }
    with pytest.raises(StartupError, match="quantised weights"):
        empty_network(files_of("llava", config))


def test_network_that_is_served_has_no_storage_yet() -> None:
    config = {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": SIGLIP}
    _, network = empty_network(files_of("llava", config))
    assert {parameter.device for parameter in network.parameters()} == {torch.device("meta")}


@pytest.mark.parametrize(("name", "alone"), [("llava_onevision", True), ("aya_vision", False)])
def test_layout_says_whether_an_image_stands_alone(tmp_path: Path, name: str, alone: bool) -> None:
    layout = ServedModel.from_files("a", read_model_files(any_architecture.write(tmp_path, name)), 4096).layout
    assert layout.image(150, 100, layout.settings).stands_alone is alone


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("cohere2_vision", "no image processor without torch"),
        ("perception_lm", "no image processor without torch"),
    ],
)
def test_processor_is_refused_by_name(model_type: str, words: str) -> None:
    files = {"processor": {}, "image_processor": {}, "added_tokens": {"<image>": 3}, "named_tokens": {}}
    layout = models.load_layout("any_architecture")({"model_type": model_type, "image_token_id": 3}, files)
    with pytest.raises(StartupError, match=words):
        layout.image(10, 10, layout.settings)


def test_library_of_no_family_is_refused() -> None:
    with pytest.raises(StartupError, match=r"--model-impl jax: no family .* Use auto, saccade, transformers\."):
        models.family_of({"model_impl": "jax", "architectures": ["LlavaForConditionalGeneration"]})
    assert models.family_of({"model_impl": "transformers"}) == "any_architecture"
