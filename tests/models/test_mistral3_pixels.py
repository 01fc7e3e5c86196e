"""Layout of Mistral Small 3.1 against the reference processor. The conformance suite compares pixels. A3, F4"""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tables import table

from saccade.errors import ImageTooLarge, InvalidValue, StartupError
from saccade.models.family import ImageOptions
from saccade.models.mistral3.layout import Layout

PREPROCESSOR = {"patch_size": 14, "size": {"longest_edge": 1540}}


@given(width=st.integers(1, 33_000), height=st.integers(1, 33_000), edge=st.sampled_from([1540, 1024, 27]))
@example(width=1541, height=1, edge=1540)
@example(width=1, height=33_000, edge=1540)
@example(width=28, height=27, edge=27)
@hypothesis_settings(max_examples=40, deadline=None)
def test_sizes_equal_the_reference(width: int, height: int, edge: int) -> None:
    from transformers.models.pixtral.image_processing_pixtral import get_resize_output_image_size

    layout = Layout({}, {**PREPROCESSOR, "size": {"longest_edge": edge}})
    image = np.broadcast_to(np.uint8(0), (3, height, width))
    expected = get_resize_output_image_size(image, (edge, edge), (28, 28))
    if 0 in expected:
        with pytest.raises(ImageTooLarge, match=f"at most {edge} times"):
            layout.image(width, height, layout.settings)
    else:
        shape = layout.image(width, height, layout.settings)
        assert (shape.resized_height, shape.resized_width) == expected


def test_missing_settings_equal_the_reference() -> None:
    from transformers import PixtralImageProcessor

    reference = PixtralImageProcessor()
    assert Layout({}, {}).settings == {
        "patch_size": reference.patch_size["height"],
        "merge_size": 2,
        "longest_edge": reference.size.longest_edge,
        "image_mean": list(reference.image_mean),
        "image_std": list(reference.image_std),
    }


def test_text_of_rows() -> None:
    layout = Layout({}, PREPROCESSOR)
    shape = layout.image(80, 50, layout.settings)
    assert (shape.resized_width, shape.resized_height, shape.grid, shape.num_tokens) == (84, 56, (1, 4, 6), 6)
    assert shape.prompt == (3, "[IMG_BREAK]", 3, "[IMG_END]")


def test_low_detail_has_a_shorter_edge() -> None:
    layout = Layout({}, PREPROCESSOR)
    low = layout.settings_for(ImageOptions(detail="low"))
    assert layout.image(4000, 3000, low).num_tokens == 19 * 14
    assert layout.settings_for(ImageOptions()) is layout.settings
    with pytest.raises(InvalidValue, match="max_pixels"):
        layout.settings_for(ImageOptions(max_pixels=5))


def test_sizes_of_patches_in_both_forms() -> None:
    both = {"patch_size": {"height": 14, "width": 14}}
    assert Layout({}, PREPROCESSOR | both).settings == Layout({}, PREPROCESSOR).settings


@table(
    ("config", "preprocessor", "named"),
    [  # A9
        ({"vision_config": {"patch_size": 16}}, PREPROCESSOR, "patch_size"),
        ({"spatial_merge_size": 0}, PREPROCESSOR, "spatial_merge_size"),
        ({}, {"size": {"height": 5, "width": 5}}, "size must have only longest_edge"),
        ({}, {"size": {"longest_edge": "5"}}, "size"),
        ({}, {"patch_size": {"height": 14, "width": 16}}, "patch_size must have only height and width"),
        ({}, {"do_center_crop": True}, "do_center_crop"),
        ({}, {"resample": 1}, "resample"),
    ],
)
def test_wrong_files_stop_the_start(config: Any, preprocessor: Any, named: str) -> None:
    with pytest.raises(StartupError, match=named):
        Layout(config, preprocessor)
