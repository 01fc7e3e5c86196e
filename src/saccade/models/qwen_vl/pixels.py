"""Turns a decoded image or video into the wire's patches. Runs in a decode process."""

from saccade.models.preprocessing.merge_pixels import PatchifyPixels as Pixels
from saccade.models.preprocessing.video_patches import MergedVideoPixels as VideoPixels

__all__ = ["Pixels", "VideoPixels"]
