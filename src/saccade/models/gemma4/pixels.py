"""A decoded image or video to the patches of the wire. Runs in a decode process."""

from saccade.models.gemma4.layout import image_layout
from saccade.models.preprocessing.merge_pixels import PatchifyPixels
from saccade.models.preprocessing.video_patches import MergedVideoPixels as VideoPixels

__all__ = ["Pixels", "VideoPixels"]


class Pixels(PatchifyPixels):
    """Patches in merged blocks: those of a token follow each other."""

    layout_of = staticmethod(image_layout)
