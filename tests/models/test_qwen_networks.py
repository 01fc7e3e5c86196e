"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL with experts: towers against transformers, names of tensors, configurations."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import build, check_features, config_of, load, tokens_of, with_value
from references.networks import QwenOracle
from safetensors.torch import load_file, save_file
from tables import table
from vision_backends import RecordingBackend

from saccade import models
from saccade.errors import StartupError
from saccade.models.backbones.grouped_query_text import MixtureOfExperts
from saccade.models.backbones.text_config import text_section
from saccade.models.network import Target
from saccade.models.qwen_vl.towers import frame_windows
from saccade.models.spec import MediaShape
from saccade.nn.backends.torch_sdpa import VisionAttentionBackend
from saccade.nn.layerwise import complete
from saccade.nn.rope import inverse_frequencies

NAMES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe"]
SIZES = [(28, 28), (150, 100), (90, 230), (224, 224), (252, 29), (61, 420)]
"""Of these no two have the same grid, and only the fourth consists of whole windows."""


@pytest.mark.parametrize("name", NAMES)
def test_vision_tower_equals_the_reference(
    name: str, network: Callable[[str], Any], network_folder: Callable[[str], Path]
) -> None:  # A10
    check_features(QwenOracle(network_folder(name)), network_folder(name), SIZES, network(name), atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_encode_never_looks_at_the_device(name: str, network_folder: Callable[[str], Path]) -> None:
    """C3, [eng] 35: a meta tensor has no content to look at."""
    network, grids = build(config_of(network_folder(name))), [(1, 10, 14), (1, 2, 6)]
    network.finish()
    pixels = torch.empty(152 * network.spec.patch_values(), dtype=torch.uint8, device="meta")
    features = complete(
        network.encode(pixels, network.prepare([MediaShape(grid) for grid in grids], VisionAttentionBackend()))
    )
    assert (features.device.type, len(features)) == ("meta", 38)


@table(("rows", "columns"), [(1, 1), (4, 4), (8, 12), (5, 7), (3, 9), (13, 2), (1, 17)])
def test_windows_equal_those_of_the_reference(rows: int, columns: int) -> None:
    from transformers.vision_utils import get_vision_window_index

    order, sizes = frame_windows(rows, columns, 4)
    theirs, borders = get_vision_window_index(torch.tensor([[1, 2 * rows, 2 * columns]]), 2, 112, 14)
    reference = np.split(theirs.numpy(), borders.numpy()[1:-1] // 4)
    ours = np.split(order, np.cumsum(sizes)[:-1])
    assert {frozenset(window.tolist()) for window in ours} == {frozenset(window.tolist()) for window in reference}
    assert sorted(sizes, reverse=True) == list(sizes)


@torch.inference_mode()
def test_windows_lie_within_a_group_of_frames(network: Callable[[str], Any]) -> None:
    grids, backend = [(3, 10, 14), (2, 8, 8)], RecordingBackend()
    items = [MediaShape(grid, modality="video") for grid in grids]
    metadata = network("qwen2_5_vl").prepare(items, backend)
    complete(network("qwen2_5_vl").encode(torch.zeros((3 * 140 + 2 * 64) * 1176, dtype=torch.uint8), metadata))
    assert tokens_of(network("qwen2_5_vl"), items) == [105, 32]
    windows, frames = (64, 48, 16, 12) * 3 + (64,) * 2, (140,) * 3 + (64,) * 2
    assert [layout.sequence_lengths for layout in backend.layouts] == [windows, frames, windows, windows, frames]


@torch.inference_mode()
def test_windows_and_frames_have_their_own_metadata(network: Callable[[str], Any]) -> None:  # C1
    grids, backend = [(1, 10, 14), (1, 16, 8)], RecordingBackend()
    metadata = network("qwen2_5_vl").prepare([MediaShape(grid) for grid in grids], backend)
    complete(network("qwen2_5_vl").encode(torch.zeros((140 + 128) * 588, dtype=torch.uint8), metadata))
    windows, frames = (64, 48, 16, 12, 64, 64), (140, 128)
    assert [layout.sequence_lengths for layout in backend.layouts] == [windows, frames, windows, windows, frames]


@pytest.mark.parametrize("name", NAMES)
def test_tensors_that_transformers_writes_are_found_too(
    name: str, network: Callable[[str], Any], network_folder: Callable[[str], Path]
) -> None:
    """Names with `model.language_model.` and `model.visual.`, as in checkpoints that were tuned and saved again."""
    ours = network(name)
    for released in load_file(network_folder(name) / "model.safetensors"):
        saved = released
        if released.startswith("visual."):
            saved = f"model.{released}"
        elif released.startswith("model.") and name != "qwen3_vl_moe":
            saved = released.replace("model.", "model.language_model.", 1)
        assert ours.locate(saved) == ours.locate(released)


def test_orientation_of_experts_is_declared(network: Callable[[str], Any]) -> None:
    prefix = "layers.0.mlp.experts"
    located = network("qwen3_vl_moe").locate(f"model.language_model.{prefix}.gate_up_proj")
    assert located == Target(f"language_model.{prefix}.gate_up_proj", transposed=True)


def test_experts_may_be_stored_one_by_one(
    network: Callable[[str], Any], network_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = network_folder("qwen3_vl_moe")
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    tensors = load_file(folder / "model.safetensors")
    for key in [key for key in tensors if key.endswith(".experts.gate_up_proj")]:
        prefix = key.removesuffix(".gate_up_proj")
        fused = zip(tensors.pop(key).mT, tensors.pop(f"{prefix}.down_proj").mT, strict=True)
        for expert, (gate_up, down) in enumerate(fused):
            gate, up = gate_up.chunk(2)
            parts = {"gate": gate, "up": up, "down": down}
            tensors |= {f"{prefix}.{expert}.{part}_proj.weight": one.contiguous() for part, one in parts.items()}
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    ours, theirs = network("qwen3_vl_moe").state_dict(), load(tmp_path).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_experts_of_the_other_orientation_are_refused(network_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = network_folder("qwen3_vl_moe")
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    tensors = load_file(folder / "model.safetensors")
    key = "model.language_model.layers.0.mlp.experts.down_proj"
    tensors[key] = tensors[key].transpose(1, 2).contiguous()
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match="down_proj"):
        load(tmp_path)


def test_layers_with_experts_follow_the_config(network_folder: Callable[[str], Path]) -> None:
    config = config_of(network_folder("qwen3_vl_moe"))
    text = config["text_config"]

    def sparse() -> list[int]:
        layers = build(config).language_model.layers
        return [index for index, layer in enumerate(layers) if isinstance(layer.mlp, MixtureOfExperts)]

    assert sparse() == [0, 2, 3, 4]
    text["decoder_sparse_step"] = 2
    assert sparse() == [3]
    text["mlp_only_layers"] = None
    assert sparse() == [1, 3]
    del text["decoder_sparse_step"]
    assert sparse() == [0, 1, 2, 3, 4]
    text["num_local_experts"] = text.pop("num_experts")
    assert sparse() == [0, 1, 2, 3, 4]
    text["num_local_experts"] = 0
    assert sparse() == []


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_weights_of_experts_sum_to_one_whatever_the_config_says(
    name: str, network_folder: Callable[[str], Path]
) -> None:
    """transformers ignores the key and vLLM does not, so another value is refused."""
    config = config_of(network_folder(name))
    config["text_config"]["norm_topk_prob"] = False
    with pytest.raises(StartupError, match="norm_topk_prob"):
        models.load_spec(models.family_of(config), config)


def test_weights_of_experts_sum_to_one_if_the_config_says_so(
    network: Callable[[str], Any], network_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = network_folder("internvl_moe")
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = config_of(folder)
    config["text_config"]["norm_topk_prob"] = False
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = load(tmp_path).language_model.layers[0].mlp
    x = torch.randn(5, config["text_config"]["hidden_size"])
    normalised = network("internvl_moe").language_model.layers[0].mlp
    with torch.inference_mode():
        shares = normalised.gate(x).softmax(-1).topk(2).values.sum(-1, keepdim=True)
        nothing = torch.zeros_like(x)
        torch.testing.assert_close(given.add_to(nothing, x), normalised.add_to(nothing, x) * shares)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_text_may_have_a_section_of_its_own(name: str, network_folder: Callable[[str], Path]) -> None:
    flat = config_of(network_folder(name))
    rope = {**flat.pop("rope_scaling"), "rope_theta": flat.pop("rope_theta"), "rope_type": "default"}
    outer = ("architectures", "model_type", "vision_config", "image_token_id", "video_token_id")
    nested = {key: flat.pop(key) for key in outer}
    nested["text_config"] = {**flat, "rope_parameters": rope}
    original = config_of(network_folder(name))
    assert models.load_spec(name, nested) == models.load_spec(name, original)
    assert build(nested).is_tied == build(original).is_tied == (name == "qwen2_vl")


YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 1000}


@pytest.mark.parametrize("name", NAMES)
def test_yarn_added_as_the_readmes_say(name: str, network_folder: Callable[[str], Path]) -> None:
    """Frequencies and magnitude equal transformers'; the length follows the factor."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = config_of(network_folder(name))
    text = config.get("text_config", config)
    text["rope_scaling"] = {**text["rope_scaling"], **YARN}
    text["rope_scaling"].pop("rope_type", None)
    text["max_position_embeddings"] = 1000
    ours = build(config)
    assert ours.spec.max_position_embeddings == 4000
    with torch.device("meta"):
        theirs = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config)).model.language_model.rotary_emb
    on_cpu = type(theirs)(theirs.config)
    rope = ours.spec.text.rope
    found = inverse_frequencies(rope.theta, 2 * len(rope.divisors), torch.device("cpu"), rope.divisors)
    torch.testing.assert_close(found, on_cpu.inv_freq, rtol=1e-6, atol=0)
    assert rope.magnitude == pytest.approx(on_cpu.attention_scaling) != 1


def test_axes_that_the_config_leaves_out(network_folder: Callable[[str], Path]) -> None:
    """Releases of Qwen3-VL without `rope_scaling` have the axes of the class, as in transformers."""
    config = config_of(network_folder("qwen3_vl_moe"))
    text = config["text_config"]
    text["head_dim"] = 128
    for rope in ({}, None, {"rope_type": "default"}):
        text["rope_scaling"] = rope
        assert models.load_spec("qwen3_vl", config).text.mrope_section == (24, 20, 20)
    text["rope_scaling"] = {"mrope_section": [20, 24, 20]}
    assert models.load_spec("qwen3_vl", config).text.mrope_section == (20, 24, 20)
    text["rope_scaling"]["mrope_interleaved"] = False
    with pytest.raises(StartupError, match="mrope_interleaved"):
        models.load_spec("qwen3_vl", config)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, False),
        ({"tie_word_embeddings": True}, True),
        ({"text_config": {"tie_word_embeddings": True}}, True),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, False),
        ({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}, True),
    ],
)
def test_the_top_level_decides_whether_embeddings_are_tied(config: dict[str, Any], expected: bool) -> None:
    assert text_section(config)["tie_word_embeddings"] == expected


@table(
    ("name", "path", "value", "words"),
    [
        ("qwen2_vl", "rope_scaling.mrope_section", [4, 3, 6], "mrope_section"),  # [eng] 45
        ("qwen2_vl", "rope_scaling.mrope_interleaved", True, "mrope_interleaved"),
        ("qwen2_vl", "rope_scaling.type", "dynamic", "dynamic"),
        ("qwen2_vl", "rope_scaling.type", "yarn", "factor"),
        ("qwen2_vl", "hidden_size", 97, "hidden_size"),
        ("qwen2_vl", "use_sliding_window", True, "use_sliding_window"),
        ("qwen2_vl", "vision_config.embed_dim", None, "embed_dim"),
        ("qwen2_vl", "vision_config.hidden_size", 48, "hidden_size"),
        ("qwen2_vl", "vision_config.hidden_act", "relu", "hidden_act"),
        ("qwen2_vl", "vision_config.in_channels", 1, "in_channels"),
        ("qwen2_vl", "video_token_id", None, "video_token_id"),  # A9
        ("qwen2_5_vl", "vision_config.window_size", 27, "window_size"),
        ("qwen2_5_vl", "vision_config.fullatt_block_indexes", [5], "fullatt_block_indexes"),
        ("qwen2_5_vl", "vision_config.fullatt_block_indexes", None, "fullatt_block_indexes"),
        ("qwen3_vl_moe", "text_config.num_experts_per_tok", 7, "num_experts_per_tok"),
        ("qwen3_vl_moe", "text_config.moe_intermediate_size", None, "moe_intermediate_size"),
        ("qwen3_vl_moe", "text_config.num_experts", -1, "num_experts"),
    ],
)
def test_wrong_config_names_the_key(
    name: str, path: str, value: object, words: str, network_folder: Callable[[str], Path]
) -> None:  # [eng] 45
    config = with_value(config_of(network_folder(name)), path, value)
    with pytest.raises(StartupError, match=words):
        build(config)
