"""The arena: memory for the pixels of one step, mapped by all ranks when they start.

Rank 0 writes a step's pixels before it sends the step. The next step with images reuses the space. In a step that
encodes, ranks report failures before the network's first collective (executor.encoder). So rank 0 goes on only after
all of them have read the pixels.
"""

import mmap
import os

from saccade.engine.core.step import StepInput, with_pixels
from saccade.engine.executor.ranks.messages import PixelsPlace

ARENA_BYTES = 64 << 20
"""Address space: only written pages take memory. Pixels that do not fit travel within the step's message."""


class PixelArena:
    """One process's mapping of the arena. *descriptor* is an anonymous file of ARENA_BYTES, from `create_arena`."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, ARENA_BYTES)

    def store(self, step: StepInput) -> tuple[StepInput, tuple[PixelsPlace, ...]]:
        """Write the pixels of *step*; return the step without the written pixels, and their places."""
        if not step.images:
            return step, ()
        places: list[PixelsPlace] = []
        stop = 0
        for image in step.images:
            num_bytes = len(image.pixels)
            if stop + num_bytes <= ARENA_BYTES:
                self._memory[stop : stop + num_bytes] = image.pixels
                places.append(PixelsPlace(image.output_id, stop, num_bytes))
                stop += num_bytes
        stored = {place.output_id for place in places}
        return with_pixels(step, lambda p: b"" if p.output_id in stored else p.pixels), tuple(places)

    def restore(self, step: StepInput, places: tuple[PixelsPlace, ...]) -> StepInput:
        """Return the original step from the results of `store`."""
        if not places:
            return step
        pixels = {place.output_id: self._memory[place.start : place.start + place.num_bytes] for place in places}
        return with_pixels(step, lambda p: pixels.get(p.output_id, p.pixels))

    def close(self) -> None:
        self._memory.close()


def create_arena() -> int:
    """Return the descriptor of a new arena, which the caller closes. It has no name and ends with its last process."""
    descriptor = os.memfd_create("saccade-pixels")
    os.ftruncate(descriptor, ARENA_BYTES)
    return descriptor
