"""Layout of InternVL against the reference processor. The conformance suite compares pixels. A3, F4"""

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
from saccade.models.internvl.layout import Layout, tiles
from saccade.models.internvl.pixels import Pixels, VideoPixels
from saccade.models.internvl.video import VideoLayout
from saccade.protocol.media import VideoHeader

VISION = {"image_size": [56, 56], "patch_size": [14, 14], "attention_bias": True}
CONFIG = {"vision_config": VISION}
COLOURS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
PREPROCESSOR = {**COLOURS, "size": {"height": 56, "width": 56}}
CHAT = {
    "llm_config": {}, "vision_config": {**VISION, "image_size": 56, "patch_size": 14}, "force_image_size": 56,
    "min_dynamic_patch": 1, "max_dynamic_patch": 6, "use_thumbnail": True,
}  # fmt: skip


@given(
    width=st.integers(1, 6_000),
    height=st.integers(1, 6_000),
    limits=st.sampled_from([(1, 12), (1, 6), (2, 40), (1, 1)]),
)
@example(width=448, height=448, limits=(1, 12))
@example(width=896, height=448, limits=(1, 12))
@example(width=6_000, height=1, limits=(2, 40))
@hypothesis_settings(max_examples=60, deadline=None)
def test_tiles_equal_the_reference(width: int, height: int, limits: tuple[int, int]) -> None:
    from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

    columns, rows = get_optimal_tiled_canvas((height, width), (448, 448), *limits)
    assert tiles(height, width, 448, *limits) == (rows, columns)


def test_views_of_an_image() -> None:
    layout = Layout(CONFIG, PREPROCESSOR)
    wide = layout.image(400, 100, layout.settings)
    assert (wide.grid, wide.pixel_shape, wide.prompt) == ((1, 4, 16), (5, 3, 56, 56), ("<img>", 20, "</img>"))
    low = layout.image(400, 100, layout.settings_for(ImageOptions(detail="low")))
    assert (low.grid, low.pixel_shape, low.num_tokens) == ((1, 4, 4), (1, 3, 56, 56), 4)
    with pytest.raises(InvalidValue, match="max_pixels"):
        layout.settings_for(ImageOptions(max_pixels=5))


def test_both_forms_have_the_same_settings() -> None:
    ours = Layout(CONFIG, {**PREPROCESSOR, "max_patches": 6})
    for size in (56, [56, 56], {"height": 56, "width": 56, "longest_edge": None}):
        assert Layout(CHAT, {**COLOURS, "size": size}).settings == ours.settings


def test_an_image_of_another_size_is_an_error() -> None:
    layout = Layout(CONFIG, PREPROCESSOR)
    shape = layout.image(400, 100, layout.settings)
    with pytest.raises(InternalError):
        Pixels(layout.settings).write_pixels(
            np.zeros((10, 10, 3), np.uint8), shape, np.zeros(shape.pixel_shape, np.uint8)
        )


@table(
    ("config", "preprocessor", "named"),
    [  # A9
        (CONFIG, {**PREPROCESSOR, "size": {"height": 48, "width": 48}}, "size"),
        (CONFIG, {**PREPROCESSOR, "size": {"height": 56, "width": 48}}, "equal height"),
        (CONFIG, {**PREPROCESSOR, "min_patches": 0}, "min_patches"),
        (CONFIG, {**PREPROCESSOR, "min_patches": 7, "max_patches": 6}, "max_patches"),
        (CONFIG, {**PREPROCESSOR, "do_resize": False}, "do_resize"),
        (CHAT, {"size": 56}, "image_mean"),
        ({**CONFIG, "downsample_ratio": 0.3}, PREPROCESSOR, "downsample_ratio"),
        ({**CONFIG, "vision_feature_layer": -2}, PREPROCESSOR, "vision_feature_layer"),
        ({"vision_config": {**VISION, "norm_type": "batch_norm"}}, PREPROCESSOR, "norm_type"),
        ({"vision_config": 5}, PREPROCESSOR, "vision_config"),
        ({**CHAT, "ps_version": "v1"}, COLOURS, "ps_version"),
        ({**CHAT, "use_thumbnail": False}, COLOURS, "use_thumbnail"),
        ({**CHAT, "force_image_size": 112}, COLOURS, "force_image_size"),
    ],
)
def test_wrong_files_stop_the_start(config: Any, preprocessor: Any, named: str) -> None:
    with pytest.raises(StartupError, match=named):
        Layout(config, preprocessor)


def videos(**stated: Any) -> VideoLayout:
    return VideoLayout(CONFIG, PREPROCESSOR, stated)


@given(total=st.integers(1, 3_000), count=st.integers(1, 64), fps=st.sampled_from([None, 0.5, 2, 7]))
@hypothesis_settings(max_examples=60, deadline=None)
def test_frames_are_those_of_the_reference(total: int, count: int, fps: float | None) -> None:
    from transformers import InternVLVideoProcessor
    from transformers.video_utils import VideoMetadata

    subject, header = videos(), VideoHeader(total, 24.0, 64, 48)
    settings = subject.settings_for(VideoOptions(num_frames=None if fps else count, fps=fps))
    ours = subject.video(header, settings).frames
    stated = {"num_frames": min(count, total)} if fps is None else {"fps": fps}
    if fps is None or int(total / 24 * fps):
        theirs = InternVLVideoProcessor().sample_frames(VideoMetadata(total_num_frames=total, fps=24.0), **stated)
        assert list(ours) == theirs.tolist()
    else:
        assert ours == (total // 2,)


@table("header", [VideoHeader(9, 24.0, 150, 100), VideoHeader(3, 2.0, 40, 90), VideoHeader(1, 1.0, 56, 56)])
def test_videos_equal_the_reference(header: VideoHeader) -> None:
    from transformers import InternVLProcessor, InternVLVideoProcessor

    subject = videos(num_frames=6)
    layout = subject.video(header, subject.settings)
    draw = np.random.default_rng(0)
    frames = draw.integers(0, 256, (header.num_frames, header.height, header.width, 3), dtype=np.uint8)
    seen = torch.from_numpy(frames[list(layout.frames)]).permute(0, 3, 1, 2)
    made = InternVLVideoProcessor(**COLOURS, size={"height": 56, "width": 56})(videos=[seen], return_tensors="pt")
    ours = np.full(layout.pixel_shape, 7, np.uint8)
    VideoPixels(subject.settings).write_pixels((frames[index] for index in layout.frames), layout, ours)
    assert torch.equal((torch.from_numpy(ours).float() - 127.5) / 127.5, made["pixel_values_videos"][0])
    count = min(6, header.num_frames)
    assert (layout.grid, layout.num_tokens) == ((count, 4, 4), 4 * count)
    itself = InternVLProcessor.__new__(InternVLProcessor)
    itself.start_image_token, itself.image_token, itself.end_image_token = "<img>", "<IMG_CONTEXT>", "</img>"
    itself.image_seq_length = 4
    written = "".join(piece if isinstance(piece, str) else "<IMG_CONTEXT>" * piece for piece in layout.prompt)
    assert written == itself.replace_video_token(made, 0)
    with pytest.raises(InternalError, match="frames"):
        VideoPixels(subject.settings).write_pixels(frames[:0], layout, ours)


def test_options_choose_frames_and_no_pixels() -> None:
    header = VideoHeader(300, 30.0, 64, 48)
    assert len(videos().video(header, videos().settings).frames) == 8
    assert len(videos().video(header, videos().settings_for(VideoOptions(fps=2.0))).frames) == 20
    assert VideoLayout(CHAT, {**COLOURS, "size": 56}, {}).settings == videos().settings
    with pytest.raises(InvalidValue, match="max_pixels"):
        videos().settings_for(VideoOptions(max_pixels=9))


@table("wrong", [{"fps": 2}, {"num_frames": 0}, {"initial_shift": 3}, {"image_mean": [0.1] * 3}, {"size": 48}])
def test_wrong_settings_of_videos_name_the_file(wrong: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match=r"video_preprocessor_config\.json.*" + next(iter(wrong))):
        videos(**wrong)
