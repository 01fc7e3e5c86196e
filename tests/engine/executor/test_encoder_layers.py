"""The vision encoder layer by layer: the same bits in every family, and as many pauses as the spec has layers."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoints
import engines
import pytest
import torch

from saccade.engine.config import EngineConfig
from saccade.engine.core.step import EncoderInput, EncoderSlice
from saccade.engine.executor.encoder import Encoder
from saccade.engine.executor.execution import prepare_execution
from saccade.engine.executor.loader import load_model
from saccade.models.spec import MediaShape
from saccade.nn.layerwise import Layerwise, advance, complete
from saccade.nn.parallel import ALONE

EVERYDAY = ["qwen3_vl", "qwen2_5_vl", "kimi_k25", "internvl", "phi3_v"]
CASES = [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.conformance) for name in checkpoints.NETWORKS]


@pytest.mark.parametrize("name", CASES)
def test_pauses_change_no_bit(name: str, network_folder: Callable[[str], Path]) -> None:
    folder = network_folder(name)
    model = load_model(EngineConfig(str(folder), "tiny", device="cpu", dtype="float32"), lambda *_: None)
    backend = prepare_execution(EngineConfig(str(folder), "tiny", device="cpu", dtype="float32"), model).vision_backend
    network: Any = model.network

    def begin(seed: int) -> Any:
        item = engines.photo(folder, (150, 100), seed)
        pixels = torch.frombuffer(bytearray(item.inline or b""), dtype=torch.uint8)
        return network.encode(pixels, network.prepare([MediaShape(item.grid, item.original_size)], backend))

    with torch.inference_mode():
        expected = [complete(begin(seed)) for seed in (1, 2)]
        # Two images in turns: neither sees the state of the other.
        one, other = begin(1), begin(2)
        for _ in range(network.spec.num_encoder_layers):
            assert advance(one, 1) is None
            assert advance(other, 1) is None
        assert torch.equal(expected[0], complete(one))
        assert torch.equal(expected[1], complete(other))


GRID, BAD = (1, 2, 3), (1, 1, 4)


class Network:
    """Three layers that add one to the patches' value; an image of the grid BAD fails in the second."""

    device, dtype = torch.device("cpu"), torch.float32
    spec = SimpleNamespace(
        item_tokens=lambda grid, _=None: grid[0] * grid[1] * grid[2],
        encoder_output_values=lambda grid, _=None: grid[0] * grid[1] * grid[2],
        encode_cost=lambda grid: grid[0] * grid[1] * grid[2],
        video_parts=lambda grid, _: [(1, *grid[1:])] * grid[0],
    )

    def prepare(self, items: Any, backend: Any) -> Any:
        return items

    def encode(self, pixels: torch.Tensor, items: Any) -> Layerwise:
        x = pixels.float().unsqueeze(1)
        for layer in range(3):
            if layer == 1 and items[0].grid == BAD:
                raise RuntimeError("no memory")
            x = x + 1
            yield
        return x


def encoder() -> Encoder:
    return Encoder(Network(), None, ALONE, most_patches=6)  # type: ignore[arg-type]


def image(output_id: int, grid: tuple[int, int, int] = GRID, modality: str = "image") -> EncoderInput:
    count = grid[0] * grid[1] * grid[2]
    return EncoderInput(output_id, modality, grid, None, bytes(range(output_id, output_id + count)))


def test_images_go_on_beside_whole_ones() -> None:
    subject = encoder()
    first = subject.encode([image(1), image(2)], [EncoderSlice(1, 2)])
    assert list(first.features) == [2]
    assert subject.num_patches([], [EncoderSlice(1, None)]) == 6
    last = subject.encode([], [EncoderSlice(1, None)])
    assert last.features[1].flatten().tolist() == [4, 5, 6, 7, 8, 9]
    assert last.failed == ()


def test_a_video_in_slices_is_whole() -> None:
    subject, video = encoder(), image(1, (3, 2, 3), "video")
    expected = encoder().encode([video]).features[1]
    assert subject.encode([video], [EncoderSlice(1, 4)]).features == {}
    assert subject.encode([], [EncoderSlice(1, 3)]).features == {}
    assert torch.equal(subject.encode([], [EncoderSlice(1, None)]).features[1], expected)


def test_a_failure_is_reported_with_the_last_slice() -> None:
    subject = encoder()
    assert subject.encode([image(1, BAD)], [EncoderSlice(1, 1)]).failed == ()
    assert subject.encode([], [EncoderSlice(1, 1)]).failed == ()
    last = subject.encode([image(2)], [EncoderSlice(1, None)])
    assert last.failed == (1,)
    assert not last.features[1].any()
    assert last.features[2].any()


def test_an_image_that_is_dropped_is_not_known_any_more() -> None:
    subject = encoder()
    subject.encode([image(1)], [EncoderSlice(1, 1)])
    subject.drop([1, 7])
    with pytest.raises(KeyError):
        subject.encode([], [EncoderSlice(1, None)])
