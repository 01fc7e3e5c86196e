"""Spec and network of Gemma 4 against transformers."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from checkpoints import gemma4
from networks import config_of, load, with_value
from references.networks import ORACLES
from tables import table

from saccade.errors import StartupError
from saccade.models.gemma4.layout import Layout
from saccade.models.gemma4.spec import TEXT_DEFAULTS, VISION_DEFAULTS, Spec
from saccade.models.spec import MediaShape
from saccade.nn.backends.torch_sdpa import VisionAttentionBackend
from saccade.nn.layerwise import complete

SIZES = [(1, 1), (64, 64), (150, 100), (300, 40), (40, 300), (5000, 1)]
"""(width, height)"""

Folder = Callable[[str], Path]


@pytest.mark.parametrize("name", gemma4.RELEASES)
@torch.inference_mode()
def test_features_equal_the_reference(name: str, network_folder: Folder) -> None:  # A10
    folder = network_folder(name)
    network: Any = load(folder)
    oracle: Any = ORACLES[name](folder)
    items = [engines.photo(folder, size, seed) for seed, size in enumerate(SIZES)]
    pixels = torch.frombuffer(bytearray(b"".join(item.inline or b"" for item in items)), dtype=torch.uint8)
    metadata = network.prepare([MediaShape(item.grid) for item in items], VisionAttentionBackend())
    assert [network.spec.item_tokens(item.grid) for item in items] == [item.spans[0].length for item in items]
    frames = [frame for item in items for frame in oracle.frames(item)]
    expected = [
        oracle.model.model.get_image_features(patches[None], places[None], return_dict=True).pooler_output[0]
        for patches, places in frames
    ]
    torch.testing.assert_close(complete(network.encode(pixels, metadata)), torch.cat(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_engine_counts_as_the_gateway(size: tuple[int, int], network_folder: Folder) -> None:
    folder = network_folder("gemma4")
    layout = Layout(config_of(folder), json.loads((folder / "preprocessor_config.json").read_text()))
    spec, shape = Spec.read_config(config_of(folder)), layout.image(*size, layout.settings)
    assert spec.item_tokens(shape.grid) == shape.num_tokens
    assert spec.pixel_shape(shape.grid) == shape.pixel_shape
    assert spec.span_lengths(shape.grid, "image") == (shape.num_tokens,)
    assert spec.encode_cost(shape.grid) == shape.pixel_shape[0]


def test_missing_keys_equal_the_reference() -> None:
    from transformers import Gemma4TextConfig, Gemma4VisionConfig

    for reference, ours in ((Gemma4TextConfig(), TEXT_DEFAULTS), (Gemma4VisionConfig(), VISION_DEFAULTS)):
        theirs: Mapping[str, Any] = reference.to_dict()
        named = {key: theirs[key] for key in ours if key not in ("global_head_dim", "rope_parameters")}
        assert named == {key: ours[key] for key in named}
        assert getattr(reference, "attention_bias", False) in (None, False)


@table(
    ("path", "value", "words"),
    [
        ("text_config.hidden_activation", "silu", "hidden_activation"),
        ("text_config.layer_types", ["full_attention"], "layer_types"),
        ("text_config.num_kv_shared_layers", 4, "num_kv_shared_layers"),
        ("text_config.use_bidirectional_attention", "all", "use_bidirectional_attention"),
        ("text_config.top_k_experts", 9, "top_k_experts"),
        ("text_config.num_global_key_value_heads", 3, "num_global_key_value_heads"),
        ("text_config.rope_parameters.full_attention.rope_type", "yarn", "rope_type"),
        ("text_config.sliding_window", None, "sliding_window"),
        ("vision_config.num_key_value_heads", 2, "num_key_value_heads"),
        ("vision_config.head_dim", 10, "head_dim"),
        ("vision_config.attention_bias", True, "attention_bias"),
        ("vision_config", None, "vision_config"),
        ("image_token_id", 10**6, "image_token_id"),
    ],
)
def test_wrong_configurations_are_refused(path: str, value: object, words: str, checkpoint: Folder) -> None:
    with pytest.raises(StartupError, match=words):
        Spec.read_config(with_value(config_of(checkpoint("gemma4")), path, value))


@pytest.mark.parametrize("name", ["gemma4", "gemma4_unified"])
@torch.inference_mode()
def test_an_image_that_fills_a_graph_may_be_wider_than_the_table(name: str, network_folder: Folder) -> None:
    network: Any = load(network_folder(name))
    merge, size = network.spec.vision.merge_size, network.spec.vision.table_size
    grid = network.spec.padding_grid((size + 1) * merge**2)
    assert grid == (1, merge, (size + 1) * merge)
    metadata = network.prepare([MediaShape(grid)], VisionAttentionBackend())
    places = metadata.places if name == "gemma4" else metadata
    assert (int(places[:, 0].max()), int(places[:, 1].max())) == (size - 1, int(places[-1, 1]))


def test_last_layer_attends_to_all_tokens(checkpoint: Folder) -> None:
    """As in the reference, whatever the list says."""
    config = with_value(config_of(checkpoint("gemma4")), "text_config.layer_types", [gemma4.SLIDING] * 4)
    assert [kind.window for kind in Spec.read_config(config).text.kinds] == [40, 40, 40, None]


def test_sound_is_not_loaded(network_folder: Folder) -> None:
    network = load(network_folder("gemma4_e2b"))
    assert network.locate("model.audio_tower.layers.0.attn.q_proj.weight") is None
    assert network.locate("model.embed_audio.embedding_projection.weight") is None
    shared = "model.language_model.layers.5.self_attn"
    assert [network.locate(f"{shared}.{name}.weight") for name in ("k_proj", "v_proj", "k_norm")] == [None] * 3
    assert network.locate(f"{shared}.q_proj.weight") is not None
