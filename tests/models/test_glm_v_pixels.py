"""Layout of GLM-4.xV against the reference processor. The conformance suite compares pixels. A3, F4"""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tables import table

from saccade.errors import ImageTooLarge, StartupError
from saccade.models.family import ImageOptions
from saccade.models.glm_v.layout import Layout


@given(
    width=st.integers(1, 6_000),
    height=st.integers(1, 6_000),
    limits=st.sampled_from([(12_544, 9_633_792), (12_545, 1_003_521), (12_544, 28 * 28 * 15_000)]),
)
@example(width=1, height=200, limits=(12_544, 9_633_792))
@example(width=5_599, height=27, limits=(12_544, 9_633_792))
@example(width=201, height=1, limits=(12_544, 9_633_792))
@hypothesis_settings(max_examples=100, deadline=None)
def test_sizes_equal_the_reference(width: int, height: int, limits: tuple[int, int]) -> None:
    from transformers.models.glm4v.image_processing_glm4v import smart_resize

    least, most = limits
    settings = {**Layout({}, {}).settings, "min_pixels": least, "max_pixels": most}
    try:
        expected = smart_resize(2, height, width, 2, 28, least, most)
    except ValueError:
        with pytest.raises(ImageTooLarge):
            Layout.image(width, height, settings)
    else:
        layout = Layout.image(width, height, settings)
        assert (layout.resized_height, layout.resized_width) == expected


@table("kind", ["Glm4v", "Glm46V"])
def test_missing_settings_equal_the_reference(kind: str) -> None:
    import transformers

    said = getattr(transformers, f"{kind}ImageProcessor")().to_dict()
    reference = {**said, "min_pixels": said["size"]["shortest_edge"], "max_pixels": said["size"]["longest_edge"]}
    expected = {key: list(one) if isinstance(one := reference[key], tuple) else one for key in Layout.defaults}
    assert Layout({}, {}).settings == expected


@table("kind", ["Glm4v", "Glm46V"])
@table("size", [None, {"shortest_edge": 12_288, "longest_edge": 120_000}])
@table("outside", [{"min_pixels": 20_000}, {"max_pixels": 50_000}, {"min_pixels": 20_000, "max_pixels": 50_000}])
def test_limits_outside_size_do_not_count(kind: str, size: dict[str, int] | None, outside: dict[str, int]) -> None:
    """As in the reference."""
    import transformers

    stated = {**outside, **({} if size is None else {"size": size})}
    said = getattr(transformers, f"{kind}ImageProcessor")(**stated).size
    settings = Layout({}, stated).settings
    assert (settings["min_pixels"], settings["max_pixels"]) == (said["shortest_edge"], said["longest_edge"])


def test_limits_count_both_frames_of_a_patch() -> None:
    layout = Layout({}, {})
    small = layout.image(1000, 1000, layout.settings_for(ImageOptions(max_pixels=2 * 280 * 280)))
    assert (small.resized_width, small.num_tokens) == (280, 100)


@table(
    ("config", "preprocessor", "named"),
    [  # A9
        ({"vision_config": {"patch_size": 16}}, {}, "patch_size"),
        ({"vision_config": {"temporal_patch_size": 1}}, {}, "temporal_patch_size"),
        ({}, {"do_resize": False}, "do_resize"),
    ],
)
def test_wrong_files_stop_the_start(config: Any, preprocessor: Any, named: str) -> None:
    with pytest.raises(StartupError, match=named):
        Layout(config, preprocessor)
