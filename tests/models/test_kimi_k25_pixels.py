"""Layout and patches of Kimi-K2.5. A1-A3, F4

The reference here is the one in transformers, which resizes with torch, not Pillow: where an image is resized it is
right up to two levels only. The release's own algorithm is in the conformance suite.
"""

from typing import Any

import images
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tables import table

from saccade.errors import InternalError, InvalidValue, StartupError
from saccade.models.family import ImageOptions
from saccade.models.kimi_k25 import FAMILY
from saccade.models.kimi_k25.layout import Layout
from saccade.models.kimi_k25.pixels import Pixels
from saccade.models.preprocessing.navit_settings import RELEASE

CONFIG = {"vision_config": {"patch_size": 14, "merge_kernel_size": [2, 2]}}
LAYOUT = Layout(CONFIG, {})
SIZES = [(1, 1), (13, 15), (14, 14), (28, 28), (29, 27), (150, 100), (90, 230), (777, 5), (1, 600), (640, 481)]


@pytest.fixture(scope="module")
def processor() -> Any:
    from transformers.models.kimi_k25 import Kimi_K25ImageProcessor

    return Kimi_K25ImageProcessor()


def _written(image: np.ndarray, layout: Layout, settings: Any, dtype: str = "uint8") -> np.ndarray:
    height, width, _ = image.shape
    counted = layout.external(layout.image(width, height, settings), dtype)
    out = np.full(counted.pixel_shape, 7, {"bfloat16": "uint16"}.get(dtype, dtype))
    Pixels(settings).write_pixels(image, counted, out)
    return out


@given(width=st.integers(1, 20_000), height=st.integers(1, 20_000), limit=st.integers(1, 65_536))
@example(width=1, height=20_000, limit=16_384)
@example(width=4000, height=3000, limit=16_384)
@hypothesis_settings(max_examples=300, deadline=None)
def test_sizes_equal_the_reference(width: int, height: int, limit: int) -> None:
    from transformers.models.kimi_k25.image_processing_kimi_k25 import navit_resize

    counted = LAYOUT.image(width, height, {**RELEASE, "in_patch_limit": limit})
    _, padded = navit_resize(height, width, 14, 2, limit, 512)
    assert (counted.resized_height, counted.resized_width) == padded
    assert counted.grid == (1, padded[0] // 14, padded[1] // 14)
    assert counted.num_tokens * 28 * 28 == padded[0] * padded[1]
    assert counted.pixel_shape == (counted.num_tokens * 4, 3, 14, 14)


@table(("width", "height"), SIZES)
def test_patches_equal_the_reference_where_nothing_is_resized(width: int, height: int, processor: Any) -> None:
    drawn = images.draw(width, height)
    expected = processor(images=[drawn], input_data_format="channels_last", return_tensors="np")["pixel_values"]
    written = _written(drawn, LAYOUT, LAYOUT.settings)
    np.testing.assert_array_equal(written, np.round(expected * 127.5 + 127.5).astype(np.uint8))
    np.testing.assert_allclose(_written(drawn, LAYOUT, LAYOUT.settings, "float32"), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("width", "height"), [(150, 100), (90, 230), (777, 5), (640, 481)])
def test_resized_patches_are_near_the_reference(width: int, height: int, processor: Any) -> None:
    drawn = images.draw(width, height)
    settings = {**RELEASE, "in_patch_limit": 16}
    expected = processor(images=[drawn], max_patches=16, input_data_format="channels_last", return_tensors="np")
    levels = np.round(expected["pixel_values"] * 127.5 + 127.5)
    assert np.abs(_written(drawn, LAYOUT, settings) - levels).max() <= 2


def test_foreign_patches_follow_the_releases_arithmetic() -> None:
    settings = {**RELEASE, "image_mean": [0.48, 0.5, 0.41], "image_std": [0.27, 0.5, 0.3]}
    drawn = images.draw(60, 45)
    patches = _written(drawn, LAYOUT, settings)
    values = (patches / 255.0).astype(np.float32)
    values -= np.array(settings["image_mean"]).reshape(3, 1, 1)
    values *= 1.0 / np.array(settings["image_std"]).reshape(3, 1, 1)
    np.testing.assert_array_equal(_written(drawn, LAYOUT, settings, "float32"), values)
    halves = (_written(drawn, LAYOUT, settings, "bfloat16").astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(halves, values, rtol=2**-8)


def test_an_image_in_wider_memory_gives_the_same_patches() -> None:
    memory = np.full((45, 60, 4), 9, np.uint8)
    memory[..., :3] = images.draw(60, 45)
    view = memory[..., :3]
    np.testing.assert_array_equal(
        _written(view, LAYOUT, LAYOUT.settings), _written(view.copy(), LAYOUT, LAYOUT.settings)
    )


@table(
    ("preprocessor", "changed"),
    [  # A3
        ({}, {}),
        ({"media_proc_cfg": {}}, {}),
        ({"media_proc_cfg": {"in_patch_limit": 4096}}, {"in_patch_limit": 4096}),
        ({"media_proc_cfg": {"merge_kernel_size": [2, 2], "image_std": [0.4, 0.5, 0.6]}}, {"image_std": [0.4, 0.5, 0.6]}),
        ({"media_proc_cfg": {"patch_limit_on_one_side": 64}}, {"patch_limit_on_one_side": 64}),
        (
            {"max_patches": 400, "size": {"max_height": 32, "max_width": 32}, "merge_size": 2, "resample": 3},
            {"in_patch_limit": 400, "patch_limit_on_one_side": 32},
        ),
    ],
)  # fmt: skip
def test_settings_are_the_checkpoints_or_else_the_releases(
    preprocessor: Any, changed: dict[str, Any]
) -> None:  # [eng] 44
    assert Layout(CONFIG, preprocessor).settings == {**RELEASE, **changed}


@table(
    ("config", "given_settings", "named"),
    [  # A9
        ({}, {"patch_size": 16}, "patch_size"),
        ({}, {"merge_kernel_size": [2, 3]}, "merge_size"),
        ({}, {"in_patch_limit": "many"}, "in_patch_limit"),
        ({}, {"patch_limit_on_one_side": True}, "patch_limit_on_one_side"),
        ({}, {"image_mean": 0.5}, "image_mean"),
        ({}, {"image_std": [0.5, 0, 0.5]}, "image_std"),
        ({}, {"fixed_output_tokens": 256}, "fixed_output_tokens"),
        ({"vision_config": {"merge_kernel_size": [1, 1]}}, {}, "merge_kernel_size"),
    ],
)
def test_wrong_files_stop_the_start(config: Any, given_settings: Any, named: str) -> None:
    with pytest.raises(StartupError, match=named):
        Layout({**CONFIG, **config}, {"media_proc_cfg": given_settings})


def test_settings_that_are_no_object_stop_the_start() -> None:
    with pytest.raises(StartupError, match="media_proc_cfg"):
        Layout(CONFIG, {"media_proc_cfg": None})


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        (ImageOptions(), 16_384),
        (ImageOptions(detail="low"), 512 * 512 // 196),
        (ImageOptions(max_pixels=196 * 50), 50),
        (ImageOptions(detail="low", max_pixels=10**8), 512 * 512 // 196),
        (ImageOptions(max_pixels=10**8), 16_384),
    ],
)
def test_options_lower_the_limit(options: ImageOptions, limit: int) -> None:
    assert LAYOUT.settings_for(options)["in_patch_limit"] == limit


@pytest.mark.parametrize("options", [ImageOptions(min_pixels=9), ImageOptions(max_pixels=195)])
def test_options_that_cannot_be_honoured_are_refused(options: ImageOptions) -> None:
    with pytest.raises(InvalidValue) as refusal:
        LAYOUT.settings_for(options)
    assert refusal.value.param == "mm_processor_kwargs"


def test_a_layout_of_another_size_is_refused() -> None:
    other = LAYOUT.image(100, 200, RELEASE)
    with pytest.raises(InternalError):
        Pixels(RELEASE).write_pixels(images.draw(200, 100), other, np.empty(other.pixel_shape, np.uint8))


@pytest.mark.parametrize(
    ("config", "token_id"),
    [({"media_placeholder_token_id": 0, "image_token_id": 5}, 0), ({"image_token_id": 5}, 5), ({}, None)],
)
def test_placeholder_comes_from_the_config(config: dict[str, Any], token_id: int | None) -> None:  # A1
    assert FAMILY.placeholder_token_id(config) == token_id


def test_pattern_keeps_chinese_apart_and_splits_words_by_case() -> None:
    import tiktoken

    assert FAMILY.tiktoken_pattern is not None
    ranks = {bytes([byte]): byte for byte in range(256)} | {
        b"Kimi": 256,
        "你好".encode(): 257,
        b" 12": 258,
        b"123": 259,
    }
    encoding = tiktoken.Encoding("test", pat_str=FAMILY.tiktoken_pattern, mergeable_ranks=ranks, special_tokens={})
    assert encoding.encode("Kimi你好123") == [256, 257, 259]
    assert 258 not in encoding.encode("a 12")
