"""Pixels that a worker lacks after all: prepared when it asks, until its first token shows that it will not."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from saccade.errors import InternalError
from saccade.gateway.admission import Admission
from saccade.gateway.byte_budget import Reservation
from saccade.gateway.prepare import Draft, Preparer
from saccade.gateway.served_model import ServedModel
from saccade.protocol.request import MediaPixels


@dataclass(frozen=True)
class Room:
    """Where pictures of one request are counted: encoded ones in *memory*, room for pixels until *held* ends."""

    admission: Admission
    held: contextlib.AsyncExitStack
    memory: Reservation


class PixelSupply:
    """The encoded pictures that a request sent by their hash, while its worker may ask for them."""

    def __init__(self, preparer: Preparer, room: Room, served: ServedModel, draft: Draft, salt: bytes) -> None:
        self._preparer = preparer
        self._room = room
        self._served = served
        self._draft: Draft | None = draft
        self._salt = salt
        room.memory.keep(draft.num_encoded_bytes)

    async def __call__(self, media: Sequence[int]) -> tuple[MediaPixels, ...]:
        """Return where the pixels of *media*, by index, are; each is a use of its slot of its own.

        Raises WorkerUnavailable where they are not ready in time, and what preparing raises.
        """
        draft = self._draft
        if draft is None or not all(draft.is_by_hash(index) for index in media):
            raise InternalError("The worker asked for pixels that it was not sent a picture for.")
        wanted = draft.of(media)
        await self._room.held.enter_async_context(self._room.admission.pixels(wanted.num_pixel_bytes))
        brought = await self._preparer.bring(self._served, wanted, self._salt)
        return tuple(
            MediaPixels(index, item.slot, item.inline) for index, item in zip(media, brought.media, strict=True)
        )

    def forget(self) -> None:
        """Let go of the pictures: the worker has begun to answer."""
        if self._draft is not None:
            self._draft = None
            self._room.memory.keep(0)
