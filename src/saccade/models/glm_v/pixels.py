"""Turns a decoded image or video into the wire's patches. Runs in a decode process."""

from saccade.models.glm_v.layout import Layout
from saccade.models.preprocessing.merge_pixels import PatchifyPixels
from saccade.models.preprocessing.video_patches import MergedVideoPixels as VideoPixels

__all__ = ["Pixels", "VideoPixels"]


class Pixels(PatchifyPixels):
    """Writes the patches of an image, resized as its layout says."""

    layout_of = staticmethod(Layout.image)
