"""Layout of Idefics3 and SmolVLM against the reference processor. The conformance suite compares pixels. A3, F4"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tables import table

from saccade.errors import InternalError, InvalidValue, StartupError
from saccade.models.family import ImageOptions
from saccade.models.smolvlm.layout import Layout, fitted, tiles
from saccade.models.smolvlm.pixels import Pixels
from saccade.models.smolvlm.settings import SILENT

CONFIG = {"scale_factor": 2, "vision_config": {"image_size": 64, "patch_size": 16}}
PREPROCESSOR = {"max_image_size": {"longest_edge": 64}, "size": {"longest_edge": 128}, "resample": 1}


@given(
    width=st.integers(1, 33_000),
    height=st.integers(1, 33_000),
    edges=st.sampled_from([(1456, 364), (2048, 512), (5000, 384)]),
)
@example(width=1, height=33_000, edges=(5000, 384))
@example(width=33_000, height=1, edges=(2048, 512))
@example(width=511, height=512, edges=(2048, 512))
@hypothesis_settings(max_examples=500, deadline=None)
def test_tiles_equal_the_reference(width: int, height: int, edges: tuple[int, int]) -> None:
    from transformers import Idefics3ImageProcessor
    from transformers.models.idefics3.image_processing_idefics3 import get_resize_output_image_size

    longest_edge, side = edges
    image: Any = SimpleNamespace(shape=(3, height, width))
    first = get_resize_output_image_size(image, longest_edge)
    assert fitted(height, width, longest_edge) == first
    owner: Any = SimpleNamespace(resize=lambda image, size, resample: size)
    resized: Any = SimpleNamespace(size=lambda: (3, *first))
    whole: Any = Idefics3ImageProcessor.resize_for_vision_encoder(owner, resized, side)
    assert tiles(*first, side) == (whole.height // side, whole.width // side)


def test_missing_settings_equal_the_reference() -> None:
    from transformers import Idefics3ImageProcessor

    reference = Idefics3ImageProcessor().to_dict()
    said = {key: list(one) if isinstance(one := reference[key], tuple) else one for key in SILENT}
    assert said == SILENT
    config = {"vision_config": {"image_size": 364, "patch_size": 14}}
    settings = Layout(config, {}).settings
    assert (settings["longest_edge"], settings["tile"], settings["view_tokens"]) == (1456, 364, 169)


def test_text_of_tiles() -> None:
    layout = Layout(CONFIG, PREPROCESSOR)
    wide = layout.image(400, 100, layout.settings)
    assert wide.prompt == (
        "<fake_token_around_image>", "<row_1_col_1>", 4, "<fake_token_around_image>", "<row_1_col_2>", 4, "\n",
        "\n", "<fake_token_around_image>", "<global-img>", 4, "<fake_token_around_image>",
    )  # fmt: skip
    assert (wide.grid, wide.num_tokens, wide.pixel_shape) == ((1, 4, 8), 12, (3, 3, 64, 64))


@pytest.mark.parametrize("preprocessor", [{"do_image_splitting": False}, {"size": {"longest_edge": 64}}])
def test_one_view(preprocessor: dict[str, Any]) -> None:
    layout = Layout(CONFIG, PREPROCESSOR | preprocessor)
    shape = layout.image(400, 100, layout.settings)
    assert shape.prompt == ("<fake_token_around_image>", "<global-img>", 4, "<fake_token_around_image>")
    assert (shape.grid, shape.pixel_shape) == ((1, 4, 4), (1, 3, 64, 64))


def test_low_detail_is_one_view() -> None:
    layout = Layout(CONFIG, PREPROCESSOR)
    low = layout.settings_for(ImageOptions(detail="low"))
    assert layout.image(400, 100, low) == Layout(CONFIG, PREPROCESSOR | {"do_image_splitting": False}).image(
        400, 100, low
    )
    assert layout.settings_for(ImageOptions()) is layout.settings
    with pytest.raises(InvalidValue, match="max_pixels"):
        layout.settings_for(ImageOptions(max_pixels=5))


@pytest.mark.parametrize("splits", [True, False])
def test_bicubic_checkpoints_equal_the_reference(splits: bool) -> None:
    import torch
    from transformers import Idefics3ImageProcessor

    preprocessor = PREPROCESSOR | {"resample": 3, "do_image_splitting": splits}
    layout, drawn = Layout(CONFIG, preprocessor), np.random.default_rng(0).integers(0, 256, (75, 51, 3), np.uint8)
    shape = layout.image(51, 75, layout.settings)
    out = np.zeros(shape.pixel_shape, np.uint8)
    Pixels(layout.settings).write_pixels(drawn, shape, out)
    expected = Idefics3ImageProcessor(**preprocessor)(drawn, input_data_format="channels_last", return_tensors="pt")
    assert torch.equal((torch.from_numpy(out).float() - 127.5) / 127.5, expected["pixel_values"][0])
    assert Pixels(layout.settings).to_image(out, shape).shape == (64, 64 * len(out), 3)


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
        (CONFIG, PREPROCESSOR | {"max_image_size": {"longest_edge": 48}}, "max_image_size"),
        (CONFIG, PREPROCESSOR | {"size": {"height": 64, "width": 64}}, "size must have only longest_edge"),
        (CONFIG, PREPROCESSOR | {"size": {"longest_edge": 0}}, "size.longest_edge"),
        (CONFIG, PREPROCESSOR | {"resample": 2}, "resample"),
        (CONFIG, PREPROCESSOR | {"do_resize": False}, "do_resize"),
        (CONFIG, PREPROCESSOR | {"do_image_splitting": "yes"}, "do_image_splitting"),
        (CONFIG | {"scale_factor": 3}, PREPROCESSOR, "scale_factor"),
        (CONFIG | {"vision_config": 5}, PREPROCESSOR, "vision_config"),
    ],
)
def test_wrong_files_stop_the_start(config: Any, preprocessor: Any, named: str) -> None:
    with pytest.raises(StartupError, match=named):
        Layout(config, preprocessor)
