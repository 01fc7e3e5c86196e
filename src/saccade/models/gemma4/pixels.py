"""Turns a decoded image or video into the wire's patches. Runs in a decode process."""

from saccade.models.gemma4.layout import image_layout
from saccade.models.preprocessing.merge_pixels import PatchifyPixels
from saccade.models.preprocessing.video_patches import MergedVideoPixels as VideoPixels

__all__ = ["Pixels", "VideoPixels"]


class Pixels(PatchifyPixels):
    """Writes patches in merged blocks, so that a token's patches follow one another."""

    layout_of = staticmethod(image_layout)
