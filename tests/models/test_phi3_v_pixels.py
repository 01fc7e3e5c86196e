"""Layout and padded image of Phi-3-vision. F4

The release's own algorithm is in the conformance suite; here is what it promises.
"""

import math
from typing import Any

import images
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from PIL import Image
from tables import table

from saccade.errors import ImageTooLarge, InternalError, InvalidValue, StartupError, UnsupportedParameter
from saccade.media.resample import resample
from saccade.models.family import ImageOptions
from saccade.models.phi3_v import FAMILY
from saccade.models.phi3_v.layout import Layout
from saccade.models.phi3_v.pixels import Pixels

PREPROCESSOR = {"num_crops": 4, "num_img_tokens": 144}
LAYOUT = Layout({}, PREPROCESSOR)


def _written(image: np.ndarray, num_crops: int = 4) -> np.ndarray:
    settings = {**LAYOUT.settings, "num_crops": num_crops}
    counted = LAYOUT.image(image.shape[1], image.shape[0], settings)
    out = np.full(counted.pixel_shape, 7, np.uint8)
    Pixels(settings).write_pixels(image, counted, out)
    return out


@table(
    ("width", "height", "num_crops", "padded", "num_tokens"),
    [
        (150, 100, 4, (672, 672), 757),
        (90, 230, 4, (672, 336), 469),
        (1, 1, 1, (336, 336), 313),
        (100, 100, 16, (1344, 1344), 2509),
        (1280, 960, 16, (1008, 1344), 1921),
        (1920, 1080, 16, (1008, 1680), 2353),
        (1600, 100, 16, (336, 5376), 2473),
    ],
)
def test_size_and_count(width: int, height: int, num_crops: int, padded: tuple[int, int], num_tokens: int) -> None:
    counted = LAYOUT.image(width, height, {**LAYOUT.settings, "num_crops": num_crops})
    assert (counted.resized_height, counted.resized_width) == padded
    assert counted.pixel_shape == (3, *padded)
    rows, columns = padded[0] // 336, padded[1] // 336
    assert counted.grid == (1, rows * 24, columns * 24)
    # Row by row: 12 features of each crop and a newline, then the separator, then the global view.
    assert counted.num_tokens == rows * 12 * (columns * 12 + 1) + 1 + 12 * 13
    assert counted.num_tokens == num_tokens


@given(width=st.integers(1, 4096), height=st.integers(1, 4096), num_crops=st.integers(1, 16))
@example(width=1344, height=1, num_crops=4)
@example(width=726, height=968, num_crops=12)
@hypothesis_settings(max_examples=300, deadline=None)
def test_columns_are_as_many_as_fit(width: int, height: int, num_crops: int) -> None:
    long, short = max(width, height), min(width, height)
    fit = [c for c in range(1, num_crops + 1) if c * math.ceil(c / (long / short)) <= num_crops]
    settings = {**LAYOUT.settings, "num_crops": num_crops}
    if int(max(fit) * 336 / (long / short)) == 0:
        with pytest.raises(ImageTooLarge):
            LAYOUT.image(width, height, settings)
    else:
        counted = LAYOUT.image(width, height, settings)
        assert max(counted.resized_height, counted.resized_width) == 336 * max(fit)
        assert counted.num_pixel_bytes <= num_crops * 3 * 336 * 336


@pytest.mark.parametrize(("width", "height"), [(150, 100), (300, 90), (100, 100), (1345, 40)])
def test_the_image_lies_on_white(width: int, height: int) -> None:
    drawn = images.draw(width, height)
    written = _written(drawn)
    content = resample(drawn, int(written.shape[2] / (width / height)), written.shape[2], Image.Resampling.BILINEAR)
    top = (written.shape[1] - len(content)) // 2
    np.testing.assert_array_equal(written[:, top : top + len(content)], content.transpose(2, 0, 1))
    assert (written[:, :top] == 255).all()
    assert (written[:, top + len(content) :] == 255).all()


@pytest.mark.parametrize(("width", "height"), [(150, 100), (301, 90)])
def test_a_tall_image_is_the_wide_one_turned(width: int, height: int) -> None:
    drawn = images.draw(width, height)
    np.testing.assert_array_equal(_written(drawn.transpose(1, 0, 2)), _written(drawn).transpose(0, 2, 1))


def test_low_detail_leaves_one_crop() -> None:
    settings = LAYOUT.settings_for(ImageOptions(detail="low"))
    assert LAYOUT.image(1280, 960, settings).pixel_shape == (3, 336, 336)
    assert LAYOUT.settings_for(ImageOptions()) == LAYOUT.settings


@pytest.mark.parametrize("options", [ImageOptions(min_pixels=9), ImageOptions(max_pixels=9)])
def test_options_that_cannot_be_honoured_are_refused(options: ImageOptions) -> None:
    with pytest.raises(InvalidValue) as refusal:
        LAYOUT.settings_for(options)
    assert refusal.value.param == f"mm_processor_kwargs.{'min' if options.min_pixels else 'max'}_pixels"


@pytest.mark.parametrize(
    ("config", "changed", "named"),
    [  # A9
        ({}, {"num_crops": None}, "num_crops"),
        ({}, {"num_crops": 0}, "num_crops"),
        ({}, {"num_img_tokens": 256}, "num_img_tokens"),
        ({}, {"image_std": [1, 1, 0]}, "image_std"),
        ({"embd_layer": {"use_hd_transform": False}}, {}, "use_hd_transform"),
    ],
)
def test_wrong_files_stop_the_start(config: dict[str, Any], changed: dict[str, Any], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        Layout(config, {**PREPROCESSOR, **changed})


def test_other_wires_are_refused() -> None:
    with pytest.raises(UnsupportedParameter):
        LAYOUT.external(LAYOUT.image(9, 9, LAYOUT.settings), "bfloat16")


def test_a_layout_of_another_size_is_refused() -> None:
    other = LAYOUT.image(100, 200, LAYOUT.settings)
    with pytest.raises(InternalError):
        Pixels(LAYOUT.settings).write_pixels(images.draw(200, 100), other, np.empty(other.pixel_shape, np.uint8))


def test_the_placeholder_is_the_tokenizers() -> None:
    assert FAMILY.placeholder_token_id({"image_token_id": 5}) is None
    assert FAMILY.image_tag is not None
    assert FAMILY.image_tag.format(number=2) == "<|image_2|>\n"
