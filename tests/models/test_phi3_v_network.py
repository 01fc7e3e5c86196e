"""The network of Phi-3-vision against its reference, and what it refuses."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
import torch
from references.phi3_v_network import Phi3VOracle
from tables import table

from saccade import models
from saccade.engine.config import EngineConfig
from saccade.engine.executor.loader import load_model
from saccade.errors import InvalidValue, StartupError
from saccade.models.files import engine_config, read_model_files
from saccade.models.network import Target
from saccade.models.phi3_v.hd_order import feature_order
from saccade.models.phi3_v.layout import Layout
from saccade.models.phi3_v.spec import Spec
from saccade.models.spec import MediaShape
from saccade.nn.backends.torch_sdpa import VisionAttentionBackend
from saccade.nn.layerwise import complete

SIZES = [(100, 300), (200, 100), (60, 60)]
"""Padded to 2 x 1, 1 x 2 and 1 x 1 crops."""


@pytest.fixture(scope="module")
def folder(network_folder: Callable[[str], Path]) -> Path:
    return network_folder("phi3_v")


@pytest.fixture(scope="module")
def network(folder: Path) -> Any:
    return load_model(EngineConfig(str(folder), "tiny", device="cpu"), lambda *_: None).network


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Phi3VOracle:
    return Phi3VOracle(folder)


def config_of(folder: Path, **changes: Any) -> Mapping[str, Any]:
    """What the spec is read from."""
    return {**engine_config(read_model_files(folder), models.families()["phi3_v"]), **changes}


def test_features_equal_the_reference(folder: Path, network: Any, oracle: Phi3VOracle) -> None:  # A10
    items = [engines.photo(folder, size, seed) for seed, size in enumerate(SIZES)]
    pixels = torch.frombuffer(bytearray(b"".join(item.inline or b"" for item in items)), dtype=torch.uint8)
    with torch.inference_mode():
        metadata = network.prepare([MediaShape(item.grid) for item in items], VisionAttentionBackend())
        features = complete(network.encode(pixels, metadata))
    counts = [network.spec.item_tokens(item.grid) for item in items]
    assert counts == [item.spans[0].length for item in items] == [469, 457, 313]
    torch.testing.assert_close(features, torch.cat([oracle.features(item) for item in items]), atol=1e-4, rtol=0)


def test_many_crops_equal_the_reference(network: Any, oracle: Phi3VOracle) -> None:
    """An image of 2 x 3 crops, as releases with more crops make it."""
    grid = (1, 48, 72)
    pixels = torch.randint(256, (3, 672, 1008), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        features = complete(
            network.encode(pixels.flatten(), network.prepare([MediaShape(grid)], VisionAttentionBackend()))
        )
        expected = oracle.model.features(pixels, oracle.mean, oracle.std)
    assert len(features) == network.spec.item_tokens(grid)
    torch.testing.assert_close(features, expected, atol=1e-4, rtol=0)


def test_order_of_features() -> None:
    """Two images: 2 x 1 crops, then one crop. Views have 144 features each; newline is 0, separator 1."""
    order = feature_order([(2, 1), (1, 1)])
    whole = [np.append(row, 0) for row in np.arange(2, 2 + 5 * 144).reshape(60, 12)]
    overviews, details = (whole[0:12], whole[36:48]), (whole[12:36], whole[48:60])
    expected = [np.concatenate([*parts, [1], *views]) for parts, views in zip(details, overviews, strict=True)]
    assert order.tolist() == np.concatenate(expected).tolist()
    side_by_side = feature_order([(1, 2)])[:25]
    assert side_by_side.tolist() == [*range(146, 158), *range(290, 302), 0]


@pytest.mark.ci
@pytest.mark.parametrize(("max_model_len", "long"), [(None, True), (4097, True), (4096, False)])
def test_length_chooses_the_set_of_factors(folder: Path, max_model_len: int | None, long: bool) -> None:
    blocks = {"num_blocks": 257, "max_model_len": max_model_len}
    subject = engines.engine(folder, **blocks)
    logits = engines.record_logits(subject)
    asked = engines.request(folder, [40, ((100, 100), 1), 60], max_tokens=6)
    answer = engines.drain(subject, asked).answers["a"]
    ours = torch.stack(logits["a"])
    same, other = (Phi3VOracle(folder, which).logits(asked, answer.token_ids) for which in (long, not long))
    shown = [index for index in range(ours.shape[1]) if index != engines.placeholder_id(folder)]
    torch.testing.assert_close(ours[:, shown], same[:, shown], atol=1e-4, rtol=0)
    assert (ours[:, shown] - other[:, shown]).abs().max() > 0.05


def test_spec_agrees_with_the_layout(folder: Path) -> None:
    spec = Spec.read_config(config_of(folder))
    layout = Layout({}, {"num_crops": 16})
    for size in [(1, 1), (1280, 960), (90, 1000), (1600, 100)]:
        counted = layout.image(*size, layout.settings)
        assert spec.item_tokens(counted.grid) == counted.num_tokens
        assert spec.pixel_shape(counted.grid) == counted.pixel_shape
        assert spec.encoder_output_values(counted.grid) == counted.num_tokens * 96


@pytest.mark.parametrize("grid", [(2, 24, 24), (1, 12, 24), (1, 24, 25), (1, 0, 24)])
def test_grids_that_are_not_of_crops_are_refused(folder: Path, grid: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidValue, match="multiples of 24"):
        Spec.read_config(config_of(folder)).item_tokens(grid)


@pytest.mark.parametrize(("max_patches", "side"), [(0, 1), (1152, 1), (2879, 1), (2880, 2), (16384, 5)])
def test_square_grid_has_room_for_the_global_view(folder: Path, max_patches: int, side: int) -> None:
    spec = Spec.read_config(config_of(folder))
    grid = spec.square_grid(max_patches)
    assert grid == (1, 24 * side, 24 * side)
    assert side == 1 or spec.encode_cost(grid) <= max_patches


def test_names_of_tensors(network: Any) -> None:
    vision = "model.vision_embed_tokens."
    tower = f"{vision}img_processor.vision_model."
    assert network.locate(f"{tower}encoder.layers.0.self_attn.v_proj.bias") == Target(
        "vision_tower.layers.0.self_attn.qkv_proj.bias", 2
    )
    # The last block and the norm after it compute nothing that is used.
    assert network.locate(f"{tower}encoder.layers.4.layer_norm1.weight") is None
    assert network.locate(f"{tower}post_layernorm.weight") is None
    assert network.locate(f"{vision}wte.weight") == network.locate("model.embed_tokens.weight")


def test_placeholder_comes_from_the_tokenizers_files(folder: Path) -> None:
    placeholder = config_of(folder)["placeholder_token_id"]
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    assert [entry["id"] for entry in tokens if entry["content"] == "<|image|>"] == [placeholder]
    spec = Spec.read_config(config_of(folder))
    assert (spec.placeholder_of, spec.placeholder_token_ids) == ({"image": placeholder}, (placeholder,))


def test_the_release_describes_no_vision_tower(folder: Path) -> None:
    config = dict(config_of(folder, img_processor={"image_dim_out": 1024}))
    del config["vision_config"]
    spec = Spec.read_config(config)
    assert (spec.vision.depth, spec.vision.hidden_size, spec.num_blocks) == (24, 1024, 23)


@table(
    ("changes", "words"),
    [
        ({"placeholder_token_id": None}, r"<\|image\|>"),  # A9
        ({"placeholder_token_id": 960}, r"<\|image\|>"),
        ({"embd_layer": {"projection_cls": "mlp"}}, "hd_transform_order"),
        ({"embd_layer": {"projection_cls": "linear", "hd_transform_order": "sub_glb"}}, "projection_cls"),
        ({"embd_layer": None}, "embd_layer"),
        ({"img_processor": {"image_dim_out": 64}}, "image_dim_out"),
        ({"img_processor": {"image_dim_out": 40, "type_feature": "cls_patch"}}, "type_feature"),
        ({"img_processor": {"image_dim_out": 40, "layer_idx": -9}}, "feature layer"),
        ({"vision_config": {"patch_size": 16}}, "patches of 14"),
        ({"rope_scaling": {"type": "dynamic"}}, "dynamic"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_wrong_config_names_the_key(folder: Path, changes: dict[str, Any], words: str) -> None:  # [eng] 45
    with pytest.raises(StartupError, match=words):
        Spec.read_config(config_of(folder, **changes))


def test_bfloat16_is_as_near_as_it_can_be(folder: Path) -> None:
    rows = []
    for dtype in ("float32", "bfloat16"):
        subject = engines.engine(folder, dtype=dtype)
        logits = engines.record_logits(subject)
        engines.drain(subject, engines.request(folder, [5, ((192, 128), 1), 9], max_tokens=1))
        rows.append(logits["a"][0])
    differences = (rows[0] - rows[1]).abs() / rows[0].std()
    assert differences.mean() < 0.02
    assert differences.max() < 0.1
