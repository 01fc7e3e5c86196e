"""Layout of Gemma 4's images and videos against the reference processors. The conformance suite compares pixels. A3 F4"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tables import table

from saccade.errors import InternalError, InvalidValue, StartupError
from saccade.models.family import ImageOptions, VideoOptions
from saccade.models.gemma4.layout import BUDGETS, DEFAULTS, Layout, resized
from saccade.models.gemma4.pixels import Pixels, VideoPixels
from saccade.models.gemma4.video import DEFAULTS as VIDEO_DEFAULTS
from saccade.models.gemma4.video import VideoLayout
from saccade.protocol.media import VideoHeader

SMALL = {"patch_size": 4, "max_soft_tokens": 70}


@given(st.integers(1, 33_000), st.integers(1, 33_000), st.sampled_from(BUDGETS), st.sampled_from([4, 16]))
@example(1, 33_000, 70, 16)
@example(33_000, 1, 1120, 16)
@example(48, 48, 280, 16)
@hypothesis_settings(max_examples=500, deadline=None)
def test_sizes_equal_the_reference(width: int, height: int, budget: int, patch: int) -> None:
    from transformers.models.gemma4.image_processing_gemma4 import get_aspect_ratio_preserving_size

    settings = {"patch_size": patch, "merge_size": 3, "max_soft_tokens": budget}
    expected = get_aspect_ratio_preserving_size(height, width, patch, budget * 9, 3)
    assert resized(width, height, settings) == expected


def test_missing_settings_equal_the_reference() -> None:
    from transformers import Gemma4ImageProcessor, Gemma4VideoProcessor

    for processor, defaults in ((Gemma4ImageProcessor(), DEFAULTS), (Gemma4VideoProcessor(), VIDEO_DEFAULTS)):
        assert {key: processor.to_dict()[key] for key in defaults} == defaults


@table(
    ("options", "budget"),
    [
        ({}, 280),
        ({"detail": "high"}, 280),
        ({"detail": "low"}, 70),
        ({"max_soft_tokens": 1120}, 1120),
        ({"max_soft_tokens": 560, "max_pixels": 1}, 560),
        ({"detail": "low", "max_soft_tokens": 560}, 70),
        ({"max_pixels": 70 * 48 * 48}, 70),
        ({"max_pixels": 280 * 48 * 48 - 1}, 140),
        ({"max_pixels": 2**30}, 1120),
    ],
)
def test_options_choose_a_budget(options: dict[str, Any], budget: int) -> None:
    layout = Layout({}, {})
    assert layout.settings_for(ImageOptions(**options))["max_soft_tokens"] == budget
    if "detail" not in options:
        videos = VideoLayout({}, {}, {"max_soft_tokens": 280})
        assert videos.settings_for(VideoOptions(**options))["max_soft_tokens"] == budget


@table("options", [{"min_pixels": 9}, {"max_pixels": 70 * 48 * 48 - 1}])
def test_impossible_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(InvalidValue, match="pixels"):
        Layout({}, {}).settings_for(ImageOptions(**options))
    with pytest.raises(InvalidValue, match="pixels"):
        VideoLayout({}, {}, {}).settings_for(VideoOptions(**options))


@table(
    ("config", "preprocessor", "words"),
    [
        ({}, {"max_soft_tokens": 100}, "must be one of"),
        ({}, {"patch_size": 0}, "patch_size must be a whole number"),
        ({}, {"patch_size": 5}, "must be even"),
        ({}, {"resample": 2}, "resample"),
        ({}, {"image_mean": [0.5] * 3}, "image_mean"),
        ({"vision_config": {"patch_size": 14}}, {}, "vision_config.patch_size is 14"),
        ({"vision_config": {"pooling_kernel_size": 2}}, {}, "pooling_kernel_size"),
    ],
)
def test_wrong_files_are_refused(config: dict[str, Any], preprocessor: dict[str, Any], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        Layout(config, preprocessor)
    with pytest.raises(StartupError, match=r"settings for videos.*" + words):
        VideoLayout(config, {}, preprocessor)


def test_layout_for_another_size_is_an_error() -> None:
    layout = Layout({}, SMALL)
    shape = layout.image(100, 100, layout.settings)
    with pytest.raises(InternalError):
        Pixels(layout.settings).write_pixels(
            np.zeros((50, 100, 3), np.uint8), shape, np.zeros(shape.pixel_shape, np.uint8)
        )


def test_patches_show_the_image() -> None:
    layout = Layout({}, SMALL)
    shape = layout.image(96, 84, layout.settings)
    image = np.random.default_rng(0).integers(0, 256, (84, 96, 3), dtype=np.uint8)
    patches = np.zeros(shape.pixel_shape, np.uint8)
    Pixels(layout.settings).write_pixels(image, shape, patches)
    shown = Pixels(layout.settings).to_image(patches, shape)
    assert shown.shape == (shape.resized_height, shape.resized_width, 3)
    assert ((shape.resized_height, shape.resized_width) != (84, 96)) or np.array_equal(shown, image)


@table(
    ("header", "video", "changed"),
    [
        (VideoHeader(40, 24.0, 60, 40), {}, {}),
        (VideoHeader(33, 0.5, 40, 60), {"num_frames": 3}, {"num_frames": 3}),
        (VideoHeader(50, 2.5, 30, 90), {"num_frames": 50}, {"num_frames": 50}),
        (
            VideoHeader(64, 25.0, 100, 20),
            {"num_frames": 5, "max_soft_tokens": 140},
            {"num_frames": 5, "max_soft_tokens": 140},
        ),
    ],
)
def test_videos_equal_the_reference(header: VideoHeader, video: dict[str, Any], changed: dict[str, Any]) -> None:
    from transformers import Gemma4Processor, Gemma4VideoProcessor
    from transformers.video_utils import VideoMetadata

    draw = np.random.default_rng(0)
    frames = draw.integers(0, 256, (header.num_frames, header.height, header.width, 3), dtype=np.uint8)
    reference = Gemma4VideoProcessor(**{**SMALL, **changed})
    made = reference(
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
        video_metadata=[VideoMetadata(total_num_frames=header.num_frames, fps=header.fps)],
        return_metadata=True,
        return_tensors="pt",
    )
    subject = VideoLayout({}, {}, {**SMALL, **video})
    layout = subject.video(header, subject.settings)
    count, rows, columns = layout.grid
    assert list(layout.frames) == list(made["video_metadata"][0]["frames_indices"])
    assert layout.num_tokens == count * int(made["num_soft_tokens_per_video"][0])
    ours = np.full(layout.pixel_shape, 7, np.uint8)
    VideoPixels(subject.settings).write_pixels((frames[index] for index in layout.frames), layout, ours)
    blocks = torch.from_numpy(ours).view(count, rows // 3, columns // 3, 3, 3, 3, 4, 4)
    raster = blocks.permute(0, 1, 3, 2, 4, 6, 7, 5).reshape(count, rows * columns, -1)
    expected = made["pixel_values_videos"][:, : rows * columns]
    assert torch.equal(raster.float() / 255, expected)
    itself = Gemma4Processor.__new__(Gemma4Processor)
    itself.boi_token, itself.video_token, itself.eoi_token = "<|image>", "<|video|>", "<image|>"
    written = "".join(piece if isinstance(piece, str) else "<|video|>" * piece for piece in layout.prompt)
    assert written == itself.replace_video_token(made, 0)


@table(
    ("options", "count"),
    [
        ({}, 32),
        ({"num_frames": 7}, 7),
        ({"num_frames": 90}, 50),
        ({"fps": 2.0}, 10),
        ({"fps": 0.01}, 1),
        ({"fps": 99}, 50),
    ],
)
def test_number_of_frames(options: dict[str, Any], count: int) -> None:
    layout = VideoLayout({}, {}, {})
    settings = layout.settings_for(VideoOptions(**options))
    frames = layout.video(VideoHeader(50, 10.0, 64, 48), settings).frames
    assert len(frames) == count
    assert sorted(set(frames)) == list(frames)


def test_rate_in_the_files_is_refused() -> None:
    with pytest.raises(StartupError, match="fps"):
        VideoLayout({}, {}, {"fps": 2.0})


def test_settings_of_videos_are_found_in_the_processors_file(checkpoint: Callable[[str], Path]) -> None:
    from saccade.models.files import read_model_files, video_processor

    settings = video_processor(read_model_files(checkpoint("gemma4")))
    assert (settings["num_frames"], settings["max_soft_tokens"]) == (32, 70)
    assert json.loads(json.dumps(VideoLayout({}, {}, settings).settings))["temporal_patch_size"] == 1
