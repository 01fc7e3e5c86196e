"""Every release's pixels against its reference, bit for bit, through header, layout, decoder and patches. A2 A3 A10 F4"""

import io
from collections.abc import Callable
from functools import cache
from typing import Any

import checkpoints
import images
import numpy as np
import pytest
import torch
from differences import DIFFERENCES, as_shown
from PIL import Image
from references import Seen
from references.native import GlmPatches, MergedPatches, RasterPatches
from subjects import SUBJECTS, Sides

from saccade import models
from saccade.errors import ImageTooLarge
from saccade.gateway.config import MediaSettings
from saccade.gateway.images.decode_pool.pool import DecodePool
from saccade.media.decode import decode
from saccade.media.header import ImageLimits, read_header
from saccade.protocol.media import ImageLayout
from saccade.transport.shared_memory import read_slot

NAMES = tuple(subject.checkpoint for subject in SUBJECTS)
MERGING = [
    subject.checkpoint for subject in SUBJECTS if subject.reference in (MergedPatches, RasterPatches, GlmPatches)
]
WIDE_OPEN = ImageLimits(max_side=20_000, max_aspect=20_000)
CORPUS = images.corpus() | {
    "png I;16": images.encode(images.random_image(75, 51, "I;16")),
    "png 3000x15": images.encode(images.random_image(3000, 15)),
    "png 15x3000": images.encode(images.random_image(15, 3000)),
    "jpeg 1280x960": images.encode(images.random_image(1280, 960), "JPEG", quality=90),
}
EVERYDAY = (
    "png 1x1", "jpeg L", "jpeg CMYK", "jpeg orientation 6", "png 1", "png LA", "png RGBA", "png tRNS palette",
    "png I;16", "apng", "gif animated", "webp alpha", "jpeg 150x100", "png 15x3000",
)  # fmt: skip
Both = Callable[[str], Sides]


def patches(both: Sides, encoded: bytes, dtype: str = "uint8") -> tuple[ImageLayout, np.ndarray[Any, Any]]:
    """What our side makes of a file: its layout from the header, its pixels from the decoder."""
    layout = both.layout.image(*read_header(encoded).upright, both.layout.settings)
    layout = layout if dtype == "uint8" else both.layout.external(layout, dtype)
    out = np.full(layout.pixel_shape, 7, "uint16" if dtype == "bfloat16" else dtype)
    both.pixels.write_pixels(decode(encoded, WIDE_OPEN, models.families()[both.family].keeps_alpha), layout, out)
    return layout, out


def shown(both: Sides, encoded: bytes) -> Seen:
    """What the reference makes of the image that our side shows."""
    with Image.open(io.BytesIO(encoded)) as image:
        return both.reference.see(as_shown(image, both.subject.checkpoint))


def is_equal(both: Sides, ours: np.ndarray[Any, Any], expected: Seen) -> bool:
    """Whether our uint8 is the reference's, or becomes its values where the reference has only those."""
    if expected.pixels is not None:
        return np.array_equal(ours, expected.pixels)
    assert both.subject.normalise is not None
    assert expected.pixel_values is not None
    return torch.equal(both.subject.normalise(torch.from_numpy(ours), both.preprocessor), expected.pixel_values)


def check(both: Sides, encoded: bytes) -> None:
    """Counts, grid and every value."""
    layout, ours = patches(both, encoded)
    expected = shown(both, encoded)
    assert layout.num_tokens == expected.num_tokens
    assert expected.grid is None or layout.grid == expected.grid
    assert is_equal(both, ours, expected), layout


def check_foreign(both: Sides, encoded: bytes) -> None:
    """The forms of wires that are not ours are the reference's values."""
    expected = shown(both, encoded).pixel_values
    assert expected is not None
    for dtype, values in (("float32", expected), ("bfloat16", expected.to(torch.bfloat16))):
        layout, ours = patches(both, encoded, dtype)
        assert layout.pixel_shape == values.shape
        assert torch.equal(torch.from_numpy(ours).view(values.dtype), values)


def is_foreign(both: Sides) -> bool:
    """Whether the family is sent over wires that are not ours."""
    return models.families()[both.family].external_grid is not None


@cache
def random_sizes(number: int = 150) -> tuple[bytes, ...]:
    """Images of every area from 16 to a million, every aspect up to 180, in three formats."""
    generator = np.random.default_rng(0)
    drawn = []
    for seed in range(number):
        area, aspect = np.exp(generator.uniform(np.log([16, 1 / 180]), np.log([1_000_000, 180])))
        width, height = max(1, round((area * aspect) ** 0.5)), max(1, round((area / aspect) ** 0.5))
        if max(width, height) <= 200 * min(width, height):
            drawn.append(
                images.encode(images.random_image(width, height, seed=seed), ("JPEG", "PNG", "WEBP")[seed % 3])
            )
    return tuple(drawn)


@cache
def twelve_megapixels() -> bytes:
    """A photograph's size; large things in it, since noise of that size takes longer to draw than to see."""
    return images.encode(images.random_image(500, 375).resize((4000, 3000)), "JPEG", quality=90)


def test_corpus_is_large_enough() -> None:
    assert len(CORPUS) >= 60
    assert set(EVERYDAY) <= set(CORPUS)


def test_every_family_is_a_subject(sides: Both) -> None:  # F7
    # What a library serves has conformance tests of its own.
    own = {name for name, family in models.families().items() if family.takes_images and family.library is None}
    assert {sides(name).family for name in NAMES} == own


def test_every_checkpoint_is_a_subject() -> None:  # F7
    assert set(NAMES) == set(checkpoints.CHECKPOINTS)


@pytest.mark.parametrize("image", EVERYDAY)
@pytest.mark.parametrize("name", NAMES)
def test_everyday_images_equal_the_reference(name: str, image: str, sides: Both) -> None:
    check(sides(name), CORPUS[image])


@pytest.mark.parametrize("image", ["jpeg 150x100", "png RGBA"])
@pytest.mark.parametrize("name", NAMES)
def test_other_patch_forms_equal_the_reference(name: str, image: str, sides: Both) -> None:
    both = sides(name)
    if is_foreign(both):
        check_foreign(both, CORPUS[image])
    else:
        with pytest.raises(Exception, match="takes no images"):
            patches(both, CORPUS[image], "bfloat16")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", DIFFERENCES)
def test_deliberate_differences_exist(kind: str, name: str, sides: Both) -> None:
    """The example equals the reference of what we show, and not of what the release would show, unless it is exempt."""
    both, difference = sides(name), DIFFERENCES[kind]
    _, ours = patches(both, difference.example)
    assert is_equal(both, ours, shown(both, difference.example))
    with Image.open(io.BytesIO(difference.example)) as image:
        as_released = both.reference.see(image)
    has_grown = as_released.pixels is not None and as_released.pixels.shape != ours.shape
    same = not has_grown and as_released.num_tokens == shown(both, difference.example).num_tokens
    assert (same and is_equal(both, ours, as_released)) != difference.holds_for(name)


@pytest.mark.parametrize("size", [(201, 1), (1, 201), (20_000, 1)])
@pytest.mark.parametrize("name", MERGING)
def test_sides_too_unequal_are_refused_as_the_reference_does(name: str, size: tuple[int, int], sides: Both) -> None:
    both = sides(name)
    with pytest.raises(ValueError, match="aspect ratio"):
        both.reference.see(Image.new("RGB", size))
    with pytest.raises(ImageTooLarge):
        both.layout.image(*size, both.layout.settings)


@pytest.mark.parametrize(
    ("name", "size"), [(subject.checkpoint, size) for subject in SUBJECTS for size in subject.extremes]
)
def test_extreme_sizes_equal_the_reference(name: str, size: tuple[int, int], sides: Both) -> None:  # A2
    check(sides(name), images.encode(images.random_image(*size)))


@pytest.mark.aspect("layout")
@pytest.mark.aspect("patches")
@pytest.mark.conformance
@pytest.mark.parametrize("image", CORPUS)
@pytest.mark.parametrize("name", NAMES)
def test_whole_corpus_equals_the_reference(name: str, image: str, sides: Both) -> None:
    check(sides(name), CORPUS[image])
    if is_foreign(sides(name)):
        check_foreign(sides(name), CORPUS[image])


@pytest.mark.aspect("layout")
@pytest.mark.aspect("patches")
@pytest.mark.conformance
@pytest.mark.parametrize("name", NAMES)
def test_random_sizes_equal_the_reference(name: str, sides: Both) -> None:
    for encoded in random_sizes():
        check(sides(name), encoded)


@pytest.mark.conformance
@pytest.mark.parametrize("name", NAMES)
def test_twelve_megapixels_equal_the_reference(name: str, sides: Both) -> None:  # A2
    check(sides(name), twelve_megapixels())


@pytest.mark.conformance
async def test_patches_of_the_decode_pool_equal_the_reference(sides: Both) -> None:
    """The same pixels come out of the processes that make them in service."""
    both = sides("qwen3_vl")
    pool = DecodePool(MediaSettings(num_decode_processes=1))
    await pool.start()
    try:
        for name, encoded in CORPUS.items():
            layout = both.layout.image(*read_header(encoded).upright, both.layout.settings)
            prepared = await pool.prepare_image(encoded, both.family, both.layout.settings, layout)
            assert prepared.slot is not None
            ours = np.frombuffer(read_slot(prepared.slot), np.uint8).reshape(layout.pixel_shape)
            pool.release([prepared.slot.name])
            assert is_equal(both, ours.copy(), shown(both, encoded)), name
    finally:
        await pool.close()
