"""A decoded picture to the patches of the wire. Runs in a decode process."""

from saccade.models.preprocessing.merge_pixels import PatchifyPixels


class Pixels(PatchifyPixels):
    """Patches in merged blocks: uint8 of one frame; normalised and with two frames on external wires."""
