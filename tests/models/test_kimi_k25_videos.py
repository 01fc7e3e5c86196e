"""Kimi-K2.5's videos against the release's processor, from its description, and that of transformers."""

import warnings
from typing import Any

import clips
import numpy as np
import pytest
import torch
from checkpoints.kimi_k25 import MEDIA_PROC_CFG, write
from PIL import Image
from references.kimi_k25 import PLACEHOLDER, KimiK25
from tables import table
from torchvision_schemas import import_torchvision

from saccade.errors import InternalError, InvalidValue, StartupError
from saccade.media.video import read_frames, read_header
from saccade.media.video_header import VideoLimits
from saccade.models.family import VideoOptions
from saccade.models.kimi_k25.pixels import VideoPixels
from saccade.models.kimi_k25.video import VideoLayout
from saccade.protocol.media import ImageLayout, VideoHeader

pytestmark = pytest.mark.ci

PREPROCESSOR = {"media_proc_cfg": MEDIA_PROC_CFG}
SERVED = clips.served()
LIMITS = VideoLimits()
SIZES = [(64, 48), (65, 49), (1, 90), (320, 240), (640, 481), (1280, 720), (2300, 11)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> KimiK25:
    return KimiK25(write(tmp_path_factory.mktemp("kimi")))


def patches(frames: np.ndarray, layout: ImageLayout, subject: VideoLayout) -> np.ndarray:
    out = np.full(layout.pixel_shape, 7, np.uint8)
    VideoPixels(subject.settings).write_pixels((frames[index] for index in layout.frames), layout, out)
    return out


def written(layout: ImageLayout) -> str:
    return "".join(piece if isinstance(piece, str) else PLACEHOLDER * piece for piece in layout.prompt)


def check(reference: KimiK25, frames: np.ndarray, header: VideoHeader) -> None:
    subject = VideoLayout({}, PREPROCESSOR, {})
    layout = subject.video(header, subject.settings)
    watched = reference.watch([Image.fromarray(frame) for frame in frames], header.fps)
    assert list(layout.frames) == watched.frames
    assert layout.grid == (sum(grid[0] for grid in watched.grids), *watched.grids[0][1:])
    assert written(layout) == watched.text
    assert layout.num_tokens == watched.text.count(PLACEHOLDER)
    assert np.array_equal(patches(frames, layout, subject), watched.pixels)


@table("name", SERVED)
def test_clips_equal_the_reference(reference: KimiK25, name: str) -> None:
    header = read_header(SERVED[name], LIMITS)
    everything = range(header.num_frames)
    check(reference, np.stack(list(read_frames(SERVED[name], header, everything, LIMITS))), header)


@table("size", SIZES)
@table(("num_frames", "fps"), [(1, 25.0), (2, 4.0), (13, 1.7), (30, 6.0)])
def test_drawn_frames_equal_the_reference(
    reference: KimiK25, size: tuple[int, int], num_frames: int, fps: float
) -> None:
    frames = np.random.default_rng(num_frames).integers(0, 256, (num_frames, *size[::-1], 3), np.uint8)
    check(reference, frames, VideoHeader(num_frames, fps, *size))


@pytest.mark.parametrize("fps", [0.5, 2.0, 24.0, 29.97, 60.0])
def test_hours_equal_the_reference(reference: KimiK25, fps: float) -> None:
    subject, frame = VideoLayout({}, PREPROCESSOR, {}), Image.new("RGB", (28, 28))
    for total in (*range(1, 120), 5000, 20_000):
        layout = subject.video(VideoHeader(total, fps, 28, 28), subject.settings)
        watched = reference.watch([frame] * total, fps)
        assert (list(layout.frames), written(layout)) == (watched.frames, watched.text)


def test_frames_that_fit_equal_transformers() -> None:
    """Patches, grids and text; resized frames differ, since transformers resizes without Pillow."""
    import_torchvision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns about its own deprecations
        from transformers import Kimi_K25Processor, Kimi_K25VideoProcessor
    from transformers.video_utils import VideoMetadata

    frames = np.random.default_rng(0).integers(0, 256, (11, 90, 150, 3), np.uint8)
    metadata = VideoMetadata(total_num_frames=11, fps=2.0, frames_indices=list(range(11)))
    chunks = Kimi_K25VideoProcessor(do_sample_frames=False)(
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
        video_metadata=[metadata],
        return_metadata=True,
        return_tensors="pt",
    )
    subject = VideoLayout({}, PREPROCESSOR, {})
    layout = subject.video(VideoHeader(11, 2.0, 150, 90), subject.settings)
    ours = torch.from_numpy(patches(frames, layout, subject)).float() / 255
    torch.testing.assert_close((ours - 0.5) / 0.5, chunks["pixel_values_videos"], atol=1e-6, rtol=0)
    assert [grid.tolist() for grid in chunks["video_grid_thw"]] == [[n, *layout.grid[1:]] for n in (4, 4, 3)]
    processor = Kimi_K25Processor.__new__(Kimi_K25Processor)
    processor.video_token = PLACEHOLDER
    processor.video_processor = Kimi_K25VideoProcessor()
    assert processor.replace_video_token(chunks, 0) == written(layout)


def test_transformers_settings_are_read() -> None:
    given = {"max_patches": 100, "fps": 1.0, "temporal_patch_size": 4, "size": {"max_height": 9, "max_width": 9}}
    settings = VideoLayout({}, {"max_patches": 16384, "size": {"max_height": 512, "max_width": 512}}, given).settings
    assert {key: settings[key] for key in ("in_patch_limit", "fps", "clip_frames", "patch_limit_on_one_side")} == {
        "in_patch_limit": 100, "fps": 1.0, "clip_frames": 4, "patch_limit_on_one_side": 9,
    }  # fmt: skip


def test_frames_without_a_limit_have_that_of_images() -> None:
    given = {"media_proc_cfg": {**MEDIA_PROC_CFG, "in_patch_limit_each_frame": None, "in_patch_limit": 500}}
    assert VideoLayout({}, given, {}).settings["in_patch_limit"] == 500


def test_options_choose_frames_and_pixels() -> None:
    subject, header = VideoLayout({}, PREPROCESSOR, {}), VideoHeader(300, 30.0, 640, 480)
    plain = subject.video(header, subject.settings)
    assert subject.settings_for(VideoOptions()) == subject.settings
    assert len(plain.frames) == 20
    assert len(subject.video(header, subject.settings_for(VideoOptions(num_frames=9))).frames) == 9
    assert len(subject.video(header, subject.settings_for(VideoOptions(num_frames=999))).frames) == 300
    assert len(subject.video(header, subject.settings_for(VideoOptions(fps=1.0))).frames) == 10
    small = subject.video(header, subject.settings_for(VideoOptions(max_pixels=100 * 100)))
    assert small.num_tokens < plain.num_tokens
    for refused in (VideoOptions(max_pixels=10), VideoOptions(min_pixels=64)):
        with pytest.raises(InvalidValue):
            subject.settings_for(refused)


@table(
    "wrong",
    [
        {"sample_fps": 0},
        {"in_patch_limit_each_frame": 0},
        {"in_patch_limit_video": 9000},
        {"max_num_frames_each_video": 8},
        {"timestamp_mode": "mm:ss.fff"},
        {"temporal_merge_kernel_size": 2},
        {"temporal_merge_kernel_size": True},
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, Any]) -> None:
    config = {"vision_config": {"init_pos_emb_time": 4}}
    with pytest.raises(StartupError, match=next(iter(wrong))):
        VideoLayout(config, {"media_proc_cfg": {**MEDIA_PROC_CFG, **wrong}}, {})


def test_patches_are_those_of_images() -> None:
    with pytest.raises(StartupError, match="image_mean"):
        VideoLayout({}, PREPROCESSOR, {"image_mean": [0.1, 0.1, 0.1]})


def test_other_frames_are_an_error() -> None:
    subject = VideoLayout({}, PREPROCESSOR, {})
    layout = subject.video(VideoHeader(4, 2.0, 64, 64), subject.settings)
    frame, out = np.zeros((64, 64, 3), np.uint8), np.empty(layout.pixel_shape, np.uint8)
    for frames in ([], [frame] * 3, [np.zeros((64, 640, 3), np.uint8)] * 4):
        with pytest.raises(InternalError):
            VideoPixels(subject.settings).write_pixels(frames, layout, out)
