"""LLaVA's spec and network against transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import pytest
import torch
from networks import build, check_features, config_of, with_value
from references.networks import LlavaOracle
from tables import table

from saccade.errors import InvalidValue, StartupError
from saccade.models.llava import tiles
from saccade.models.llava.layout import Layout
from saccade.models.llava.spec import DEFAULTS, STYLES, Spec
from saccade.models.network import Target
from saccade.models.spec import MediaShape, Paged

SIZES = [(1, 1), (56, 56), (57, 55), (112, 112), (150, 100), (90, 230), (300, 40), (40, 300), (777, 5), (640, 481)]
"""(width, height); their tiles lie in one row, one column or a square, with padding above, beside and nowhere."""

NAMES = ["llava", "llava_next"]


def layout_of(folder: Path) -> Layout:
    return Layout(config_of(folder), json.loads((folder / "preprocessor_config.json").read_text()))


@pytest.mark.parametrize("name", NAMES)
def test_features_equal_the_reference(name: str, network_folder: Callable[[str], Path]) -> None:  # A10
    folder = network_folder(name)
    check_features(LlavaOracle(folder), folder, SIZES)


@table("size", SIZES)
def test_order_of_features_equals_the_reference(size: tuple[int, int], network_folder: Callable[[str], Path]) -> None:
    from transformers import LlavaNextConfig, LlavaNextModel

    folder = network_folder("llava_next")
    shape = layout_of(folder).image(*size, layout_of(folder).settings)
    spec = Spec.read_config(config_of(folder))
    kept = spec.unpadded_size(shape.grid, shape.original_size)
    order = tiles.feature_order(*shape.grid[1:], kept, spec.vision.side)
    # The features are their own numbers.
    numbers = torch.arange(shape.pixel_shape[0] * 16).view(-1, 16, 1)
    owner: Any = SimpleNamespace(config=LlavaNextConfig.from_pretrained(folder))
    (expected,), _ = LlavaNextModel.pack_image_features(
        owner, [numbers], torch.tensor([shape.original_size]), "default", torch.tensor([tiles.NEWLINE])
    )
    assert order.tolist() == expected.flatten().tolist()


@table("name", NAMES)
@table("size", SIZES)
def test_engine_counts_as_the_gateway(name: str, size: tuple[int, int], network_folder: Callable[[str], Path]) -> None:
    layout, spec = layout_of(network_folder(name)), Spec.read_config(config_of(network_folder(name)))
    shape = layout.image(*size, layout.settings)
    assert spec.item_tokens(shape.grid, shape.original_size) == shape.num_tokens
    assert spec.encoder_output_values(shape.grid, shape.original_size) == shape.num_tokens * 96
    assert spec.pixel_shape(shape.grid) == shape.pixel_shape
    assert spec.encode_cost(shape.grid) == (shape.pixel_shape[0] if name == "llava_next" else 1) * 16


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_as_near_as_it_can_be(name: str, network_folder: Callable[[str], Path]) -> None:
    rows = []
    for dtype in ("float32", "bfloat16"):
        subject = engines.engine(network_folder(name), dtype=dtype)
        logits = engines.record_logits(subject)
        engines.drain(subject, engines.request(network_folder(name), [5, ((192, 128), 1), 9], max_tokens=1))
        rows.append(logits["a"][0])
    differences = (rows[0] - rows[1]).abs() / rows[0].std()
    assert differences.mean() < 0.02
    assert differences.max() < 0.1


@table("max_patches", [0, 16, 31, 32, 79, 80, 159, 160])
def test_square_grid_stays_below_the_budget(max_patches: int, network_folder: Callable[[str], Path]) -> None:
    spec = Spec.read_config(config_of(network_folder("llava_next")))
    grid = spec.square_grid(max_patches)
    assert spec.encode_cost(grid) <= max(max_patches, 32)
    assert spec.item_tokens(grid) == 16 + grid[1] * (grid[2] + 1)
    assert Spec.read_config(config_of(network_folder("llava"))).square_grid(max_patches) == (1, 4, 4)


@table(
    ("name", "shape"),
    [
        ("llava", MediaShape((1, 4, 8))),
        ("llava_next", MediaShape((1, 4, 6))),
        ("llava_next", MediaShape((1, 0, 4))),
        ("llava_next", MediaShape((2, 4, 4))),
        ("llava_next", MediaShape((1, 4, 4), (0, 9))),
        # The size leaves the features of the base view alone, so these would pass as 16 tokens.
        ("llava_next", MediaShape((1, 1 << 40, 4), (1, 1 << 60))),
    ],
)
def test_impossible_shapes_are_refused(name: str, shape: MediaShape, network_folder: Callable[[str], Path]) -> None:
    with pytest.raises(InvalidValue):
        Spec.read_config(config_of(network_folder(name))).item_tokens(shape.grid, shape.original_size)


def test_the_encoder_cache_accounts_for_what_remains_without_padding(network_folder: Callable[[str], Path]) -> None:
    folder = network_folder("llava_next")
    subject = engines.engine(folder)
    asked = engines.request(folder, [3, ((300, 40), 1), 2, ((300, 100), 2)], max_tokens=1)
    assert asked.media[0].grid == asked.media[1].grid
    assert asked.media[0].spans[0].length < asked.media[1].spans[0].length
    engines.drain(subject, asked)
    num_values = sum(item.spans[0].length for item in asked.media) * 96
    cache = subject.scheduler.encoder_scheduler.encoder_cache
    held = engines.local(subject).runner.encoder_outputs.values()
    assert cache.used_bytes == num_values * 4 == sum(features.nbytes for features in held)


def test_missing_settings_equal_the_reference() -> None:
    from transformers import LlamaConfig, LlavaConfig, LlavaNextConfig, MistralConfig

    for reference in (LlavaConfig(), LlavaNextConfig()):
        assert {key: getattr(reference, key) for key in DEFAULTS} == DEFAULTS
    for text in (LlamaConfig(), MistralConfig()):
        defaults = dict(STYLES[text.model_type].defaults)
        assert defaults.pop("rope_theta") == text.rope_parameters["rope_theta"]
        assert {key: getattr(text, key) for key in defaults} == defaults
    kinds = {"llava": "llama", "llava_next": "mistral"}
    llava, following = (
        Spec.read_config({"model_type": name, "text_config": {"model_type": kind, "vocab_size": 32064}})
        for name, kind in kinds.items()
    )
    assert llava.kv_specs == (Paged(32, 128, 128),) * 32
    assert following.kv_specs == (Paged(8, 128, 128),) * 32
    assert (llava.text.sliding_window, following.text.sliding_window) == (None, 4096)
    assert (llava.vision.depth, llava.num_vision_blocks, llava.vision.hidden_size) == (24, 23, 1024)


@table(
    ("name", "target"),
    [
        ("language_model.model.embed_tokens.weight", ("language_model.embed_tokens.weight", None)),
        ("model.language_model.layers.3.mlp.up_proj.weight", ("language_model.layers.3.mlp.gate_up_proj.weight", 1)),
        ("language_model.lm_head.weight", ("lm_head.weight", None)),
        ("lm_head.weight", ("lm_head.weight", None)),
        ("vision_tower.vision_model.pre_layrnorm.bias", ("vision_tower.pre_layrnorm.bias", None)),
        ("model.vision_tower.pre_layrnorm.bias", ("vision_tower.pre_layrnorm.bias", None)),
        (
            "vision_tower.vision_model.encoder.layers.3.self_attn.v_proj.bias",
            ("vision_tower.layers.3.self_attn.qkv_proj.bias", 2),
        ),
        ("vision_tower.vision_model.encoder.layers.4.mlp.fc1.bias", None),
        ("vision_tower.vision_model.post_layernorm.weight", None),
        ("model.multi_modal_projector.linear_1.bias", ("multi_modal_projector.linear_1.bias", None)),
        ("image_newline", ("image_newline", None)),
    ],
)
def test_names_of_old_and_new_releases(
    name: str, target: tuple[str, int | None] | None, network_folder: Callable[[str], Path]
) -> None:
    folder = network_folder("llava_next")
    found = build(config_of(folder), json.loads((folder / "preprocessor_config.json").read_text())).locate(name)
    assert (found and found[:2]) == target


def test_the_placeholder_is_that_of_the_gateway() -> None:  # E2: config.json, else the tokenizer's, else the default
    config = {"model_type": "llava", "text_config": {"vocab_size": 32064}}
    assert Spec.read_config(config).placeholder_token_ids == (32000,)
    assert Spec.read_config({**config, "placeholder_token_id": 7}).placeholder_token_ids == (7,)
    assert Spec.read_config({**config, "placeholder_token_id": 7, "image_token_id": 0}).placeholder_of == {"image": 0}


def test_a_tied_head_is_the_embedding(network_folder: Callable[[str], Path]) -> None:
    folder = network_folder("llava")
    config = config_of(folder)
    config["text_config"]["tie_word_embeddings"] = True
    network = build(config, json.loads((folder / "preprocessor_config.json").read_text()))
    assert network.lm_head is None
    assert network.locate("language_model.lm_head.weight") == Target("language_model.embed_tokens.weight")


@table(
    ("path", "value", "words"),
    [
        ("text_config.model_type", "qwen2", "model_type"),
        ("text_config", 5, "text_config"),
        ("text_config.hidden_size", "96", "hidden_size"),
        ("vision_config.num_attention_heads", 5, "num_attention_heads"),
        ("vision_feature_layer", [-2, -5], "feature layer"),
        ("vision_feature_layer", -7, "feature layer"),
        ("projector_hidden_act", "relu", "projector_hidden_act"),
        ("image_token_index", 10**6, "image_token_index"),
        ("image_token_index", "<image>", "image_token_index"),  # A9
    ],
)
def test_a_wrong_config_names_the_key(
    path: str, value: object, words: str, network_folder: Callable[[str], Path]
) -> None:
    config = with_value(config_of(network_folder("llava")), path, value)
    with pytest.raises(StartupError, match=words):
        Spec.read_config(config)
