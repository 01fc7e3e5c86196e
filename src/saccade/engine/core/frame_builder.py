"""Collect the output of a step, by connection, until its frames are taken."""

from collections import defaultdict

from saccade.protocol.output import PixelsWanted, StepFrame, TokenDelta


class FrameBuilder:
    """Token deltas, released slots and pixel requests, by connection."""

    def __init__(self) -> None:
        self._frames: defaultdict[int, StepFrame] = defaultdict(lambda: StepFrame([], [], None, []))

    def __bool__(self) -> bool:
        return any(map(_has_content, self._frames.values()))

    def say(self, connection: int, delta: TokenDelta) -> None:
        self._frames[connection].deltas.append(delta)

    def ask(self, connection: int, question: PixelsWanted) -> None:
        self._frames[connection].pixels_wanted.append(question)

    def released_slots(self, connection: int) -> list[str]:
        """Return a list; the caller adds the names of slots that the engine will not read again."""
        return self._frames[connection].released

    def forget(self, connection: int) -> None:
        """Discard the pending output of *connection*."""
        self._frames.pop(connection, None)

    def take(self) -> dict[int, StepFrame]:
        """Return one frame for each connection with pending output, and clear the output."""
        frames = {connection: frame for connection, frame in self._frames.items() if _has_content(frame)}
        self._frames.clear()
        return frames


def _has_content(frame: StepFrame) -> bool:
    return bool(frame.deltas or frame.released or frame.pixels_wanted)
