"""A decoded picture to the patches of the wire. Runs in a decode process."""

from saccade.models.preprocessing.merge_pixels import MergeBlocksPixels


class Pixels(MergeBlocksPixels):
    """Patches in merged blocks: uint8 of one frame; normalised and doubled on wires that are not ours."""
