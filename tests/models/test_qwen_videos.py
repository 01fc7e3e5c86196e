"""Frames, layout and patches of videos against the families' reference processors: the same frames, bit for bit."""

import json
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import clips
import numpy as np
import pytest
import torch
from tables import table
from torchvision_schemas import import_torchvision

from saccade import models
from saccade.errors import InternalError, InvalidValue, StartupError, VideoTooLarge
from saccade.media.video import read_frames, read_header
from saccade.media.video_header import VideoLimits
from saccade.models.family import VideoLayout, VideoOptions
from saccade.protocol.media import ImageLayout, VideoHeader

CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
SIZES = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
SAMPLED = {"do_sample_frames": True, "fps": 2.0, "cap_pixels_per_frame": True}
TOGETHER = {"size": {"shortest_edge": 4096, "longest_edge": 25_165_824}, "cap_pixels_per_frame": False}
FAMILIES: Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VLVideoProcessor", {**SIZES, **CLIP}, SAMPLED),
    "qwen2_5_vl": ("Qwen2VLVideoProcessor", {**SIZES, **CLIP}, SAMPLED),
    "qwen3_vl": ("Qwen3VLVideoProcessor", {**SIZES, "patch_size": 16, **HALVES}, TOGETHER),
    "qwen3_5": ("Qwen3VLVideoProcessor", {**SIZES, "patch_size": 16, **HALVES}, TOGETHER),
}
"""The reference's class, the image processor's settings that hold for videos too, and the videos' own."""

TIMED = ("qwen3_vl", "qwen3_5")
"""Families that write times between a video's groups of frames."""

SERVED = clips.served()
LIMITS = VideoLimits()
SHAPES = [(64, 48), (65, 49), (1, 90), (320, 240), (640, 481), (1280, 720), (2300, 11)]


def layout_of(family: str, **video: Any) -> VideoLayout:
    _, preprocessor, _ = FAMILIES[family]
    return models.load_video_layout(family)({}, preprocessor, video)


def reference(family: str, **changed: Any) -> Any:
    name, preprocessor, videos = FAMILIES[family]
    return processor(name, json.dumps({**preprocessor, **videos, **changed}))


@cache
def processor(name: str, settings: str) -> Any:
    import_torchvision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns about its own deprecations
        import transformers

        return getattr(transformers, name)(**json.loads(settings))


def expected(family: str, frames: np.ndarray, header: VideoHeader, **changed: Any) -> Any:
    """Return what the reference makes of all *frames* of a video, or of those that a client has sampled."""
    from transformers.video_utils import VideoMetadata

    indices = {"frames_indices": list(header.indices)} if header.indices else {}
    changed |= {"do_sample_frames": False, "fps": None} if header.indices else {}
    metadata = VideoMetadata(total_num_frames=header.num_frames, fps=header.fps, **indices)
    video = torch.from_numpy(frames).permute(0, 3, 1, 2)
    return reference(family, **changed)(
        videos=[video], video_metadata=[metadata], return_metadata=True, return_tensors="pt"
    )


def patches(family: str, frames: Iterable[np.ndarray], layout: ImageLayout, settings: Mapping[str, Any]) -> np.ndarray:
    out = np.full(layout.pixel_shape, 7, np.uint8)
    models.load_video_pixels(family)(settings).write_pixels(frames, layout, out)
    return out


def normalised(ours: np.ndarray, settings: Mapping[str, Any]) -> torch.Tensor:
    mean, std = (torch.tensor(settings[key]).mul(255).view(3, 1) for key in ("image_mean", "image_std"))
    return torch.from_numpy(ours).view(len(ours), 3, -1).float().sub(mean).div(std).flatten(1)


def check(family: str, frames: np.ndarray, header: VideoHeader, **changed: Any) -> None:
    subject = layout_of(family, **changed)
    layout = subject.video(header, subject.settings)
    made = expected(family, frames, header, **changed)
    assert list(layout.frames) == list(made["video_metadata"][0]["frames_indices"])
    assert list(layout.grid) == made["video_grid_thw"][0].tolist()
    assert layout.num_tokens == int(np.prod(layout.grid)) // 4
    sampled = frames if header.indices else frames[list(layout.frames)]
    ours = patches(family, sampled, layout, subject.settings)
    assert torch.equal(normalised(ours, subject.settings), made["pixel_values_videos"])
    if family in TIMED:
        assert written(layout, subject) == reference_text(made)


def written(layout: ImageLayout, subject: VideoLayout) -> str:
    (pad,) = subject.template_tokens
    return "".join(piece if isinstance(piece, str) else pad * piece for piece in layout.prompt)


def reference_text(made: Any) -> str:
    """What the reference writes for a video; its tokenizer only names the tokens."""
    from transformers import Qwen3VLProcessor

    itself = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
    itself.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    layout = layout_of("qwen3_vl")
    (itself.video_token,) = layout.template_tokens
    itself.vision_start_token, itself.vision_end_token = layout.around
    return str(itself.replace_video_token(made, 0))


@table("family", FAMILIES)
@table("name", [name for name in SERVED if "one frame" not in name])
def test_clips_equal_the_reference(family: str, name: str) -> None:
    header = read_header(SERVED[name], LIMITS)
    everything = range(header.num_frames)
    check(family, np.stack(list(read_frames(SERVED[name], header, everything, LIMITS))), header)


@pytest.mark.ci
@table("family", FAMILIES)
@table("size", SHAPES[:-1])
@table("num_frames", [2, 3, 7, 24])
def test_drawn_frames_equal_the_reference(family: str, size: tuple[int, int], num_frames: int) -> None:
    frames = np.random.default_rng(num_frames).integers(0, 256, (num_frames, *size[::-1], 3), np.uint8)
    check(family, frames, VideoHeader(num_frames, 6.0, *size))


@pytest.mark.ci
@table("family", TIMED)
@table("size", [(64, 48), (31, 20), (1, 90), (1000, 700)])
@table("num_frames", [2, 5, 30])
@table("is_capped", [False, True])
def test_pixels_of_all_frames_are_limited_together(
    family: str, size: tuple[int, int], num_frames: int, is_capped: bool
) -> None:
    frames = np.random.default_rng(num_frames).integers(0, 256, (num_frames, *size[::-1], 3), np.uint8)
    limits = {"size": {"shortest_edge": 60_000, "longest_edge": 900_000}, "max_video_tokens": 40}
    check(family, frames, VideoHeader(num_frames, 7.3, *size), **limits, cap_pixels_per_frame=is_capped)


@table("family", FAMILIES)
@table("outside", [{"min_pixels": 20_000}, {"max_pixels": 50_000}, {"min_pixels": 20_000, "max_pixels": 50_000}])
def test_limits_of_pixels_are_the_reference_processors(family: str, outside: dict[str, int]) -> None:
    """Outside of `size`, they count for some classes only."""
    stated = {"size": {"shortest_edge": 12_288, "longest_edge": 120_000}, **outside}
    settings = layout_of(family, **stated).settings
    size = reference(family, **stated).size
    assert (settings["min_pixels"], settings["max_pixels"]) == (size["shortest_edge"], size["longest_edge"])


@table("family", FAMILIES)
@table("indices, total", [((0, 30, 60), 90), ((5, 9), 10), (tuple(range(0, 480, 20)), 500)])
def test_frames_that_a_client_sampled_equal_the_reference(family: str, indices: tuple[int, ...], total: int) -> None:
    frames = np.random.default_rng(len(indices)).integers(0, 256, (len(indices), 90, 150, 3), np.uint8)
    check(family, frames, VideoHeader(total, 29.97, 150, 90, indices))


@pytest.mark.parametrize("family", FAMILIES)
def test_one_frame_is_a_group_of_equal_frames(family: str) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (1, 100, 150, 3), np.uint8)
    subject = layout_of(family)
    layout = subject.video(VideoHeader(1, 24.0, 150, 100), subject.settings)
    assert (layout.frames, layout.grid[0]) == ((0,), 1)
    ours = patches(family, frames, layout, subject.settings).reshape(-1, 3, 2, subject.settings["patch_size"] ** 2)
    np.testing.assert_array_equal(ours[:, :, 0], ours[:, :, 1])


@table("family", FAMILIES)
@table("fps", [0.5, 24.0, 29.97, 60.0])
def test_frames_are_those_of_the_reference(family: str, fps: float) -> None:
    from transformers.video_utils import VideoMetadata

    subject = layout_of(family)
    for total in (*range(2, 400), 5000, 20_000):
        sampled = subject.video(VideoHeader(total, fps, 64, 64), subject.settings).frames
        theirs = reference(family).sample_frames(VideoMetadata(total_num_frames=total, fps=fps), fps=2.0).tolist()
        # The reference's step is a float: where it is rounded down, one frame more fits, the last.
        assert list(sampled) == theirs[: len(sampled)], total
        assert len(theirs) - len(sampled) in (0, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_options_choose_frames_and_pixels(family: str) -> None:
    subject, header = layout_of(family), VideoHeader(300, 30.0, 640, 480)
    plain = subject.video(header, subject.settings)
    assert subject.settings_for(VideoOptions()) == subject.settings
    eight = subject.video(header, subject.settings_for(VideoOptions(num_frames=8)))
    assert len(eight.frames) == 8
    slow = subject.video(header, subject.settings_for(VideoOptions(fps=1.0)))
    assert len(slow.frames) == len(plain.frames) // 2
    small = subject.video(header, subject.settings_for(VideoOptions(min_pixels=64 * 64, max_pixels=100 * 100)))
    assert small.num_tokens < plain.num_tokens
    with pytest.raises(InvalidValue, match="send a `min_pixels` of at most 10 too"):
        subject.settings_for(VideoOptions(max_pixels=10))
    every = subject.video(VideoHeader(5, 30.0, 640, 480), subject.settings_for(VideoOptions(num_frames=64)))
    assert every.frames == tuple(range(5 if family in TIMED else 4))


@pytest.mark.parametrize("family", FAMILIES)
def test_long_videos_keep_within_the_budget(family: str) -> None:
    subject = layout_of(family)
    layout = subject.video(VideoHeader(100_000, 30.0, 1920, 1080), subject.settings)
    assert len(layout.frames) == 768
    assert layout.num_tokens < 128_000


@pytest.mark.parametrize("family", FAMILIES)
def test_sides_too_unequal_are_refused(family: str) -> None:
    subject = layout_of(family)
    with pytest.raises(VideoTooLarge):
        subject.video(VideoHeader(10, 4.0, *SHAPES[-1]), subject.settings)


@table(
    "wrong",
    [
        {"fps": 0},
        {"fps": "2"},
        {"max_frames": 0},
        {"num_frames": 16},
        {"cap_pixels_per_frame": False},
        {"patch_size": 16},
        {"image_mean": [0.0, 0.0, 0.0]},
        {"do_rescale": False},
    ],
)
def test_wrong_settings_name_the_file(wrong: dict[str, Any]) -> None:
    with pytest.raises(
        StartupError, match=r"^video_preprocessor_config\.json, the settings for videos: " + next(iter(wrong))
    ):
        layout_of("qwen2_vl", **wrong)


@pytest.mark.parametrize("wrong", [{"cap_pixels_per_frame": 1}, {"num_frames": 16}, {"patch_size": 14}], ids=str)
def test_wrong_settings_of_timed_videos_name_the_file(wrong: dict[str, Any]) -> None:
    with pytest.raises(
        StartupError, match=r"^video_preprocessor_config\.json, the settings for videos: " + next(iter(wrong))
    ):
        layout_of("qwen3_vl", **wrong)


def test_another_number_of_frames_is_an_error() -> None:
    subject = layout_of("qwen2_vl")
    layout = subject.video(VideoHeader(4, 4.0, 64, 64), subject.settings)
    with pytest.raises(InternalError):
        models.load_video_pixels("qwen2_vl")(subject.settings).write_pixels(
            [], layout, np.empty(layout.pixel_shape, np.uint8)
        )
