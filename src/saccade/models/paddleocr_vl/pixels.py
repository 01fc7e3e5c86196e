"""A decoded image to the patches of the wire. Runs in a decode process."""

from saccade.models.paddleocr_vl.layout import Layout
from saccade.models.preprocessing.merge_pixels import PatchifyPixels


class Pixels(PatchifyPixels):
    """Patches of the sizes that the layout chose."""

    layout_of = staticmethod(Layout.image)
