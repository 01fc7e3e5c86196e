"""What a model family declares about itself, and the two halves it must provide."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from saccade.protocol.media import PictureLayout


@dataclass(frozen=True)
class Family:
    """A family is claimed by the exact architecture strings of config.json; exactly one folder owns each."""

    architectures: tuple[str, ...]
    modalities: tuple[str, ...] = ("image",)


class Layout(Protocol):
    """The gateway's half: counts and placeholders, from dimensions alone. No torch.

    Built from the checkpoint's parsed files: `Layout(config, preprocessor)`; raises StartupError where they are wrong.
    """

    placeholder_token_id: int
    settings: Mapping[str, Any]
    """Resolved processor settings as JSON values: part of every picture's identity, and all that `Pixels` is given."""

    def __init__(self, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> None: ...

    def picture(self, width: int, height: int) -> PictureLayout:
        """Return the layout of a picture of *width* x *height* pixels (EXIF applied). Raises ImageTooLarge."""


class Pixels(Protocol):
    """The decode process's half: an upright RGB picture to the patches of the wire."""

    def __init__(self, settings: Mapping[str, Any]) -> None: ...

    def write(self, picture: npt.NDArray[np.uint8], layout: PictureLayout, out: npt.NDArray[np.uint8]) -> None:
        """Write the patches of *picture* [height, width, 3] into *out*, which has layout.pixel_shape."""
