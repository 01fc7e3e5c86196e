"""Layout of PaddleOCR-VL against the reference processor. The conformance suite compares pixels. A3, F4"""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tables import table

from saccade.errors import ImageTooLarge, InvalidValue, StartupError
from saccade.models.family import ImageOptions
from saccade.models.paddleocr_vl.layout import Layout


@given(
    width=st.integers(1, 6_000),
    height=st.integers(1, 6_000),
    limits=st.sampled_from([(147_384, 2_822_400), (112_896, 1_003_520), (28 * 28, 28 * 28 * 40)]),
)
@example(width=1, height=200, limits=(112_896, 1_003_520))
@example(width=5_599, height=27, limits=(112_896, 1_003_520))
@example(width=201, height=1, limits=(112_896, 1_003_520))
@example(width=10, height=14, limits=(28 * 28, 28 * 28 * 40))
@hypothesis_settings(max_examples=100, deadline=None)
def test_sizes_equal_the_reference(width: int, height: int, limits: tuple[int, int]) -> None:
    from transformers.models.paddleocr_vl.image_processing_paddleocr_vl import smart_resize

    least, most = limits
    settings = {**Layout({}, {}).settings, "min_pixels": least, "max_pixels": most}
    try:
        expected = smart_resize(height, width, 28, least, most)
    except ValueError:
        with pytest.raises(ImageTooLarge):
            Layout.image(width, height, settings)
    else:
        layout = Layout.image(width, height, settings)
        assert (layout.resized_height, layout.resized_width) == expected


def test_missing_settings_equal_the_reference() -> None:
    from transformers import PaddleOCRVLImageProcessor

    said = PaddleOCRVLImageProcessor().to_dict()
    limits = {"min_pixels": said["size"]["shortest_edge"], "max_pixels": said["size"]["longest_edge"]}
    reference = {**said, **limits}
    expected = {key: list(one) if isinstance(one := reference[key], tuple) else one for key in Layout.defaults}
    assert Layout({}, {}).settings == expected


def test_pipeline_limits_choose_the_size() -> None:
    """What PaddleOCR's pipeline sends with each region of a page."""
    layout = Layout({}, {})
    settings = layout.settings_for(ImageOptions(min_pixels=112_896, max_pixels=1_003_520))
    page = layout.image(1000, 1400, settings)
    assert (page.resized_width, page.resized_height, page.num_tokens) == (840, 1176, 1260)
    assert layout.image(1000, 1400, layout.settings).num_tokens == 1800


@pytest.mark.parametrize("least", [2_000_000, 0])
def test_wrong_limits_are_refused(least: int) -> None:
    with pytest.raises(InvalidValue, match="min_pixels"):
        Layout({}, {}).settings_for(ImageOptions(min_pixels=least, max_pixels=1_003_520))


@table(
    ("config", "preprocessor", "named"),
    [  # A9
        ({"vision_config": {"patch_size": 16}}, {}, "patch_size"),
        ({"vision_config": {"spatial_merge_size": 3}}, {}, "spatial_merge_size"),
        ({}, {"temporal_patch_size": 2}, "temporal_patch_size"),
        ({}, {"do_resize": False}, "do_resize"),
        ({}, {"image_std": [0.5, 0.5, 0]}, "image_std"),
    ],
)
def test_wrong_files_stop_the_start(config: Any, preprocessor: Any, named: str) -> None:
    with pytest.raises(StartupError, match=named):
        Layout(config, preprocessor)


def test_time_of_the_towers_configuration_is_not_read() -> None:
    assert Layout({"vision_config": {"temporal_patch_size": 2}}, {"temporal_patch_size": 1}).settings
