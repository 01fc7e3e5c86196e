"""What a step has to say, by connection, until its frames are taken."""

from collections import defaultdict

from saccade.protocol.output import PixelsWanted, StepFrame, TokenDelta


class Outbox:
    """Deltas, slots to give back, and questions for pixels. Those of a connection that is gone are forgotten."""

    def __init__(self) -> None:
        self._deltas: defaultdict[int, list[TokenDelta]] = defaultdict(list)
        self._released: defaultdict[int, list[str]] = defaultdict(list)
        self._pixels_wanted: defaultdict[int, list[PixelsWanted]] = defaultdict(list)

    def __bool__(self) -> bool:
        return bool(self._deltas or self._pixels_wanted or any(self._released.values()))

    def say(self, connection: int, delta: TokenDelta) -> None:
        """Add a delta."""
        self._deltas[connection].append(delta)

    def ask(self, connection: int, wanted: PixelsWanted) -> None:
        """Add a question for pixels."""
        self._pixels_wanted[connection].append(wanted)

    def released(self, connection: int) -> list[str]:
        """Return the list to which names of slots are added that nobody here will read any more."""
        return self._released[connection]

    def forget(self, connection: int) -> None:
        """Say nothing more to *connection*."""
        for messages in (self._deltas, self._released, self._pixels_wanted):
            messages.pop(connection, None)

    def take(self) -> dict[int, StepFrame]:
        """Return a frame for every connection that there is something to say to, and be empty."""
        connections = {*self._deltas, *self._pixels_wanted, *(c for c, names in self._released.items() if names)}
        frames = {
            connection: StepFrame(
                self._deltas.get(connection, []),
                self._released.get(connection, []),
                pixels_wanted=self._pixels_wanted.get(connection, []),
            )
            for connection in connections
        }
        for messages in (self._deltas, self._released, self._pixels_wanted):
            messages.clear()
        return frames
