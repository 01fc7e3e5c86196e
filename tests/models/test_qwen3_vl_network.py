"""The network's parts against transformers, and the encoder's contract."""

from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
import torch
from networks import build, config_of, tokens_of, with_value
from references.networks import QwenOracle
from tables import table
from torch.utils._python_dispatch import TorchDispatchMode
from vision_backends import RecordingBackend

from saccade.engine.config import EngineConfig
from saccade.engine.executor.loader import load_model
from saccade.errors import StartupError
from saccade.models.qwen_vl.layout import Layout16
from saccade.models.spec import MediaShape
from saccade.nn.backends.torch_sdpa import VisionAttentionBackend
from saccade.nn.layerwise import complete
from saccade.nn.ops import normalise_pixels

GRIDS = [(1, 4, 6), (1, 2, 10), (1, 16, 16), (1, 2, 2)]
ITEMS = [MediaShape(grid) for grid in GRIDS]


@pytest.fixture(scope="module")
def network(tiny_qwen3_vl: Path) -> Any:
    return load_model(EngineConfig(str(tiny_qwen3_vl), "tiny", device="cpu"), lambda *_: None).network


@pytest.fixture(scope="module")
def oracle(tiny_qwen3_vl: Path) -> QwenOracle:
    return QwenOracle(tiny_qwen3_vl)


def pixels(grids: list[tuple[int, int, int]]) -> torch.Tensor:
    inline = (engines.image(grid, seed).inline or b"" for seed, grid in enumerate(grids))
    return torch.frombuffer(bytearray(b"".join(inline)), dtype=torch.uint8)


@torch.inference_mode()
def test_vision_tower_equals_the_reference(network: Any, oracle: QwenOracle) -> None:  # A10
    metadata = network.prepare(ITEMS, VisionAttentionBackend())
    features = complete(network.encode(pixels(GRIDS), metadata))
    doubled = torch.cat([oracle.pixel_values(engines.image(grid, seed)) for seed, grid in enumerate(GRIDS)])
    expected = oracle.model.model.get_image_features(doubled, torch.tensor(GRIDS), return_dict=True)
    parts = [
        torch.cat(tuple(expected.pooler_output)),
        *(torch.cat(tuple(deep)) for deep in expected.deepstack_features),
    ]
    torch.testing.assert_close(features, torch.cat(parts, 1), atol=1e-4, rtol=0)
    assert tokens_of(network, ITEMS) == [grid[1] * grid[2] // 4 for grid in GRIDS]


def test_normalisation_is_bit_equal(network: Any) -> None:  # F4
    patches = pixels([(1, 16, 16)]).view(-1, 768)
    reference = patches.view(-1, 3, 256).float()
    mean, std = torch.tensor([0.5] * 3) * 255, torch.tensor([0.5] * 3) * 255
    normalised = normalise_pixels(patches, *network.scaled_mean_std, torch.float32)
    assert torch.equal(normalised, ((reference - mean[:, None]) / std[:, None]).flatten(1))


def test_positions_equal_the_reference(network: Any, oracle: QwenOracle) -> None:  # B5, [eng] 1
    draw = np.random.default_rng(0)
    for _ in range(20):
        ids, media, grids = [0], [], []
        for _ in range(draw.integers(1, 4)):
            ids += [0] * draw.integers(1, 6)
            grid = (1, 2 * int(draw.integers(1, 7)), 2 * int(draw.integers(1, 7)))
            media.append(engines.image(grid, 0, start=len(ids)))
            grids.append(grid)
            ids += [oracle.placeholder] * (grid[1] * grid[2] // 4)
        ids += [0] * draw.integers(0, 4)
        tensor = torch.tensor([ids])
        types = (tensor == oracle.placeholder).int()
        expected, delta = oracle.model.model.get_rope_index(tensor, types, torch.tensor(grids))
        positions = network.spec.positions(media)
        assert np.array_equal(positions.slice(0, len(ids)), expected[:, 0].numpy())
        assert positions.delta == delta.item()


def test_grids_may_be_a_list_or_a_tensor(network: Any) -> None:  # C2
    from_tensor: list[Any] = [MediaShape(row) for row in torch.tensor(GRIDS)]  # type: ignore[arg-type]
    metadata = network.prepare(from_tensor, VisionAttentionBackend())
    expected = network.prepare(ITEMS, VisionAttentionBackend())
    with torch.inference_mode():
        assert torch.equal(
            complete(network.encode(pixels(GRIDS), metadata)), complete(network.encode(pixels(GRIDS), expected))
        )


class _NoSync(TorchDispatchMode):
    """Refuses every operation that makes the host wait for a tensor's content."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(word in func.name() for word in ("_local_scalar_dense", "nonzero", "unique", "masked_select"))
        return func(*args, **kwargs or {})


def test_encode_does_not_sync(network: Any) -> None:  # C3, [eng] 35
    patches = pixels(GRIDS)
    with torch.no_grad(), _NoSync():  # in inference mode .item() would not pass the dispatcher
        complete(network.encode(patches, network.prepare(ITEMS, VisionAttentionBackend())))
        with pytest.raises(AssertionError):  # the check itself works
            patches[0].item()


def test_encode_never_looks_at_the_device(tiny_qwen3_vl: Path) -> None:  # C3: a meta tensor has no content to look at
    network = build(config_of(tiny_qwen3_vl))
    network.finish()
    with torch.inference_mode():
        features = complete(network.encode(pixels(GRIDS).to("meta"), network.prepare(ITEMS, VisionAttentionBackend())))
    assert (features.device.type, features.shape) == ("meta", (76, 512))


def test_every_block_gets_the_metadata(network: Any) -> None:  # C1
    backend = RecordingBackend()
    with torch.inference_mode():
        complete(network.encode(pixels(GRIDS), network.prepare(ITEMS, backend)))
    assert len(backend.layouts) == len(network.visual.blocks)
    for layout in backend.layouts:
        assert layout.cu_seqlens.tolist() == [0, 24, 44, 300, 304]
        assert (layout.max_seqlen, layout.sequence_lengths) == (256, (24, 20, 256, 4))


def test_three_axes_reach_attention(tiny_qwen3_vl: Path) -> None:  # B5, [eng] 13
    asked = engines.request(tiny_qwen3_vl, [4, ((1, 8, 8), 1), 4], max_tokens=1)
    rows = []
    for axis in (None, 0, 1, 2):
        subject = engines.engine(tiny_qwen3_vl)
        logits = engines.record_logits(subject)
        sliced: Any = subject.validator.spec.positions

        class Flat:
            """Positions with one axis replaced by another."""

            def __init__(self, spans: Any, sliced: Any = sliced, axis: int | None = axis) -> None:
                self.whole, self.axis = sliced(spans), axis
                self.delta = self.whole.delta

            def slice(self, start: int, stop: int) -> Any:
                positions = self.whole.slice(start, stop).copy()
                if self.axis is not None:
                    positions[self.axis] = positions[(self.axis + 1) % 3]
                return positions

        subject.validator.spec = Turned(subject.validator.spec, Flat)  # type: ignore[assignment]
        engines.drain(subject, asked)
        rows.append(logits["a"][0])
    assert all((rows[0] - row)[~row.isinf()].abs().max() > 1e-3 for row in rows[1:])


class Turned:
    """A model's spec with other positions."""

    def __init__(self, spec: Any, positions: Any) -> None:
        self._spec = spec
        self.positions = positions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spec, name)


def test_deepstack_only_where_declared(tiny_qwen3_vl: Path) -> None:  # [eng] 43
    config = config_of(tiny_qwen3_vl)
    config["vision_config"]["deepstack_visual_indexes"] = []
    assert len(build(config).visual.deepstack_merger_list) == 0
    del config["vision_config"]["deepstack_visual_indexes"]
    with pytest.raises(StartupError, match="deepstack_visual_indexes"):
        build(config)


def test_rope_may_be_spelt_the_newer_way(tiny_qwen3_vl: Path) -> None:
    config = config_of(tiny_qwen3_vl)
    text = config["text_config"]
    text["rope_parameters"] = {**text.pop("rope_scaling"), "rope_theta": text.pop("rope_theta")}
    assert build(config).language_model.config == build(config_of(tiny_qwen3_vl)).language_model.config


@table(
    ("path", "value", "words"),
    [
        ("text_config.rope_scaling.mrope_section", [6, 5, 6], "mrope_section"),  # [eng] 45
        ("text_config.rope_scaling.mrope_section", [6, 10], "mrope_section"),
        ("text_config.rope_scaling.mrope_interleaved", False, "mrope_interleaved"),
        ("text_config.rope_scaling.rope_type", "dynamic", "dynamic"),
        ("text_config.hidden_size", "128", "hidden_size"),
        ("text_config.hidden_act", "relu", "hidden_act"),
        ("text_config.num_key_value_heads", 3, "num_key_value_heads"),
        ("text_config", [], "text_config"),
        ("vision_config.num_position_embeddings", 63, "num_position_embeddings"),
        ("vision_config.deepstack_visual_indexes", [0, 9], "deepstack_visual_indexes"),
        ("vision_config.out_hidden_size", 64, "out_hidden_size"),
        ("vision_config.in_channels", 1, "in_channels"),
        ("image_token_id", None, "image_token_id"),  # A9
        ("image_token_id", 10**6, "image_token_id"),
    ],
)
def test_wrong_config_names_the_key(tiny_qwen3_vl: Path, path: str, value: object, words: str) -> None:  # [eng] 45
    config = with_value(config_of(tiny_qwen3_vl), path, value)
    with pytest.raises(StartupError, match=words):
        build(config)


@pytest.mark.parametrize("preprocessor", [{}, {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}])
def test_engine_normalises_as_the_gateway_says(tiny_qwen3_vl: Path, preprocessor: Any) -> None:  # A3
    config = config_of(tiny_qwen3_vl)
    settings = Layout16(config, preprocessor).settings
    assert build(config, preprocessor).mean_std == [settings["image_mean"], settings["image_std"]]


def test_wrong_mean_is_named(tiny_qwen3_vl: Path) -> None:  # A3
    with pytest.raises(StartupError, match="image_mean"):
        build(config_of(tiny_qwen3_vl), {"image_mean": [0.5]})
