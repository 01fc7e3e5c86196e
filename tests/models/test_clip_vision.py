"""CLIP's vision tower against transformers, and the encoder's contract."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints.qwen3_vl import randomize
from safetensors.torch import save_file
from tables import table
from weights import fill_from

from saccade.errors import StartupError
from saccade.models.backbones.clip_config import LARGE_336, SILENT, ClipConfig
from saccade.models.backbones.clip_vision import ClipTower, view_patches
from saccade.nn.backends.torch_sdpa import VisionAttentionBackend
from saccade.nn.context import Heads, PackedLayout
from saccade.nn.layers import finish
from saccade.nn.layerwise import complete

CONFIG = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 5, "num_attention_heads": 3, "image_size": 59,
    "patch_size": 14, "layer_norm_eps": 1e-3,
}  # fmt: skip
VIEWS = torch.randn(3, 3, 59, 59, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    model = CLIPVisionModel(CLIPVisionConfig(**CONFIG)).float().eval()
    randomize(model)
    return model


@pytest.fixture(scope="module")
def weights(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tower's tensors, named as in old releases."""
    path = tmp_path_factory.mktemp("clip") / "model.safetensors"
    tensors = {f"vision_model.{name}": value.contiguous() for name, value in reference.state_dict().items()}
    save_file({**tensors, "vision_model.embeddings.position_ids": torch.arange(17).unsqueeze(0)}, path)
    return path


def load(weights: Path, feature_layer: int = -2) -> ClipTower:
    config = ClipConfig.read_vision(CONFIG)
    tower = ClipTower(config, config.num_blocks(feature_layer))
    fill_from(tower, weights)
    finish(tower)
    return tower


@table("feature_layer", [-6, -2, -1, 0, 1, 4, 5])
@torch.inference_mode()
def test_hidden_states_equal_the_reference(reference: Any, weights: Path, feature_layer: int) -> None:
    tower = load(weights, feature_layer)
    hidden = complete(tower(view_patches(VIEWS, 14), tower.prepare(3, VisionAttentionBackend())))
    expected = reference(VIEWS, output_hidden_states=True).hidden_states[feature_layer]
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)


class _Recording(VisionAttentionBackend):
    def __init__(self) -> None:
        self.layouts: list[PackedLayout] = []

    def packed(self, heads: Heads, layout: PackedLayout, scale: float | None = None) -> torch.Tensor:
        self.layouts.append(layout)
        return super().packed(heads, layout, scale)


@torch.inference_mode()
def test_every_block_gets_the_metadata(weights: Path) -> None:  # C1
    tower, backend = load(weights), _Recording()
    complete(tower(view_patches(VIEWS, 14), tower.prepare(3, backend)))
    assert len(backend.layouts) == 4
    for layout in backend.layouts:
        assert layout.cu_seqlens.tolist() == [0, 17, 34, 51]
        assert (layout.max_seqlen, layout.sequence_lengths) == (17, (17, 17, 17))


def test_encoding_never_looks_at_the_device() -> None:  # C3: a meta tensor has no content to look at
    with torch.device("meta"):
        tower = ClipTower(ClipConfig.read_vision(CONFIG), 4)
    finish(tower)
    hidden = complete(tower(view_patches(VIEWS.to("meta"), 14), tower.prepare(3, VisionAttentionBackend())))
    assert (hidden.device.type, hidden.shape) == ("meta", (3, 17, 48))


def test_an_unknown_tensor_is_refused(weights: Path, tmp_path: Path) -> None:
    save_file({"encoder.layers.5.mlp.fc1.bias": torch.zeros(80)}, tmp_path / "more.safetensors")
    tower = ClipTower(ClipConfig.read_vision(CONFIG), 4)
    with pytest.raises(StartupError, match=r"encoder\.layers\.5\.mlp\.fc1\.bias"):
        fill_from(tower, weights, tmp_path / "more.safetensors")


def test_defaults_are_those_of_the_reference() -> None:
    from transformers import CLIPVisionConfig, LlavaConfig

    silent, named = CLIPVisionConfig(), LlavaConfig().vision_config
    assert {key: getattr(silent, key) for key in SILENT} == SILENT
    assert {key: getattr(named, key) for key in LARGE_336} == LARGE_336


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"num_channels": 1}, "num_channels"),
        ({"patch_size": 60}, "patch_size"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_a_wrong_config_names_the_key(change: dict[str, object], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        ClipConfig.read_vision({**CONFIG, **change})


@pytest.mark.parametrize("feature_layer", [-7, 6, None, [-2, -3], True])
def test_a_feature_layer_that_is_none_is_refused(feature_layer: object) -> None:
    with pytest.raises(StartupError, match="feature layer"):
        ClipConfig.read_vision(CONFIG).num_blocks(feature_layer)
