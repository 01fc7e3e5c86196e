"""A decoded image or video to the patches of the wire. Runs in a decode process."""

from saccade.models.preprocessing.merge_pixels import PatchifyPixels
from saccade.models.preprocessing.video_patches import MergedVideoPixels


class Pixels(PatchifyPixels):
    """Patches in merged blocks: uint8 of one frame; normalised and with two frames on external wires."""


class VideoPixels(MergedVideoPixels):
    """Patches in merged blocks: uint8 of two frames each."""
