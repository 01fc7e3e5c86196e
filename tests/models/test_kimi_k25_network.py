"""The network's parts against transformers, the encoder's contract, and what the configuration may say."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
import torch
from checkpoints.kimi_k25 import TEXT, VISION, write_network
from checkpoints.quantised import quantise
from networks import build, config_of, tokens_of, with_value
from references.networks import KimiOracle
from tables import table
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from saccade import models
from saccade.engine.config import EngineConfig
from saccade.engine.executor import memory
from saccade.engine.executor.loader import load_model
from saccade.errors import InvalidValue, StartupError
from saccade.models.backbones.deepseek_config import ExpertConfig
from saccade.models.backbones.deepseek_text import ExpertRouter
from saccade.models.network import Target
from saccade.models.spec import MediaShape
from saccade.nn.backends.torch_sdpa import VisionAttentionBackend
from saccade.nn.context import Heads, PackedLayout
from saccade.nn.layerwise import complete
from saccade.nn.ops import normalise_pixels
from saccade.nn.vision import bicubic_taps

# In order: odd numbers of merged rows, the size of the table, one larger, one long, the smallest.
GRIDS = [(1, 6, 10), (1, 8, 8), (1, 18, 22), (1, 2, 40), (1, 2, 2)]
ITEMS = [MediaShape(grid) for grid in GRIDS]
COUNTS = [15, 16, 99, 20, 1]


@pytest.fixture(scope="module")
def folder(network_folder: Callable[[str], Path]) -> Path:
    return network_folder("kimi_k25")


@pytest.fixture(scope="module")
def network(folder: Path) -> Any:
    return load_model(EngineConfig(str(folder), "tiny", device="cpu"), lambda *_: None).network


@pytest.fixture(scope="module")
def oracle(folder: Path) -> KimiOracle:
    return KimiOracle(folder)


def pixels(grids: list[tuple[int, int, int]] = GRIDS) -> torch.Tensor:
    total = sum(rows * columns for _, rows, columns in grids)
    return torch.randint(0, 256, (total * 588,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def test_vision_tower_equals_the_reference(network: Any, oracle: KimiOracle) -> None:  # A10
    metadata = network.prepare(ITEMS, VisionAttentionBackend())
    features = complete(network.encode(pixels(), metadata))
    normalised = (pixels().view(-1, 3, 14, 14).float() / 255 - 0.5) / 0.5
    expected = oracle.model.model.get_image_features(normalised, torch.tensor(GRIDS), return_dict=True)
    torch.testing.assert_close(features, torch.cat(tuple(expected.pooler_output)), atol=1e-4, rtol=0)
    assert tokens_of(network, ITEMS) == COUNTS


CLIPS = [(4, 6, 10), (1, 4, 6), (3, 18, 22), (2, 2, 2), (7, 4, 4)]
"""The last is a video of two clips."""


@torch.inference_mode()
def test_clips_equal_the_reference(network: Any, oracle: KimiOracle) -> None:  # A10
    given = torch.randint(0, 256, (sum(t * h * w for t, h, w in CLIPS) * 588,), dtype=torch.uint8)
    items = [MediaShape(grid, modality="video") for grid in CLIPS]
    metadata = network.prepare(items, VisionAttentionBackend())
    features = complete(network.encode(given, metadata))
    normalised = (given.view(-1, 3, 14, 14).float() / 255 - 0.5) / 0.5
    expected, start = [], 0
    for grid in [*CLIPS[:-1], (4, 4, 4), (3, 4, 4)]:
        stop = start + grid[0] * grid[1] * grid[2]
        tower = oracle.model.model.vision_tower(normalised[start:stop], grid_thw=torch.tensor([grid]))
        expected.append(oracle.model.model.mm_projector(tower.pooler_output).squeeze(1))
        start = stop
    torch.testing.assert_close(features, torch.cat(expected), atol=1e-4, rtol=0)
    assert tokens_of(network, items) == [15, 6, 99, 1, 8]


@torch.inference_mode()
def test_a_video_of_one_frame_is_an_image(network: Any) -> None:
    grid, backend = (1, 6, 10), VisionAttentionBackend()
    features = []
    for grids in ([grid], [grid, (2, 4, 4)]):
        metadata = network.prepare([MediaShape(one, modality="video") for one in grids], backend)
        given = torch.cat([pixels([grid]), torch.zeros(588 * 32 * (len(grids) - 1), dtype=torch.uint8)])
        features.append(complete(network.encode(given, metadata))[:15])
    torch.testing.assert_close(*features, atol=1e-5, rtol=0)


@pytest.mark.parametrize("grid", GRIDS)
def test_images_do_not_see_each_other(network: Any, grid: tuple[int, int, int]) -> None:
    alone, together = ([MediaShape(one) for one in grids] for grids in ([grid], [(1, 4, 4), grid]))
    with torch.inference_mode():
        first = complete(network.encode(pixels([grid]), network.prepare(alone, VisionAttentionBackend())))
        joined = torch.cat((pixels([(1, 4, 4)]), pixels([grid])))
        second = complete(network.encode(joined, network.prepare(together, VisionAttentionBackend())))
    torch.testing.assert_close(second[4:], first, atol=1e-5, rtol=0)


@table("size", [1, 2, 5, 8, 20, 64])
def test_positions_are_resampled_as_by_interpolation(size: int) -> None:
    table = torch.randn(8, generator=torch.Generator().manual_seed(0))
    entries, weights = bicubic_taps(np.arange(size), size, 8)
    # Along one axis: bicubic interpolation takes images only, and of one row every row is the same.
    image = table.view(1, 1, 1, 8)
    expected = functional.interpolate(image, size=(1, size), mode="bicubic").flatten()
    made = (table[torch.from_numpy(entries)] * torch.from_numpy(weights)).sum(1)
    torch.testing.assert_close(made, expected, atol=5e-6, rtol=0)
    if size == 8:
        assert torch.equal(made, table)


def test_normalisation_is_the_releases(network: Any) -> None:  # F4
    every_byte = torch.arange(256, dtype=torch.uint8).view(1, 256).repeat(3, 1).view(1, -1)
    normalised = normalise_pixels(every_byte, *network.scaled_mean_std, torch.float32)
    expected = (((np.arange(256) / 255.0).astype(np.float32) - 0.5) * (1.0 / 0.5)).astype(np.float32)
    torch.testing.assert_close(normalised.view(3, 256), torch.from_numpy(expected).expand(3, -1), atol=1e-6, rtol=0)


class _NoSync(TorchDispatchMode):
    """Refuses every operation that makes the host wait for a tensor's content."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(word in func.name() for word in ("_local_scalar_dense", "nonzero", "unique", "masked_select"))
        return func(*args, **kwargs or {})


def test_encode_does_not_sync(network: Any) -> None:  # C3, [eng] 35
    patches = pixels()
    with torch.no_grad(), _NoSync():  # in inference mode .item() would not pass the dispatcher
        complete(network.encode(patches, network.prepare(ITEMS, VisionAttentionBackend())))
        clip = network.prepare([MediaShape((4, 6, 10), modality="video")], VisionAttentionBackend())
        complete(network.encode(pixels([(1, 24, 10)]), clip))
        with pytest.raises(AssertionError):  # the check itself works
            patches[0].item()


def test_encode_never_looks_at_the_device(folder: Path) -> None:  # C3: a meta tensor has no content to look at
    network = build(config_of(folder))
    network.finish()
    with torch.inference_mode():
        features = complete(network.encode(pixels().to("meta"), network.prepare(ITEMS, VisionAttentionBackend())))
    assert (features.device.type, features.shape) == ("meta", (sum(COUNTS), TEXT["hidden_size"]))


class _Recording(VisionAttentionBackend):
    def __init__(self) -> None:
        self.layouts: list[PackedLayout] = []

    def packed(self, heads: Heads, layout: PackedLayout, scale: float | None = None) -> torch.Tensor:
        self.layouts.append(layout)
        return super().packed(heads, layout, scale)


def test_every_block_gets_the_metadata(network: Any) -> None:  # C1, [eng] 34
    backend = _Recording()
    with torch.inference_mode():
        complete(network.encode(pixels(), network.prepare(ITEMS, backend)))
    assert len(backend.layouts) == VISION["vt_num_hidden_layers"]
    for layout in backend.layouts:
        assert layout.cu_seqlens.tolist() == [0, 60, 124, 520, 600, 604]
        assert (layout.max_seqlen, layout.sequence_lengths) == (396, (60, 64, 396, 80, 4))


VARIANTS: dict[str, dict[str, Any]] = {
    "queries without a latent": {"q_lora_rank": None},
    "biases": {"attention_bias": True},
    "groups of experts": {"n_group": 4, "topk_group": 2, "norm_topk_prob": False},
    "no longer context": {"rope_scaling": None},
    "other magnitudes": {
        "rope_scaling": {**TEXT["rope_scaling"], "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3}
    },  # type: ignore[dict-item]
    "dense alone": {"first_k_dense_replace": 4},
}


@pytest.mark.ci
@table("changed", VARIANTS.values(), ids=VARIANTS.keys())
def test_decoders_of_other_configurations_equal_the_reference(tmp_path: Path, changed: dict[str, Any]) -> None:
    folder = write_network(tmp_path, **changed)
    subject = engines.engine(folder)
    logits = engines.record_logits(subject)
    asked = engines.request(folder, [41], max_tokens=6)
    token_ids = engines.drain(subject, asked).answers["a"].token_ids
    oracle = KimiOracle(folder)
    placeholder = torch.tensor(oracle.placeholder_token_ids)
    both = torch.stack(logits["a"]), oracle.logits(asked, token_ids)
    ours, expected = (rows.index_fill(1, placeholder, 0.0) for rows in both)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


def test_layers_that_draft_further_tokens_are_ignored(tmp_path: Path) -> None:
    folder = write_network(tmp_path, num_nextn_predict_layers=1)
    network = build(config_of(folder))
    assert network.locate("language_model.model.layers.4.mlp.gate.weight") is None
    with pytest.raises(StartupError, match=r"does not know: language_model\.model\.layers\.4\."):
        load_model(EngineConfig(str(without_drafts(folder)), "tiny", device="cpu"), lambda *_: None)


def without_drafts(folder: Path) -> Path:
    config = config_of(folder)
    config["text_config"]["num_nextn_predict_layers"] = 0
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("language_model.model.layers.3.mlp.experts.7.up_proj.weight",
         Target("language_model.layers.3.mlp.experts.gate_up_proj", 1, 7)),
        ("language_model.model.layers.3.mlp.experts.0.down_proj.weight",
         Target("language_model.layers.3.mlp.experts.down_proj", None, 0)),
        ("language_model.model.layers.3.mlp.shared_experts.gate_proj.weight",
         Target("language_model.layers.3.mlp.shared_experts.gate_up_proj.weight", 0)),
        ("vision_tower.encoder.blocks.2.wqkv.bias", Target("visual.blocks.2.attn.qkv.bias")),
        ("language_model.model.blocks.3.mlp.experts.7.up_proj.weight",
         Target("language_model.layers.3.mlp.experts.gate_up_proj", 1, 7)),
        ("vision_tower.encoder.patch_embed.proj.bias", Target("visual.patch_embed.proj.bias")),
        ("vision_tower.encoder.patch_embed.pos_emb.weight", Target("visual.pos_embed.weight")),
        ("model.mm_projector.pre_norm.bias", Target("visual.merger.norm.bias")),
    ],
)  # fmt: skip
def test_tensors_have_the_releases_names(folder: Path, name: str, target: Target | None) -> None:
    assert build(config_of(folder)).locate(name) == target


RELEASED_IGNORE = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]


@pytest.mark.parametrize(
    ("name", "part", "ignore"),
    [
        ("int4", ".mlp.experts.", RELEASED_IGNORE),
        ("fp8", "_proj.", ["lm_head", "re:.*mlp.gate$"]),
        ("nvfp4", "_proj.", ["lm_head", "language_model.model.layers.*.mlp.gate"]),
    ],
)
def test_quantised_weights_are_their_values(tmp_path: Path, name: str, part: str, ignore: list[str]) -> None:
    """Experts as in the release; and all of the decoder, of which `kv_b_proj` is split before it is used."""
    widths = {"kv_lora_rank": 48, "q_lora_rank": 32, "v_head_dim": 16, "intermediate_size": 160}
    folder = write_network(tmp_path / "whole", moe_intermediate_size=32, **widths)
    found = []
    for copy in quantise(folder, name, lambda key: "language_model" in key and part in key, tmp_path, ignore):
        subject = engines.engine(copy)
        logits = engines.record_logits(subject)
        asked = engines.request(copy, [5, ((90, 60), 1), 30], max_tokens=4)
        token_ids = engines.drain(subject, asked).answers["a"].token_ids
        found.append((token_ids, torch.stack(logits["a"])))
    assert found[0][0] == found[1][0]
    # The kernel for int4 rounds scales to bfloat16.
    torch.testing.assert_close(found[0][1], found[1][1], atol=0.05 if name == "int4" else 1e-5, rtol=0)


@torch.inference_mode()
@table(("num_groups", "num_chosen_groups"), [(1, 1), (4, 2), (4, 4)])
@table("normalised", [True, False])
def test_router_equals_the_reference(num_groups: int, num_chosen_groups: int, normalised: bool) -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    names = {"n_group": num_groups, "topk_group": num_chosen_groups, "norm_topk_prob": normalised}
    settings = DeepseekV3Config(
        hidden_size=24, n_routed_experts=16, num_experts_per_tok=3, routed_scaling_factor=2.5, **names
    )
    reference: Any = DeepseekV3TopkRouter(settings)
    router = ExpertRouter(24, ExpertConfig(16, 3, 8, 8, num_groups, num_chosen_groups, normalised, 2.5)).to(
        torch.bfloat16
    )
    draw = torch.Generator().manual_seed(0)
    router.weight.copy_(torch.randn(16, 24, generator=draw))
    router.e_score_correction_bias.copy_(torch.randn(16, generator=draw))
    reference.weight.copy_(router.weight)
    reference.e_score_correction_bias.copy_(router.e_score_correction_bias)
    x_NE = torch.randn(50, 24, generator=draw).to(torch.bfloat16)
    ids_NT, weights_NT = router(x_NE)
    _, expected_weights, expected_ids = reference(x_NE)
    ours, theirs = (
        torch.zeros(50, 16).scatter(1, ids, weights)
        for ids, weights in ((ids_NT, weights_NT), (expected_ids, expected_weights))
    )
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    assert router.e_score_correction_bias.dtype == weights_NT.dtype == torch.float32


def test_the_cache_holds_one_latent_for_each_token_and_layer(network: Any) -> None:  # B8
    width = TEXT["kv_lora_rank"] + TEXT["qk_rope_head_dim"]  # type: ignore[operator]
    for dtype in (torch.float32, torch.bfloat16):
        per_token = memory.block_bytes(network.spec.kv_specs, 16, dtype) / 16
        assert per_token == width * TEXT["num_hidden_layers"] * dtype.itemsize


def test_the_cache_of_the_release_is_small() -> None:
    text = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 61}
    specs = models.load_spec("kimi_k25", whole(text)).kv_specs
    assert memory.block_bytes(specs, 64, torch.bfloat16) / 64 == (512 + 64) * 61 * 2


def whole(text: dict[str, Any]) -> dict[str, Any]:
    """A config.json with other values of the decoder."""
    rest = {"vocab_size": 99, "max_position_embeddings": 512}
    return {"text_config": {**TEXT, **rest, **text}, "vision_config": VISION, "media_placeholder_token_id": 7}


def test_a_grid_that_cannot_be_merged_is_refused() -> None:
    spec = models.load_spec("kimi_k25", whole({}))
    assert spec.item_tokens((1, 6, 10)) == 15
    assert spec.pixel_shape((1, 6, 10)) == (60, 3, 14, 14)
    assert spec.encoder_output_values((1, 6, 10)) == 15 * 96
    assert spec.item_tokens((4, 6, 10)) == 15
    assert spec.item_tokens((9, 6, 10)) == 45
    for grid in ((1, 3, 4), (1, 4, 3), (0, 4, 4), (1, 0, 4)):
        with pytest.raises(InvalidValue, match="grid"):
            spec.item_tokens(grid)


def test_the_keys_of_transformers_serve_where_the_releases_are_missing(folder: Path) -> None:
    config = config_of(folder)
    expected = models.load_spec("kimi_k25", config)
    text, vision = config["text_config"], config["vision_config"]
    for key in list(vision):
        if key.startswith(("vt_", "init_", "mm_", "text_", "projector_")):
            del vision[key]
    text["rope_parameters"] = {**text.pop("rope_scaling"), "rope_theta": text.pop("rope_theta"), "rope_type": "yarn"}
    config["image_token_id"] = config.pop("media_placeholder_token_id")
    assert models.load_spec("kimi_k25", config) == expected


@table(
    ("path", "value", "words"),
    [
        ("text_config.hidden_act", "relu", "hidden_act"),
        ("text_config.kv_lora_rank", 33, "kv_lora_rank"),
        ("text_config.scoring_func", "softmax", "scoring_func"),
        ("text_config.topk_method", "greedy", "topk_method"),
        ("text_config.moe_layer_freq", 2, "moe_layer_freq"),
        ("text_config.n_group", 3, "n_group"),
        ("text_config.topk_group", 2, "topk_group"),
        ("text_config.num_experts_per_tok", 9, "num_experts_per_tok"),
        ("text_config.rope_scaling.type", "dynamic", "rope type 'dynamic'"),
        ("text_config.rope_interleave", False, "rope_interleave"),
        ("text_config", [], "text_config"),
        ("vision_config.vt_hidden_size", "48", "vt_hidden_size"),
        ("vision_config.vt_num_attention_heads", 5, "4 \\* its heads"),
        ("vision_config.num_hidden_layers", 8, "`num_hidden_layers`.* is 8, but `vt_num_hidden_layers`"),
        ("vision_config.merge_kernel_size", [2, 3], "merge_kernel_size"),
        ("vision_config.mm_projector_type", "patchmergerv2", "mm_projector_type"),
        ("vision_config.text_hidden_size", 64, "text_hidden_size"),
        ("media_placeholder_token_id", None, "media_placeholder_token_id"),  # A9
        ("media_placeholder_token_id", 10**6, "media_placeholder_token_id"),
    ],
)
def test_wrong_config_names_the_key(path: str, value: object, words: str) -> None:
    config = with_value(json.loads(json.dumps(whole({}))), path, value)
    with pytest.raises(StartupError, match=words):
        models.load_spec("kimi_k25", config)
