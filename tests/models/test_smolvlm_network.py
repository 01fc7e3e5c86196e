"""Spec and network of Idefics3 and SmolVLM against transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import msgspec
import pytest
import torch
from networks import build, check_features, config_of
from references.networks import TilesOracle
from tables import table

from saccade.errors import InvalidValue, StartupError
from saccade.models.network import Target
from saccade.models.smolvlm.layout import Layout
from saccade.models.smolvlm.network import Network, position_ids
from saccade.models.smolvlm.spec import Spec
from saccade.models.spec import Paged
from saccade.protocol.media import Span

SIZES = [(1, 1), (64, 64), (150, 100), (300, 40), (40, 300)]
"""(width, height)"""

Folder = Callable[[str], Path]


def layout_of(folder: Path) -> Layout:
    return Layout(config_of(folder), json.loads((folder / "preprocessor_config.json").read_text()))


@pytest.mark.parametrize("name", ["smolvlm", "smolvlm2"])
def test_features_equal_the_reference(name: str, network_folder: Folder) -> None:  # A10
    folder = network_folder(name)
    check_features(TilesOracle(folder), folder, SIZES)


@table("side", [1, 2, 3, 4, 8, 14, 26, 27, 32, 70])
def test_position_ids_equal_the_reference(side: int) -> None:
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionConfig, Idefics3VisionEmbeddings

    reference = Idefics3VisionEmbeddings(Idefics3VisionConfig(hidden_size=1, image_size=side, patch_size=1))
    # The patches are zeros, and the positions their own numbers.
    for parameter in reference.patch_embedding.parameters():
        parameter.data.zero_()
    reference.position_embedding.weight.data = torch.arange(side**2, dtype=torch.float32).unsqueeze(1)
    expected = reference(torch.zeros(1, 3, side, side), torch.ones(1, side, side, dtype=torch.bool))
    assert position_ids(side).tolist() == expected.flatten().tolist()


@pytest.mark.parametrize("size", SIZES)
def test_engine_counts_as_the_gateway(size: tuple[int, int], network_folder: Folder) -> None:
    layout, spec = layout_of(network_folder("smolvlm")), Spec.read_config(config_of(network_folder("smolvlm")))
    shape = layout.image(*size, layout.settings)
    assert spec.item_tokens(shape.grid) == shape.num_tokens
    assert spec.encoder_output_values(shape.grid) == shape.num_tokens * 96
    assert spec.pixel_shape(shape.grid) == shape.pixel_shape
    assert spec.encode_cost(shape.grid) == shape.pixel_shape[0] * 16


@table("max_patches", [0, 16, 31, 32, 79, 80, 159, 160])
def test_square_grid_stays_below_the_budget(max_patches: int, network_folder: Folder) -> None:
    spec = Spec.read_config(config_of(network_folder("smolvlm")))
    assert spec.encode_cost(spec.square_grid(max_patches)) <= max(max_patches, 16)


@pytest.mark.parametrize("grid", [(1, 4, 6), (1, 0, 4), (2, 4, 4)])
def test_impossible_grids_are_refused(grid: tuple[int, int, int], network_folder: Folder) -> None:
    with pytest.raises(InvalidValue):
        Spec.read_config(config_of(network_folder("smolvlm"))).item_tokens(grid)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda spans: spans[::-1], "prompt's order"),
        (lambda spans: spans[1:], "cover"),
        (lambda spans: (), "cover"),
        (lambda spans: (Span(spans[0].start - 1, 4), *spans[1:]), "not placeholders"),
    ],
)
def test_wrong_spans_are_refused(change: Any, words: str, network_folder: Folder) -> None:
    folder = network_folder("smolvlm")
    subject = engines.engine(folder)
    asked = engines.request(folder, [5, ((150, 100), 1), 9], max_tokens=4)
    (item,) = asked.media
    wrong = msgspec.structs.replace(asked, media=(msgspec.structs.replace(item, spans=change(item.spans)),))
    failure = engines.drain(subject, wrong).answers["a"].failure
    assert failure is not None
    assert failure.param == "media[0].spans"
    assert words in failure.message


def test_empty_config_has_the_reference_defaults() -> None:
    from transformers import Idefics3Config

    reference = Idefics3Config()
    spec = Spec.read_config({"image_token_id": 7, "scale_factor": 7})
    assert spec.text.norm_eps == reference.text_config.rms_norm_eps
    assert spec.kv_specs == (Paged(32, 128, 128),) * 32
    vision: Any = reference.vision_config
    assert (spec.vision.hidden_size, spec.vision.num_heads, spec.vision.depth) == (
        vision.hidden_size, vision.num_attention_heads, vision.num_hidden_layers,
    )  # fmt: skip
    assert (spec.vision.activation, spec.vision.norm_eps) == (vision.hidden_act, vision.layer_norm_eps)
    with pytest.raises(StartupError, match=str(reference.image_token_id)):
        Spec.read_config({})


def network_of(folder: Path, **changes: Any) -> Network:
    network: Network = build(config_of(folder) | changes, json.loads((folder / "preprocessor_config.json").read_text()))
    return network


def test_a_tied_head_is_the_embedding(network_folder: Folder) -> None:
    network = network_of(network_folder("smolvlm"), tie_word_embeddings=True)
    assert network.lm_head is None
    assert network.locate("lm_head.weight") == Target("language_model.embed_tokens.weight")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text_config": {"model_type": "qwen2"}}, "model_type"),
        ({"text_config": 5}, "text_config"),
        ({"vision_config": {"num_attention_heads": 5}}, "num_attention_heads"),
        ({"image_token_id": 10**6}, "image_token_id"),
        ({"scale_factor": 3}, "scale_factor"),
    ],
)
def test_a_wrong_config_names_the_key(changes: dict[str, Any], words: str, network_folder: Folder) -> None:
    with pytest.raises(StartupError, match=words):
        Spec.read_config(config_of(network_folder("smolvlm")) | changes)
