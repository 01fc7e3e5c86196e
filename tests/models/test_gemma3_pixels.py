"""Layout of Gemma 3 against the reference processor. The conformance suite compares pixels. A3, F4"""

from typing import Any

import pytest
from tables import table

from saccade.errors import InvalidValue, StartupError
from saccade.models.family import ImageOptions
from saccade.models.gemma3.layout import Layout

CONFIG = {"vision_config": {"image_size": 896, "patch_size": 14}}
SIZE = {"size": {"height": 896, "width": 896}}


def test_every_image_has_the_same_layout() -> None:
    layout = Layout(CONFIG, SIZE)
    shape = layout.image(4000, 30, layout.settings)
    assert (shape.resized_height, shape.resized_width, shape.grid) == (896, 896, (1, 64, 64))
    assert shape.pixel_shape == (1, 3, 896, 896)
    assert shape.prompt == ("\n\n", "<start_of_image>", 256, "<end_of_image>", "\n\n")
    assert layout.image(1, 1, layout.settings) == shape


def test_missing_settings_equal_the_reference() -> None:
    from transformers import Gemma3Config, Gemma3ImageProcessor

    processor, config = Gemma3ImageProcessor(), Gemma3Config()
    assert config.vision_config is not None
    assert Layout({"mm_tokens_per_image": 49}, {}).settings == {
        "image_size": processor.size["height"],
        "patch_size": config.vision_config.patch_size,
        "view_tokens": 49,
        "image_mean": list(processor.image_mean),
        "image_std": list(processor.image_std),
    }
    assert Layout(CONFIG, SIZE).settings["view_tokens"] == config.mm_tokens_per_image


@table("size", [896, [896, 896], {"height": 896, "width": 896, "longest_edge": None}])
def test_size_has_the_forms_of_the_reference(size: Any) -> None:
    assert Layout(CONFIG, {"size": size}).settings == Layout(CONFIG, SIZE).settings


def test_no_option_changes_an_image() -> None:
    layout = Layout(CONFIG, SIZE)
    assert layout.settings_for(ImageOptions(detail="low")) is layout.settings
    with pytest.raises(InvalidValue, match="max_pixels"):
        layout.settings_for(ImageOptions(max_pixels=5))


@table(
    ("config", "preprocessor", "named"),
    [  # A9
        ({}, {"size": {"height": 224, "width": 224}}, "preprocessor_config.json resizes to 224 x 224"),
        ({}, {"size": 224}, "preprocessor_config.json resizes to 224 x 224"),
        ({}, {"size": {"height": 896, "width": 224}}, "size must have equal height and width"),
        ({}, {"size": {"longest_edge": 896}}, "size must have equal height and width"),
        ({}, {"size": {"height": 896, "width": 896, "longest_edge": 896}}, "size must have equal height and width"),
        ({}, {"size": [896, 224]}, "size must have equal height and width"),
        ({}, {"size": "896"}, "size must have equal height and width"),
        ({}, {"size": {"height": "896", "width": "896"}}, "size must be a whole number"),
        ({}, {"do_pan_and_scan": True}, "do_pan_and_scan"),
        ({}, {"resample": 3}, "resample"),
        ({}, {"image_seq_length": 64}, "image_seq_length"),
        ({"mm_tokens_per_image": 255}, {}, "mm_tokens_per_image"),
        ({"mm_tokens_per_image": 9}, {}, "mm_tokens_per_image"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, {}, "model_type"),
        ({"vision_config": 5}, {}, "vision_config"),
    ],
)
def test_wrong_files_stop_the_start(config: Any, preprocessor: Any, named: str) -> None:
    with pytest.raises(StartupError, match=named):
        Layout(CONFIG | config, SIZE | preprocessor)
