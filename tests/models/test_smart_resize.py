"""Resize rule and settings of the towers that merge 2 x 2 patches, against the reference processor."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tables import table

from saccade.errors import ImageTooLarge, InvalidValue, StartupError
from saccade.models.family import ImageOptions
from saccade.models.preprocessing import smart_resize

DEFAULTS: dict[str, Any] = {
    "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 3136, "max_pixels": 1_003_520,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
SETTINGS = {**DEFAULTS, "patch_size": 16, "min_pixels": 65_536, "max_pixels": 16_777_216}


@given(width=st.integers(1, 16_384), height=st.integers(1, 16_384))
@example(width=48, height=80)  # 1.5 and 2.5 merged blocks: half to even
@example(width=16, height=3200)
@example(width=7000, height=35)
@hypothesis_settings(max_examples=300, deadline=None)
def test_sizes_equal_the_reference(width: int, height: int) -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as reference

    for settings in (SETTINGS, DEFAULTS):
        if max(width, height) > 200 * min(width, height):
            with pytest.raises(ImageTooLarge):
                smart_resize.resized(width, height, settings)
        else:
            limits = (settings["min_pixels"], settings["max_pixels"])
            expected = reference(height, width, settings["patch_size"] * 2, *limits)
            assert smart_resize.resized(width, height, settings) == expected


@table(
    "spelling",
    [
        {},
        {"min_pixels": 5000},
        {"max_pixels": 70_000, "size": None},
        {"min_pixels": None, "max_pixels": None},
        {"size": {"shortest_edge": 4000, "longest_edge": 90_000}},
        {"size": {"shortest_edge": 4000, "longest_edge": 90_000}, "min_pixels": 5000},
        {"size": {"shortest_edge": 4000}, "max_pixels": 60_000},
        {"size": {"min_pixels": 4000, "max_pixels": 90_000}, "min_pixels": 5000, "max_pixels": 60_000},
        # The names in `size` differ, and neither counts.
        {
            "size": {"shortest_edge": 3136, "longest_edge": 90_000, "min_pixels": 3136, "max_pixels": 80_000},
            "min_pixels": 5000,
            "max_pixels": 60_000,
        },
    ],
)
def test_limits_are_the_reference_processors(tmp_path: Path, spelling: dict[str, Any]) -> None:  # A3
    import transformers

    content = {"image_processor_type": "Qwen2VLImageProcessorFast", **spelling}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    reference = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    settings = smart_resize.resolve(spelling, DEFAULTS)
    limits = (settings["min_pixels"], settings["max_pixels"])
    assert limits == (reference.size["shortest_edge"], reference.size["longest_edge"])


def test_limits_under_size_in_the_older_spelling() -> None:  # the reference processor stops at the first image
    settings = smart_resize.resolve({"size": {"min_pixels": 4000, "max_pixels": 90_000}}, DEFAULTS)
    assert (settings["min_pixels"], settings["max_pixels"]) == (4000, 90_000)


@table(
    ("preprocessor", "named"),
    [  # A3, A9
        *(
            ({"size": size, **beside}, "size must have shortest_edge and longest_edge")
            for size, beside in (
                ({"shortest_edge": 65_536}, {}),
                ({"longest_edge": 65_536}, {"max_pixels": 65_536}),
                ({}, {}),
                (448, {}),
                ([448, 448], {"min_pixels": 4000, "max_pixels": 90_000}),
                ({"height": 448, "width": 448}, {}),
                ({"height": 448, "width": 448}, {"min_pixels": 4000, "max_pixels": 90_000}),
                ({"shortest_edge": 4000, "longest_edge": 90_000, "height": 448, "width": 448}, {}),
                ({"shortest_edge": 4000, "longest_edge": 90_000, "max_pixels": 80_000}, {}),
            )
        ),
        ({"size": {"shortest_edge": "4000", "longest_edge": 90_000}}, "min_pixels"),
        ({"min_pixels": 5000, "max_pixels": 4000}, "at most max_pixels"),
        ({"max_pixels": "4000"}, "max_pixels"),
        ({"min_pixels": True}, "min_pixels"),
        ({"patch_size": 0}, "patch_size"),
        ({"patch_size": 15, "merge_size": 1}, "must be even"),
        ({"image_std": 0.5}, "image_std"),
        ({"image_std": [0.5, 0.5, 0]}, "image_std"),
        ({"image_mean": ["0.5"] * 3}, "image_mean"),
        ({"resample": 2}, "resample"),
        ({"do_resize": False}, "do_resize"),
    ],
)
def test_wrong_files_stop_the_start(preprocessor: dict[str, Any], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        smart_resize.resolve(preprocessor, DEFAULTS)


@table(
    ("options", "limits"),
    [
        (ImageOptions(), (65_536, 16_777_216)),
        (ImageOptions(detail="high"), (65_536, 16_777_216)),
        (ImageOptions(detail="low"), (65_536, 262_144)),
        (ImageOptions(min_pixels=1), (1, 16_777_216)),
        (ImageOptions(max_pixels=100_000), (65_536, 100_000)),
        (ImageOptions("low", max_pixels=100_000), (65_536, 100_000)),
        (ImageOptions("low", min_pixels=100_000, max_pixels=1_000_000), (100_000, 262_144)),
    ],
)
def test_a_request_moves_the_limits(options: ImageOptions, limits: tuple[int, int]) -> None:
    adjusted = smart_resize.adjusted(SETTINGS, options)
    assert (adjusted["min_pixels"], adjusted["max_pixels"]) == limits
    assert json.loads(json.dumps(adjusted)) == adjusted
    assert (adjusted is SETTINGS) == (limits == (65_536, 16_777_216))
    rows, columns = smart_resize.image_layout(1280, 960, adjusted).grid[1:]
    assert rows * columns * 256 <= limits[1]


def test_low_detail_lowers_the_models_own_least() -> None:
    adjusted = smart_resize.adjusted({**SETTINGS, "min_pixels": 500_000}, ImageOptions("low"))
    assert (adjusted["min_pixels"], adjusted["max_pixels"]) == (262_144, 262_144)


@table(
    "options",
    [
        ImageOptions(min_pixels=0),
        ImageOptions(max_pixels=-1),
        ImageOptions(min_pixels=16_777_217),
        ImageOptions(max_pixels=10**30),
        ImageOptions(max_pixels=True),
        ImageOptions(max_pixels=1e6),  # type: ignore[arg-type]
        ImageOptions(max_pixels=60_000),  # below the model's own least
        ImageOptions(min_pixels=90_000, max_pixels=80_000),
        ImageOptions("low", min_pixels=300_000),
    ],
)
def test_limits_that_make_no_sense_are_refused(options: ImageOptions) -> None:
    with pytest.raises(InvalidValue) as caught:
        smart_resize.adjusted(SETTINGS, options)
    assert (caught.value.param or "").startswith("mm_processor_kwargs")


def test_crossed_limits_are_refused_with_a_suggestion() -> None:
    """`detail` is named only to those who sent it."""
    cases = {
        ImageOptions(max_pixels=50_000): "this model's `min_pixels` (65536); send a `min_pixels` of at most 50000 too.",
        ImageOptions("high", max_pixels=50_000): "send a `min_pixels` of at most 50000 too.",
        ImageOptions(min_pixels=90_000, max_pixels=80_000): "`min_pixels` (90000) is more than `max_pixels` (80000).",
        ImageOptions(
            "low", min_pixels=300_000
        ): "than `detail: low` allows (262144); send less, or leave out `detail`.",
        ImageOptions("low", min_pixels=90_000, max_pixels=80_000): "more than `max_pixels` (80000).",
    }
    for options, words in cases.items():
        with pytest.raises(InvalidValue) as caught:
            smart_resize.adjusted(SETTINGS, options)
        assert caught.value.message.endswith(words), options
        assert ("detail" in caught.value.message) is ("detail" in words), options
    small = {**SETTINGS, "max_pixels": 80_000}
    with pytest.raises(InvalidValue, match="send a `max_pixels` of at least 90000 too"):
        smart_resize.adjusted(small, ImageOptions(min_pixels=90_000))


def test_a_models_own_limit_may_be_asked_for() -> None:
    large = {**SETTINGS, "max_pixels": 10**8}
    assert smart_resize.adjusted(large, ImageOptions(min_pixels=10**8))["min_pixels"] == 10**8


def test_the_most_that_a_request_can_get_is_bounded() -> None:
    settings = smart_resize.adjusted(SETTINGS, ImageOptions(min_pixels=smart_resize.MOST_PIXELS))
    for size in ((1, 1), (1, 200), (200, 1), (333, 2)):
        assert math.prod(smart_resize.resized(*size, settings)) <= 1.2 * smart_resize.MOST_PIXELS
