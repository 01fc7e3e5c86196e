"""Collect the output of a step, by connection, until its frames are taken."""

from collections import defaultdict

from saccade.protocol.output import PixelsWanted, StepFrame, TokenDelta


class FrameBuilder:
    """Token deltas, released slots and pixel requests, by connection."""

    def __init__(self) -> None:
        self._deltas: defaultdict[int, list[TokenDelta]] = defaultdict(list)
        self._released_slots: defaultdict[int, list[str]] = defaultdict(list)
        self._pixels_wanted: defaultdict[int, list[PixelsWanted]] = defaultdict(list)

    def __bool__(self) -> bool:
        return bool(self._deltas or self._pixels_wanted or any(self._released_slots.values()))

    def say(self, connection: int, delta: TokenDelta) -> None:
        self._deltas[connection].append(delta)

    def ask(self, connection: int, question: PixelsWanted) -> None:
        self._pixels_wanted[connection].append(question)

    def released_slots(self, connection: int) -> list[str]:
        """Return a list; the caller adds the names of slots that the engine will not read again."""
        return self._released_slots[connection]

    def forget(self, connection: int) -> None:
        """Discard the pending output of *connection*."""
        for messages in (self._deltas, self._released_slots, self._pixels_wanted):
            messages.pop(connection, None)

    def take(self) -> dict[int, StepFrame]:
        """Return one frame for each connection with pending output, and clear the output."""
        connections = {*self._deltas, *self._pixels_wanted, *(c for c, names in self._released_slots.items() if names)}
        frames = {
            connection: StepFrame(
                self._deltas.get(connection, []),
                self._released_slots.get(connection, []),
                pixels_wanted=self._pixels_wanted.get(connection, []),
            )
            for connection in connections
        }
        for messages in (self._deltas, self._released_slots, self._pixels_wanted):
            messages.clear()
        return frames
