"""The vision encoder by graphs, with a stand-in for CUDA's: equal to eager calls, whatever is packed. [eng] 33

The stand-in calls the captured function again at each replay. Networks are real ones, tiny; attention reads the borders
of sequences from the tensor alone.
"""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import pytest
import torch
from captures import Again, PlayedCuda
from tables import table
from vision_backends import BordersBackend

from saccade.engine.config import EngineConfig
from saccade.engine.core.step import EncoderInput
from saccade.engine.executor import encoder_graphs
from saccade.engine.executor.encoder import Encoder
from saccade.engine.executor.encoder_graphs import EncoderGraphs, budgets, packs, refusal
from saccade.engine.executor.execution import prepare_execution
from saccade.engine.executor.loader import load_model
from saccade.errors import StartupError
from saccade.models.spec import MediaShape
from saccade.nn.backends import torch_sdpa
from saccade.nn.layerwise import Layerwise
from saccade.nn.parallel import ALONE
from saccade.protocol.media import MediaItem

GRAPHED = ["qwen3_vl", "qwen3_5", "qwen2_5_vl", "qwen2_vl", "kimi_k25"]
ALIKE = ["paddleocr_vl", "glm4v", "glm_ocr", "gemma4", "gemma4_unified"]
"""Those whose towers have the same parts as others'."""

CASES = [*GRAPHED, *(pytest.param(name, marks=pytest.mark.conformance) for name in ALIKE)]
SIZES = [(150, 100), (64, 200), (300, 61), (90, 90), (61, 130)]
MOST = 2048
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


class Addressed:
    """A network whose encoder fails where a part of its input lies elsewhere than at the first call of its size."""

    def __init__(self, network: Any) -> None:
        self._network = network
        self._addresses: dict[int, list[int]] = {}
        self.spec, self.device, self.prepare = network.spec, network.device, network.prepare

    def encode(self, pixels: torch.Tensor, metadata: Any) -> Layerwise:
        addresses = [pixels.data_ptr(), *addresses_in(metadata)]
        assert self._addresses.setdefault(len(pixels), addresses) == addresses
        return self._network.encode(pixels, metadata)  # type: ignore[no-any-return]


def addresses_in(metadata: Any) -> Iterator[int]:
    if isinstance(metadata, torch.Tensor):
        yield metadata.data_ptr()
    elif hasattr(metadata, "__dataclass_fields__"):
        for name in metadata.__dataclass_fields__:
            yield from addresses_in(getattr(metadata, name))


@pytest.fixture(scope="module")
def load(network_folder: Callable[[str], Path]) -> Callable[[str], Any]:
    """The loaded network of a tiny checkpoint, by its name."""

    @cache
    def loaded(name: str) -> Any:
        config = EngineConfig(str(network_folder(name)), "tiny", device="cpu", dtype="float32")
        model = load_model(config, lambda *_: None)
        prepare_execution(config, model)
        return model.network

    return loaded


@pytest.fixture(scope="module")
def photos(network_folder: Callable[[str], Path]) -> Callable[[str], list[MediaItem]]:
    return cache(lambda name: [engines.photo(network_folder(name), size, seed) for seed, size in enumerate(SIZES)])


def inputs(items: list[MediaItem]) -> list[EncoderInput]:
    return [EncoderInput(10 + i, "image", one.grid, one.original_size, one.inline) for i, one in enumerate(items)]  # type: ignore[arg-type]


def with_graphs(network: Any, most: int = MOST) -> tuple[Encoder, Again]:
    again = Again()
    graphs = EncoderGraphs(Addressed(network), BordersBackend(), most, again)  # type: ignore[arg-type]
    return Encoder(network, BordersBackend(), ALONE, graphs), again


def eagerly(network: Any, items: list[MediaItem]) -> dict[int, torch.Tensor]:
    return Encoder(network, torch_sdpa.VisionAttentionBackend(), ALONE).encode(inputs(items)).features


def test_budgets_are_powers_of_two_that_hold_whole_images() -> None:
    assert budgets(16384, 4) == [256, 512, 1024, 2048, 4096, 8192, 16384]
    assert budgets(1000, 9) == [252, 504, 999]
    assert budgets(100, 4) == [100]
    assert budgets(1, 4) == [4]


def test_images_are_packed_smallest_first() -> None:
    assert packs([60, 16, 120, 44, 40], 100, 9) == ([[1, 4, 3], [0]], [2])
    assert packs([8] * 5, 100, max_images=3) == ([[0, 1], [2, 3], [4]], [])
    assert packs([], 100, 9) == ([], [])


@pytest.mark.parametrize("name", CASES)
def test_features_equal_those_without_graphs(
    name: str, load: Callable[[str], Any], photos: Callable[[str], list[MediaItem]]
) -> None:
    network, items = load(name), photos(name)
    encoder, again = with_graphs(network, max(MOST, sum(network.spec.encode_cost(item.grid) for item in items)))
    assert encoder.graphs is not None
    for chosen in (items[:1], items[:2], items, items[::-1], items[2:3]):
        expected = eagerly(network, chosen)
        before = len(again.replayed)
        outcome = encoder.encode(inputs(chosen))
        assert outcome.failed == ()
        assert len(again.replayed) == before + 1
        # The smallest budget that holds the images.
        cost = sum(network.spec.encode_cost(item.grid) for item in chosen)
        budget = next(budget for budget in encoder.graphs.by_size.sizes if budget >= cost)
        assert again.replayed[-1] == network.spec.item_tokens(network.spec.padding_grid(budget))
        for key, features in expected.items():
            torch.testing.assert_close(outcome.features[key], features, **TOLERANCE)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "kimi_k25"])
def test_earlier_images_leave_no_trace(
    name: str, load: Callable[[str], Any], photos: Callable[[str], list[MediaItem]]
) -> None:
    network, items = load(name), photos(name)
    encoder, _ = with_graphs(network, 512)
    fresh = encoder.encode(inputs(items[:1])).features[10]
    kept = fresh.clone()
    for other in (items[1:2], items[3:5], items[4:5]):
        encoder.encode(inputs(other))
    # Features are copies, and the patches that an earlier image left do not reach this one.
    assert torch.equal(fresh, kept)
    assert torch.equal(encoder.encode(inputs(items[:1])).features[10], kept)


def test_batch_over_the_budget_runs_without_a_graph(
    load: Callable[[str], Any], photos: Callable[[str], list[MediaItem]]
) -> None:
    network, items = load("qwen3_vl"), photos("qwen3_vl")
    costs = [network.spec.encode_cost(item.grid) for item in items]
    encoder, again = with_graphs(network, min(costs))
    expected = eagerly(network, items)
    found = encoder.encode(inputs(items)).features
    assert len(again.replayed) == costs.count(min(costs))
    assert found.keys() == expected.keys()
    for key, features in expected.items():
        torch.testing.assert_close(found[key], features, **TOLERANCE)


@torch.inference_mode()
def test_more_windows_than_the_graph_has_run_without_it(load: Callable[[str], Any]) -> None:
    network = load("qwen2_5_vl")
    again = Again()
    graphs = EncoderGraphs(network, BordersBackend(), 1024, again)  # type: ignore[arg-type]
    side, merge = network.spec.vision.window, network.spec.vision.merge_size
    # Each has a window that is full and one of a single merged patch.
    thin = MediaShape((1, merge, (side + 1) * merge))
    num_patches = network.spec.encode_cost(thin.grid)
    num_images = 1024 // num_patches
    pixels = torch.zeros(num_images * num_patches * network.spec.patch_values(), dtype=torch.uint8)
    assert graphs.run_images(pixels, [thin] * num_images) is None
    assert again.replayed == []


def test_all_graphs_are_captured_before_the_first_image(load: Callable[[str], Any]) -> None:
    encoder, again = with_graphs(load("qwen3_vl"), 1024)
    assert encoder.graphs is not None
    assert list(encoder.graphs.by_size.capture_graphs()) == [(0, 3), (1, 3), (2, 3)]
    assert (again.num_captures, again.replayed) == (3, [])


def test_a_failed_capture_names_the_flag(load: Callable[[str], Any]) -> None:
    def fail(_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = EncoderGraphs(load("qwen3_vl"), BordersBackend(), 256, fail)
    with pytest.raises(StartupError, match=r"size 256 cannot .* is capturing\). Start with --no-mm-encoder-cuda-graph"):
        list(graphs.by_size.capture_graphs())


def test_graphs_share_one_pool_of_memory(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = PlayedCuda(monkeypatch)
    graphs = EncoderGraphs(load("qwen3_vl"), BordersBackend(), 512)
    list(graphs.by_size.capture_graphs())
    assert cuda.pools == [(0, 1)] * len(graphs.by_size.sizes)


@table(
    ("name", "device", "captures", "is_cut", "reason"),
    [
        ("qwen3_vl", "cuda", True, False, None),
        ("kimi_k25", "cuda", True, False, None),
        ("qwen3_vl", "cpu", True, False, "they need a GPU"),
        ("qwen3_vl", "cuda", False, False, "borders depends on lengths that the host knows"),
        ("qwen3_vl", "cuda", True, True, "the ranks sum within the encoder"),
        ("llava", "cuda", True, False, "consist of whole views"),
        ("llava_next", "cuda", True, False, "consist of whole views"),
        ("phi3_v", "cuda", True, False, "consist of whole views"),
    ],
)
def test_reason_for_no_graphs_is_named(
    name: str, device: str, captures: bool, is_cut: bool, reason: str | None, load: Callable[[str], Any]
) -> None:
    network: Any = SimpleNamespace(spec=load(name).spec, device=torch.device(device))
    backend = BordersBackend()
    backend.captures_packed = captures
    found = refusal(network, backend, is_cut)
    assert found is None if reason is None else reason in (found or "")


def test_a_start_on_a_cpu_says_why_it_has_no_graphs(tiny_qwen3_vl: Path) -> None:
    subject = engines.engine(tiny_qwen3_vl, mm_encoder_cuda_graph=True)
    assert subject.description.backend_reasons[1].endswith("; no CUDA graphs: they need a GPU")
    assert engines.local(subject).runner.encoder.graphs is None


@pytest.mark.ci
def test_a_start_captures_and_answers_by_graphs(tiny_qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = engines.request(tiny_qwen3_vl, [5, ((1, 6, 16), 1), 9, ((1, 4, 6), 2), 3])
    expected = engines.drain(engines.engine(tiny_qwen3_vl), asked).answers["a"].token_ids
    again = Again()
    monkeypatch.setattr(encoder_graphs, "refusal", lambda *_: None)
    monkeypatch.setattr(encoder_graphs, "MAX_IMAGES", 4)
    monkeypatch.setattr(EncoderGraphs.__init__, "__defaults__", (again,))
    subject = engines.engine(
        tiny_qwen3_vl, mm_encoder_cuda_graph=True, mm_encoder_attn_backend="triton", encode_budget_patches=128
    )
    assert again.num_captures == 1
    assert subject.description.backend_reasons[1].endswith("; CUDA graphs for up to 128 patches")
    num_replayed = len(again.replayed)
    assert engines.drain(subject, asked).answers["a"].token_ids == expected
    assert len(again.replayed) > num_replayed
