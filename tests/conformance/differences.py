"""Where Saccade shows a model another image than the release's own loader would: on purpose, each for a reason."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import images
import numpy as np
from PIL import Image, ImageOps

WHITE = (255, 255, 255, 255)


def _upper_byte(image: Image.Image) -> Image.Image:
    if not image.mode.startswith("I;16"):
        return image
    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))


def _on_white(image: Image.Image) -> Image.Image:
    if "A" not in image.getbands() and "transparency" not in image.info:
        return image
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, WHITE), rgba).convert("RGB")


@dataclass(frozen=True)
class Difference:
    """*seen* turns what a file holds into what the reference must be given to see what Saccade shows.

    *only* names the checkpoints whose releases do otherwise, None for all of them. *example* is an image on which it
    shows.
    """

    reason: str
    seen: Callable[[Image.Image], Any]
    example: bytes
    only: frozenset[str] | None = None

    def holds_for(self, checkpoint: str) -> bool:
        """Tell whether the release *checkpoint* does it otherwise."""
        return self.only is None or checkpoint in self.only


DIFFERENCES = {
    "orientation": Difference(
        "People see a photograph upright; the processors ignore the Exif tag and leave it to whoever loads the file.",
        ImageOps.exif_transpose,
        images.turned(6),
    ),
    "16-bit grey": Difference(
        "Conversion to 8 bits saturates: all above 255 of 65535 turns white. The upper byte is what the image shows.",
        _upper_byte,
        images.encode(images.random_image(75, 51, "I;16")),
    ),
    "transparency": Difference(
        "The releases drop the alpha channel, which shows whatever lies under what nobody sees; on white as browsers do.",
        _on_white,
        images.encode(images.random_image(75, 51, "RGBA")),
        frozenset({"kimi_k25", "phi3_v"}),
    ),
}


def as_shown(image: Image.Image, checkpoint: str) -> Image.Image:
    """Return what the reference of *checkpoint* must be given to see what Saccade shows."""
    for difference in DIFFERENCES.values():
        if difference.holds_for(checkpoint):
            image = difference.seen(image)
    return image
