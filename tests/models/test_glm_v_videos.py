"""Frames, layout, patches and text of videos against both reference processors of GLM-4.xV."""

import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

import clips
import numpy as np
import pytest
import torch
from tables import table
from torchvision_schemas import import_torchvision

from saccade.errors import InvalidValue, StartupError
from saccade.media.video import read_frames, read_header
from saccade.media.video_header import VideoLimits
from saccade.models.family import VideoOptions
from saccade.models.glm_v.pixels import VideoPixels
from saccade.models.glm_v.video import VideoLayout
from saccade.protocol.media import ImageLayout, VideoHeader

KINDS = ("Glm4v", "Glm46V")
SERVED = clips.served()


def layout_of(kind: str, **video: Any) -> VideoLayout:
    return VideoLayout({}, {}, {"video_processor_type": f"{kind}VideoProcessor", **video})


@cache
def processor(kind: str) -> Any:
    import_torchvision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns about its own deprecations
        import transformers

        return getattr(transformers, f"{kind}VideoProcessor")()


def metadata_of(header: VideoHeader) -> Any:
    """What a loader tells the reference of a video."""
    from transformers.video_utils import VideoMetadata

    total = header.num_frames
    return VideoMetadata(total_num_frames=total, fps=header.fps, duration=total / header.fps)


def written(layout: ImageLayout) -> str:
    return "".join(piece if isinstance(piece, str) else "<|image|>" * piece for piece in layout.prompt)


def reference_text(kind: str, made: Mapping[str, Any]) -> str:
    """What the reference writes for a video; its tokenizer only names the tokens."""
    import transformers

    writer = getattr(transformers, f"{kind}Processor")
    itself = writer.__new__(writer)
    itself.video_processor, itself.image_token = processor(kind), "<|image|>"
    return str(itself.replace_video_token(made, 0))


def check(kind: str, frames: np.ndarray, header: VideoHeader) -> None:
    subject = layout_of(kind)
    layout = subject.video(header, subject.settings)
    video = torch.from_numpy(frames).permute(0, 3, 1, 2)
    made = processor(kind)(
        videos=[video], video_metadata=[metadata_of(header)], return_metadata=True, return_tensors="pt"
    )
    # The reference repeats the last frame of an odd number.
    assert layout.frames == tuple(dict.fromkeys(map(int, made["video_metadata"][0]["frames_indices"])))
    assert list(layout.grid) == made["video_grid_thw"][0].tolist()
    out = np.full(layout.pixel_shape, 7, np.uint8)
    VideoPixels(subject.settings).write_pixels((frames[index] for index in layout.frames), layout, out)
    mean, std = (torch.tensor(subject.settings[key]).mul(255).view(3, 1) for key in ("image_mean", "image_std"))
    ours = torch.from_numpy(out).view(len(out), 3, -1).float().sub(mean).div(std).flatten(1)
    assert torch.equal(ours, made["pixel_values_videos"])
    assert written(layout) == reference_text(kind, made)


@table("kind", KINDS)
@table("name", [name for name in SERVED if "one frame" not in name][:2])
def test_clips_equal_the_reference(kind: str, name: str) -> None:
    header = read_header(SERVED[name], VideoLimits())
    frames = read_frames(SERVED[name], header, range(header.num_frames), VideoLimits())
    check(kind, np.stack(list(frames)), header)


@table("kind", KINDS)
@table("size", [(65, 49), (1, 90), (20, 31)])
@table("num_frames", [2, 7, 24])
def test_drawn_frames_equal_the_reference(kind: str, size: tuple[int, int], num_frames: int) -> None:
    frames = np.random.default_rng(num_frames).integers(0, 256, (num_frames, *size[::-1], 3), np.uint8)
    check(kind, frames, VideoHeader(num_frames, 6.0, *size))


@table("kind", KINDS)
@table("fps", [0.5, 24.0, 29.97, 60.0])
def test_frames_are_those_of_the_reference(kind: str, fps: float) -> None:
    subject = layout_of(kind)
    for total in (*range(10, 130), 900, 5000, 20_000):
        header = VideoHeader(total, fps, 64, 64)
        theirs = processor(kind).sample_frames(metadata_of(header), fps=2).tolist()
        assert subject.sampled(header, subject.settings) == tuple(dict.fromkeys(theirs)), total


@pytest.mark.parametrize("kind", KINDS)
def test_one_frame_is_a_pair_of_equal_frames(kind: str) -> None:
    subject = layout_of(kind)
    layout = subject.video(VideoHeader(1, 24.0, 150, 100), subject.settings)
    assert (layout.frames, layout.grid[0]) == ((0,), 1)


def test_options_choose_frames_and_pixels() -> None:
    subject, header = layout_of("Glm4v"), VideoHeader(300, 30.0, 640, 480)
    assert len(subject.video(header, subject.settings_for(VideoOptions(num_frames=8))).frames) == 8
    assert len(subject.video(header, subject.settings_for(VideoOptions(fps=1.0))).frames) == 10
    small = subject.video(header, subject.settings_for(VideoOptions(max_pixels=100_000)))
    assert small.num_tokens < subject.video(header, subject.settings).num_tokens
    with pytest.raises(InvalidValue, match="send `num_frames`"):
        layout_of("Glm46V").settings_for(VideoOptions(fps=1.0))


@table(
    ("config", "preprocessor", "video", "by_duration"),
    [
        ({}, {}, {}, False),
        ({"model_type": "glm46v"}, {}, {}, True),
        ({"model_type": "glm4v_moe"}, {"processor_class": "Glm46VProcessor"}, {}, True),
        ({"model_type": "glm46v"}, {"processor_class": "Glm4vProcessor"}, {}, False),
        ({}, {"processor_class": "Glm4vProcessor"}, {"processor_class": "Glm46VProcessor"}, True),
    ],
)
def test_the_checkpoints_class_chooses_the_rule(config: Any, preprocessor: Any, video: Any, by_duration: bool) -> None:
    assert VideoLayout(config, preprocessor, video).settings["by_duration"] == by_duration


@table("wrong", [{"fps": 0}, {"max_frames": 0}, {"patch_size": 16}, {"do_rescale": False}])
def test_wrong_settings_name_the_file(wrong: dict[str, Any]) -> None:
    with pytest.raises(
        StartupError, match=r"^video_preprocessor_config\.json, the settings for videos: " + next(iter(wrong))
    ):
        VideoLayout({"vision_config": {"patch_size": 14}}, {"patch_size": 14}, wrong)
