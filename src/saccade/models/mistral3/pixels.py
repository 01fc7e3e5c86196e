"""Turns a decoded image into the wire's patches. Runs in a decode process."""

from saccade.models.mistral3.layout import image_layout
from saccade.models.preprocessing.merge_pixels import PatchifyPixels


class Pixels(PatchifyPixels):
    """Writes the patches of an image, resized as its layout says."""

    layout_of = staticmethod(image_layout)
