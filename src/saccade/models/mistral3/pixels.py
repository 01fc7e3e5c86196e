"""A decoded image to the patches of the wire. Runs in a decode process."""

from saccade.models.mistral3.layout import image_layout
from saccade.models.preprocessing.merge_pixels import PatchifyPixels


class Pixels(PatchifyPixels):
    """Patches of the sizes that the layout chose."""

    layout_of = staticmethod(image_layout)
