"""Layout and views of LLaVA-1.5 and LLaVA-NeXT, against the reference processors. A3, F4"""

from types import SimpleNamespace
from typing import Any

import images
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tables import table

from saccade.errors import InternalError, InvalidValue, StartupError, UnsupportedParameter
from saccade.models.family import ImageOptions
from saccade.models.llava.layout import Layout
from saccade.models.llava.pixels import Pixels
from saccade.models.llava.settings import DEFAULT_PINPOINTS
from saccade.models.preprocessing.processor_config import CLIP_COLOURS

CONFIG = {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {"image_size": 56, "patch_size": 14}}
NEXT = {**CONFIG, "architectures": ["LlavaNextForConditionalGeneration"]}
PINPOINTS = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
PREPROCESSOR = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}, "do_convert_rgb": True}
NEXT_PREPROCESSOR = {**PREPROCESSOR, "image_grid_pinpoints": PINPOINTS, "do_pad": True}
SIZES = [
    (1, 1), (2, 3), (31, 33), (56, 56), (57, 55), (112, 112), (150, 100), (90, 230), (200, 1), (1, 200), (777, 5), (640, 481)
]  # fmt: skip


def _written(image: np.ndarray, layout: Layout) -> np.ndarray:
    height, width, _ = image.shape
    counted = layout.image(width, height, layout.settings)
    out = np.full(counted.pixel_shape, 7, np.uint8)
    Pixels(layout.settings).write_pixels(image, counted, out)
    return out


def _normalised(views: np.ndarray, settings: Any) -> torch.Tensor:
    """The engine's half: (x - mean * 255) / (std * 255)."""
    mean, std = (torch.tensor(settings[key]).mul(255).reshape(3, 1, 1) for key in ("image_mean", "image_std"))
    return torch.from_numpy(views).float().sub(mean).div(std)


@table(("width", "height"), SIZES)
@table("edge", [56, 64])
def test_the_square_view_equals_the_reference(width: int, height: int, edge: int) -> None:
    from transformers import CLIPImageProcessor

    preprocessor = {**PREPROCESSOR, "size": {"shortest_edge": edge}}
    drawn, layout = images.draw(width, height), Layout(CONFIG, preprocessor)
    expected = CLIPImageProcessor(**preprocessor)(drawn, input_data_format="channels_last", return_tensors="pt")
    assert torch.equal(_normalised(_written(drawn, layout), layout.settings), expected["pixel_values"][0])


@table(("width", "height"), SIZES)
def test_views_of_tiles_equal_the_reference(width: int, height: int) -> None:
    from transformers import LlavaNextImageProcessor

    drawn, layout = images.draw(width, height), Layout(NEXT, NEXT_PREPROCESSOR)
    processor = LlavaNextImageProcessor(**NEXT_PREPROCESSOR)
    expected = processor(drawn, input_data_format="channels_last", return_tensors="pt")
    assert torch.equal(_normalised(_written(drawn, layout), layout.settings), expected["pixel_values"][0])
    counted = layout.image(width, height, layout.settings)
    assert counted.original_size == tuple(expected["image_sizes"][0].tolist())
    assert (counted.resized_height * counted.resized_width) == (counted.pixel_shape[0] - 1) * 56 * 56


def _release(config: dict[str, Any]) -> Layout:
    edges = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
    return Layout({**config, "vision_config": None}, edges)


@given(width=st.integers(1, 16_384), height=st.integers(1, 16_384))
@example(width=1, height=16_384)
@example(width=300, height=300)
@hypothesis_settings(max_examples=300, deadline=None)
def test_counts_equal_the_reference(width: int, height: int) -> None:
    from transformers import LlavaNextProcessor

    layout = _release(NEXT)
    reference: Any = object.__new__(LlavaNextProcessor)
    reference.image_processor = SimpleNamespace(image_grid_pinpoints=DEFAULT_PINPOINTS)
    reference.patch_size, reference.num_additional_image_tokens = 14, 1
    # The features and the class token, which "default" drops.
    expected = reference._get_number_of_features(height, width, 336, 336) - 1
    assert layout.image(width, height, layout.settings).num_tokens == expected


@pytest.mark.parametrize(("strategy", "num_tokens"), [("default", 576), ("full", 577)])
def test_the_square_view_has_a_fixed_count(strategy: str, num_tokens: int) -> None:
    layout = _release({**CONFIG, "vision_feature_select_strategy": strategy})
    counted = layout.image(1280, 960, layout.settings)
    assert (counted.num_tokens, counted.grid, counted.pixel_shape) == (num_tokens, (1, 24, 24), (3, 336, 336))


def test_older_spellings_of_sizes_are_read() -> None:
    assert Layout(CONFIG, {"size": 56, "crop_size": 56}).settings == Layout(CONFIG, PREPROCESSOR).settings


@pytest.mark.parametrize("vision", [None, {}, {"image_size": 336}])
def test_empty_vision_config_equals_the_reference(vision: dict[str, int] | None) -> None:
    from transformers import LlavaConfig

    tower = LlavaConfig(vision_config=vision).vision_config
    edge = tower.image_size
    settings = Layout({**CONFIG, "vision_config": vision}, {"size": edge, "crop_size": edge}).settings
    assert (settings["image_size"], settings["patch_size"]) == (tower.image_size, tower.patch_size)


def test_pinpoints_are_the_checkpoints_or_else_the_releases() -> None:
    assert _release(NEXT).settings["pinpoints"] == DEFAULT_PINPOINTS
    for config, preprocessor in ((NEXT | {"image_grid_pinpoints": PINPOINTS}, PREPROCESSOR), (NEXT, NEXT_PREPROCESSOR)):
        assert Layout(config, preprocessor).settings["pinpoints"] == PINPOINTS
    assert Layout({"model_type": "llava_next", "vision_config": CONFIG["vision_config"]}, PREPROCESSOR | {
        "image_grid_pinpoints": PINPOINTS}).settings["pinpoints"] == PINPOINTS  # fmt: skip


@table(
    ("config", "preprocessor", "named"),
    [  # A9
        (CONFIG, {}, "224"),
        (CONFIG, PREPROCESSOR | {"size": {"height": 56, "width": 56}}, "shortest_edge"),
        (CONFIG, PREPROCESSOR | {"crop_size": {"height": 56, "width": 28}}, "crop_size"),
        (CONFIG, PREPROCESSOR | {"size": {"shortest_edge": 48}}, "48"),
        (CONFIG, PREPROCESSOR | {"do_pad": True}, "do_pad"),
        (CONFIG, PREPROCESSOR | {"image_mean": [0.5]}, "image_mean"),
        (CONFIG | {"vision_config": {"model_type": "pixtral"}}, PREPROCESSOR, "clip_vision_model"),
        (CONFIG | {"vision_config": {"image_size": "56"}}, PREPROCESSOR, "image_size"),
        (CONFIG | {"vision_feature_select_strategy": "cls"}, PREPROCESSOR, "vision_feature_select_strategy"),
        (NEXT | {"vision_feature_select_strategy": "full"}, NEXT_PREPROCESSOR, "vision_feature_select_strategy"),
        (NEXT, NEXT_PREPROCESSOR | {"size": {"shortest_edge": 64}}, "64"),
        (NEXT, NEXT_PREPROCESSOR | {"image_grid_pinpoints": [[56, 100]]}, "image_grid_pinpoints"),
        (NEXT | {"image_grid_pinpoints": [[56, 56]]}, NEXT_PREPROCESSOR, "image_grid_pinpoints"),
    ],
)
def test_wrong_files_stop_the_start(config: Any, preprocessor: Any, named: str) -> None:
    with pytest.raises(StartupError, match=named):
        Layout(config, preprocessor)


def test_low_detail_leaves_the_smallest_pinpoints() -> None:
    low = ImageOptions(detail="low")
    layout = Layout(NEXT, NEXT_PREPROCESSOR)
    assert layout.settings_for(low)["pinpoints"] == [[56, 112], [112, 56]]
    assert layout.image(640, 480, layout.settings_for(low)).pixel_shape[0] == 3
    square = Layout(CONFIG, PREPROCESSOR)
    assert square.settings_for(low) == square.settings


@pytest.mark.parametrize("options", [ImageOptions(min_pixels=9), ImageOptions(max_pixels=9)])
@pytest.mark.parametrize("layout", [Layout(CONFIG, PREPROCESSOR), Layout(NEXT, NEXT_PREPROCESSOR)])
def test_options_that_cannot_be_honoured_are_refused(layout: Layout, options: ImageOptions) -> None:
    with pytest.raises(InvalidValue) as refusal:
        layout.settings_for(options)
    assert refusal.value.param == f"mm_processor_kwargs.{'min' if options.min_pixels else 'max'}_pixels"


def test_other_wires_are_refused() -> None:
    layout = Layout(CONFIG, PREPROCESSOR)
    with pytest.raises(UnsupportedParameter):
        layout.external(layout.image(9, 9, layout.settings), "bfloat16")


@pytest.mark.parametrize("layout", [Layout(NEXT, NEXT_PREPROCESSOR)])
def test_a_layout_of_another_size_is_refused(layout: Layout) -> None:
    other = layout.image(100, 200, layout.settings)
    with pytest.raises(InternalError):
        Pixels(layout.settings).write_pixels(images.draw(200, 100), other, np.empty(other.pixel_shape, np.uint8))


def test_defaults_are_the_reference_processors() -> None:
    from transformers import CLIPImageProcessor, LlavaNextImageProcessor

    for reference in (CLIPImageProcessor(), LlavaNextImageProcessor()):
        assert {key: list(getattr(reference, key)) for key in CLIP_COLOURS} == CLIP_COLOURS
    assert LlavaNextImageProcessor().image_grid_pinpoints == DEFAULT_PINPOINTS
