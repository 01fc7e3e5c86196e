"""The checkpoint's own image processor in a confined decode process, which has no torch. F7"""

import io
from pathlib import Path

import numpy as np
import pytest
from checkpoints import any_architecture
from PIL import Image

from saccade import models
from saccade.errors import ImageTooLarge, InternalError
from saccade.gateway.config import MediaSettings
from saccade.gateway.images.decode_pool.job import MAX_TENSOR_BYTES, LayoutJob
from saccade.gateway.images.decode_pool.pool import DecodePool
from saccade.gateway.served_models.served_model import ServedModel
from saccade.models.files import read_model_files
from saccade.protocol.media import ImageLayout

FAMILY = "any_architecture"
SIZES = ((150, 100), (31, 200), (640, 480))


@pytest.mark.parametrize(
    "name",
    [
        "aya_vision",
        *(
            pytest.param(name, marks=pytest.mark.conformance)
            for name in any_architecture.SERVED
            if name != "aya_vision"
        ),
    ],
)
async def test_layout_and_tensors_are_those_of_this_process(name: str, tmp_path: Path) -> None:
    served = ServedModel.from_files(name, read_model_files(any_architecture.write(tmp_path / name, name)), 4096)
    settings = served.layout.settings
    pool = DecodePool(
        MediaSettings(num_decode_processes=1, shared_memory_bytes=0, processor_libraries=("transformers",))
    )
    await pool.start()
    try:
        for size in SIZES:
            rgb = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
            layout = await pool.layout(FAMILY, settings, *size)
            assert layout == served.layout.image(*size, settings)
            encoded = io.BytesIO()
            Image.fromarray(rgb).save(encoded, "PNG")
            prepared = await pool.prepare_image(encoded.getvalue(), FAMILY, settings, layout)
            expected = np.zeros(layout.pixel_shape, np.uint8)
            models.load_pixels(FAMILY)(settings).write_pixels(rgb, layout, expected)
            assert prepared.inline == expected.tobytes()
    finally:
        await pool.close()


async def test_gateway_that_loads_no_processors_says_which_setting_is_missing() -> None:
    with pytest.raises(InternalError, match="--processor-libraries"):
        await DecodePool(MediaSettings(num_decode_processes=1)).layout(FAMILY, {}, 1, 1)


def test_invented_layout_is_refused() -> None:
    job = LayoutJob(FAMILY, {}, 10, 10)
    huge = ImageLayout(
        resized_height=10, resized_width=10, grid=(1, 1, 1), num_tokens=1, pixel_shape=(MAX_TENSOR_BYTES + 1,)
    )
    with pytest.raises(ImageTooLarge, match="10 x 10"):
        job.checked(huge)
    with pytest.raises(InternalError):
        job.checked(None)
