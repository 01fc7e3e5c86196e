"""Keeps each connection's output until the loop sends it."""

from collections import defaultdict

from saccade.protocol.output import StepFrame


class Frames(defaultdict[int, StepFrame]):
    """The next frame of each connection."""

    def __init__(self) -> None:
        super().__init__(lambda: StepFrame([], [], None, []))

    @property
    def has_output(self) -> bool:
        """Whether `take_frames` would return a frame."""
        return any(map(_has_output, self.values()))

    def take_frames(self) -> dict[int, StepFrame]:
        """Return the frames that are not empty, and begin new ones."""
        frames = {connection: frame for connection, frame in self.items() if _has_output(frame)}
        self.clear()
        return frames


def _has_output(frame: StepFrame) -> bool:
    return bool(frame.deltas or frame.released or frame.pixels_wanted)
