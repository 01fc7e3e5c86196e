"""An image's layout and tensors by the checkpoint's own processor. Runs in a decode process, without torch.

The tensors travel as the bytes of a safetensors file. The layout comes from a blank image of the same size, so texts
and shapes must depend on the size alone: `write_pixels` checks that for every image.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from safetensors.numpy import save

from saccade.errors import InternalError, UnsupportedParameter
from saccade.models.any_architecture.processor import BlankProcessor, ImageProcessor, load_all, process
from saccade.protocol.media import ImageLayout


class Pixels:
    """Implements models.family.Pixels."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    load_library = staticmethod(load_all)

    @staticmethod
    def layout_of(width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
        """Return the layout of an upright image of *width* x *height* pixels. Its grid is (1, tokens, bytes)."""
        blank = np.broadcast_to(np.uint8(0), (height, width, 3))
        prompt, arrays = process(settings, blank, BlankProcessor)
        of_two, _ = process(settings, blank, BlankProcessor, copies=2)
        num_tokens, num_bytes = sum(piece for piece in prompt if isinstance(piece, int)), len(save(arrays))
        return ImageLayout(
            resized_height=height,
            resized_width=width,
            grid=(1, num_tokens, num_bytes),
            num_tokens=num_tokens,
            pixel_shape=(num_bytes,),
            prompt=prompt,
            stands_alone=of_two != prompt,
        )

    def write_pixels(self, image: npt.NDArray[np.uint8], layout: ImageLayout, out: npt.NDArray[Any]) -> None:
        """Write the tensors of *image* [height, width, 3] into *out*, which has layout.pixel_shape.

        Raises InternalError if they do not have the layout's tokens and size.
        """
        prompt, arrays = process(self._settings, Image.fromarray(image), ImageProcessor)
        content = save(arrays)
        if prompt != layout.prompt or len(content) != out.nbytes:
            raise InternalError("The image's tokens or tensors differ from those that were counted for its size.")
        out[...] = np.frombuffer(content, np.uint8)

    def to_image(self, patches: npt.NDArray[np.uint8], layout: ImageLayout) -> npt.NDArray[np.uint8]:
        """Raise UnsupportedParameter: nothing says how the tensors of any architecture show an image."""
        raise UnsupportedParameter("The tensors of this model's images cannot be shown.")
