"""JPEGs that cost a decoder what a photograph does: gradients, blobs, hard edges, the noise of a sensor."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

QUALITY = 90
NOISE = 6.0


def write_photos(folder: Path, count: int, width: int, height: int) -> list[Path]:
    """Write *count* distinct images, the same ones in every run, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:03d}.jpg" for number in range(count)]
    for number, path in enumerate(paths):
        if not path.exists():
            _photo(1000 + number, width, height).save(path.with_suffix(".part"), "JPEG", quality=QUALITY)
            path.with_suffix(".part").rename(path)
    return paths


def _photo(seed: int, width: int, height: int) -> Image.Image:
    random = np.random.default_rng(seed)
    y = np.linspace(0, 1, height, endpoint=False, dtype=np.float32)[:, None]
    x = np.linspace(0, 1, width, endpoint=False, dtype=np.float32)[None, :]
    slopes = random.uniform(-120, 120, (3, 3)).astype(np.float32)
    planes = [128 + a * (x - 0.5) + b * (y - 0.5) + c * (x - 0.5) * (y - 0.5) for a, b, c in slopes]
    image = np.stack(planes, axis=-1)
    for _ in range(25):
        image += _blob(random, x, y)
    for _ in range(30):
        left, top = int(random.integers(0, width - 40)), int(random.integers(0, height - 40))
        wide, high = random.integers(20, 300, 2)
        image[top : top + high, left : left + wide] += random.uniform(-50, 50, 3)
    image += random.normal(0, NOISE, image.shape)
    return Image.fromarray(np.clip(image, 0, 255).astype(np.uint8))


def _blob(
    random: np.random.Generator, x: npt.NDArray[np.float32], y: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Return a soft round patch of colour, [height, width, 3]."""
    centre_x, centre_y = random.uniform(0, 1, 2)
    spread = 2 * random.uniform(0.02, 0.2) ** 2
    colour = random.uniform(-90, 90, 3).astype(np.float32)
    # The exponential of a sum is the product of two lines.
    rows = np.exp(-((y - centre_y) ** 2) / spread).astype(np.float32)
    columns = np.exp(-((x - centre_x) ** 2) / spread).astype(np.float32)
    return (rows * columns)[..., None] * colour
