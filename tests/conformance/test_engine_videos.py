"""Videos through the engine, beside images and text: logits and greedy ids against the oracles. B5"""

import math
from pathlib import Path
from typing import Any

import engines
import msgspec
import pytest
import torch
from oracle_checks import check, check_fresh_and_cached
from references.networks import Oracle

from saccade import models
from saccade.engine.config import EngineConfig
from saccade.engine.executor.loader import load_model
from saccade.errors import InvalidValue
from saccade.models.spec import MediaShape
from saccade.nn.backends import load_vision_backend
from saccade.nn.layerwise import complete

pytestmark = pytest.mark.ci

PROMPTS: dict[str, list[Any]] = {
    "one video": [5, ((192, 128), 12, 1), 9],
    "one frame": [3, ((100, 150), 1, 2), 4],
    "two videos, two images": [3, ((168, 84), 9, 2), 6, ((96, 96), 3), 4, ((84, 112), 6, 4), 1, ((64, 160), 5), 7],
    "video twice": [2, ((160, 96), 8, 6), 3, ((160, 96), 8, 6), 4],
}
CHUNKS = (7, 16, 2048)
IN_CI = {("two videos, two images", 16)}
CASES = [
    pytest.param(name, chunk, marks=() if (name, chunk) in IN_CI else pytest.mark.conformance)
    for name in PROMPTS
    for chunk in CHUNKS
]
VIDEO_NETWORKS = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "kimi_k25",
    "glm4v",
    "glm4v_moe",
    "glm46v",
    "glm_ocr",
    "internvl",
    "gemma4",
    "gemma4_unified",
)

EACH_FRAME = ("kimi_k25", "internvl", "gemma4", "gemma4_unified")
"""Those without a kernel over two frames: each frame has patches of its own."""

NAMES = [
    pytest.param(name, marks=pytest.mark.conformance if name.startswith(("gemma4", "internvl")) else ())
    for name in VIDEO_NETWORKS
]


@pytest.fixture(scope="module", params=NAMES)
def checkpoint_name(request: pytest.FixtureRequest) -> str:
    """Checkpoints of families that take videos."""
    return str(request.param)


def test_every_video_family_is_tested() -> None:
    assert {name for name in models.families() if models.takes_videos(name)} <= set(VIDEO_NETWORKS)


@pytest.mark.aspect("logits")
@pytest.mark.aspect("cache")
@pytest.mark.parametrize(("name", "chunk"), CASES)
def test_fresh_and_cached_chunks_equal_the_reference(folder: Path, oracle: Oracle, name: str, chunk: int) -> None:
    check_fresh_and_cached(oracle, folder, PROMPTS[name], chunk)


def test_videos_and_images_of_a_batch_equal_the_reference(folder: Path, oracle: Oracle) -> None:
    subject = engines.engine(folder, max_num_batched_tokens=256, max_num_seqs=4)
    logits = engines.record_logits(subject)
    asked = [
        engines.request(folder, parts, str(number), number, max_tokens=8)
        for number, parts in enumerate([[4, ((96, 64), 5, 1), 2], [3, ((96, 64), 2), 2], [7], [((56, 84), 2, 3), 5]])
    ]
    answers = engines.drain(subject, *asked).answers
    for one in asked:
        check(oracle, one, answers[one.request_id].token_ids, logits[one.request_id])


@pytest.mark.parametrize("budget", [1, 200])
def test_large_videos_are_encoded_in_parts(folder: Path, oracle: Oracle, budget: int) -> None:
    """Frame by frame, and several at a time; the memory of one call does not grow with the video's length."""
    subject = engines.engine(folder, encode_budget_patches=budget, max_num_batched_tokens=256)
    network, sizes = engines.local(subject).runner.network, []
    logits, encode = engines.record_logits(subject), network.encode

    def recording(pixels: torch.Tensor, metadata: Any) -> torch.Tensor:
        sizes.append(len(pixels))
        return encode(pixels, metadata)

    network.encode = recording  # type: ignore[method-assign]
    asked = engines.request(folder, [3, ((308, 64), 20, 1), 2, ((64, 64), 3), 4], max_tokens=6)
    answer = engines.drain(subject, asked).answers["a"]
    check(oracle, asked, answer.token_ids, logits["a"])
    video, image = asked.media
    grids = network.spec.video_parts(video.grid, budget)
    assert 1 < len(grids) <= video.grid[0]
    assert sum(frames for frames, _, _ in grids) == video.grid[0]
    most = max(network.spec.encode_cost(grid) for grid in (*grids, image.grid))
    assert max(sizes) <= most * len(video.inline or b"") // math.prod(video.grid)


@pytest.mark.conformance
@pytest.mark.parametrize("mode", ["weights", "data"])
def test_ranks_share_videos(folder: Path, oracle: Oracle, mode: str) -> None:
    with engines.on_ranks(folder, 2, encode_budget_patches=200, mm_encoder_tp_mode=mode) as subject:
        logits = engines.record_logits(subject)
        asked = engines.request(folder, [3, ((308, 64), 20, 1), 2, ((64, 64), 3), 4, ((96, 64), 6, 2)], max_tokens=6)
        answer = engines.drain(subject, asked).answers["a"]
        check(oracle, asked, answer.token_ids, logits["a"])


def test_image_grid_has_one_frame(folder: Path) -> None:
    """What a video may have, an image may not: its pixels would be of another shape."""
    subject = engines.engine(folder)
    asked = engines.request(folder, [2, ((96, 64), 12, 1), 2])
    (item,) = asked.media
    for wrong in (
        {"modality": "image"},
        {"grid": (0, *item.grid[1:])},
        {"pixel_shape": (item.pixel_shape[0], item.pixel_shape[1] // 2)},
        {"seconds_per_group": 0.0},
        {"seconds_per_group": math.nan},
        {"seconds_per_group": 86_401.0},
    ):
        changed = msgspec.structs.replace(asked, media=(msgspec.structs.replace(item, **wrong),))
        with pytest.raises(InvalidValue):
            subject.validator.validated(0, changed, 0)


@pytest.mark.parametrize(
    "checkpoint_name",
    [name for name in VIDEO_NETWORKS if name not in EACH_FRAME],
    indirect=True,
)
@torch.inference_mode()
def test_video_of_equal_frames_equals_the_image(folder: Path) -> None:
    """The kernel over two frames, given the same frame twice, agrees with the kernel that images take."""
    network = load_model(EngineConfig(str(folder), "tiny", device="cpu", dtype="float32"), lambda *_: None).network
    item = engines.photo(folder, (112, 84), 0)
    pixels = torch.frombuffer(bytearray(item.inline or b""), dtype=torch.uint8).view(item.grid[1] * item.grid[2], 3, -1)
    features = []
    for modality, given in (("image", pixels), ("video", torch.stack((pixels, pixels), 2))):
        metadata = network.prepare([MediaShape(item.grid, modality=modality)], load_vision_backend("torch_sdpa"))
        features.append(complete(network.encode(given.flatten(), metadata)))
    torch.testing.assert_close(*features, atol=1e-4, rtol=0)
