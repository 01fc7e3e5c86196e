"""The checkpoint's own image processor in a confined decode process, which has no torch. F7"""

import asyncio
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
    pool = DecodePool(MediaSettings(num_decode_processes=1, shared_memory_bytes=0))
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


async def test_library_is_loaded_for_the_first_model_that_needs_it(tmp_path: Path) -> None:
    """Images of other models are decoded before and after it."""
    served = ServedModel.from_files("a", read_model_files(any_architecture.write(tmp_path, "aya_vision")), 4096)
    encoded = io.BytesIO()
    Image.new("RGB", (64, 64)).save(encoded, "PNG")
    family = models.load_layout("qwen3_vl")
    own = family({"model_type": "qwen3_vl"}, {})
    pool = DecodePool(MediaSettings(num_decode_processes=2, shared_memory_bytes=0))
    await pool.start()
    try:
        before = pool.pids
        layouts = await asyncio.gather(*(pool.layout(FAMILY, served.layout.settings, 90, side) for side in (60, 70)))
        assert [layout.resized_height for layout in layouts] == [60, 70]
        layout = own.image(64, 64, own.settings)
        assert (await pool.prepare_image(encoded.getvalue(), "qwen3_vl", own.settings, layout)).inline is not None
        after = pool.pids
        await pool.layout(FAMILY, served.layout.settings, 80, 80)
        assert pool.pids == after
        assert not set(before) & set(after)
    finally:
        await pool.close()


def test_invented_layout_is_refused() -> None:
    job = LayoutJob(FAMILY, {}, 10, 10)
    huge = ImageLayout(
        resized_height=10, resized_width=10, grid=(1, 1, 1), num_tokens=1, pixel_shape=(MAX_TENSOR_BYTES + 1,)
    )
    with pytest.raises(ImageTooLarge, match="10 x 10"):
        job.checked(huge)
    with pytest.raises(InternalError):
        job.checked(None)
