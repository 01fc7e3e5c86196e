"""The images of Pillow's own tests, decoded by Saccade and by Pillow: the same pixels, or refused by both."""

import io
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from judges.archives import Archive, take
from judges.judge import Judge
from judges.outcomes import FAILED, PASSED, SKIPPED, Outcome
from saccade.errors import SaccadeError
from saccade.media.decode import BROKEN, decode
from saccade.media.header import ImageLimits

ARCHIVE = Archive("pillow", "pillow-12.3.0.tar.gz", "3b8182a766685eaa002637e28b4ec8d6b18819a0c71f579bf0dbaa5830297cce")
FOLDER = "Tests/images"
SERVED = frozenset({".png", ".apng", ".jpg", ".jpeg", ".jfif", ".mpo", ".gif", ".webp", ".avif", ".avifs", ".bmp"})
LIMITS = ImageLimits()


def run(cache: Path, skips: frozenset[str]) -> Iterator[Outcome]:
    """Judge every image whose name ends as one of a served format does."""
    folder = take(ARCHIVE, (FOLDER,), cache) / FOLDER
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in SERVED:
            name = f"{path.relative_to(folder).parent}::{path.name}"
            yield Outcome(name, SKIPPED) if name in skips else judge_image(name, path.read_bytes())


def judge_image(name: str, encoded: bytes) -> Outcome:
    """Decode an image on both sides."""
    expected = by_pillow(encoded)
    try:
        got = decode(encoded, LIMITS)
    except SaccadeError as error:
        return Outcome(name, PASSED if expected is None else FAILED, f"refused: {error}")
    if expected is None:
        return Outcome(name, FAILED, "is decoded, and Pillow refuses it")
    if got.shape != expected.shape:
        return Outcome(name, FAILED, f"{got.shape}, not {expected.shape}")
    different = int((got != expected).any(axis=-1).sum())
    return Outcome(name, FAILED if different else PASSED, f"{different} pixels differ" if different else "")


def by_pillow(encoded: bytes) -> npt.NDArray[np.uint8] | None:
    """Pillow's pixels of the first frame, upright, as reference processors take them; None if it refuses."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(encoded)) as image:
                if image.mode.startswith("I;16"):
                    return sixteen_bit(image)
                return np.asarray(on_white(ImageOps.exif_transpose(image)))
    except (*BROKEN, Image.DecompressionBombError, MemoryError):
        return None


def on_white(image: Image.Image) -> Image.Image:
    """RGB as reference processors take it: transformers 5.23, image_transforms.py, convert_to_rgb."""
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return image.convert("RGB")


def sixteen_bit(image: Image.Image) -> npt.NDArray[np.uint8]:
    """The upper bytes of 16-bit greyscale, which Saccade takes on purpose; its transparent value is white."""
    samples = np.asarray(ImageOps.exif_transpose(image))
    grey = (samples >> 8).astype(np.uint8)
    if (transparent := image.info.get("transparency")) is not None:
        grey[samples == transparent] = 255
    return np.repeat(grey[..., None], 3, -1)


SAYS = """\
Every image of Pillow's tests whose name ends as one of a served format does. Saccade's pixels must equal those of the
installed Pillow, upright and in RGB as reference processors take them. An image that both refuse passes. Left out are
the formats that Saccade does not serve."""
JUDGE = Judge("pillow-images", ARCHIVE.release, SAYS, run)
