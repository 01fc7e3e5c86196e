"""A decoded image or video to the patches of the wire. Runs in a decode process."""

from saccade.models.preprocessing.merge_pixels import PatchifyPixels as Pixels
from saccade.models.preprocessing.video_patches import MergedVideoPixels as VideoPixels

__all__ = ["Pixels", "VideoPixels"]
