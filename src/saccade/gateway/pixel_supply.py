"""Pixels that a worker lacks after all: prepared when it asks, until its first token shows that it will not."""

import contextlib
from collections.abc import Sequence

from saccade.errors import InternalError
from saccade.gateway.admission import Admission
from saccade.gateway.prepare import Draft, Preparer
from saccade.gateway.served_model import ServedModel
from saccade.protocol.request import MediaPixels


class PixelSupply:
    """The pictures of one request, encoded, while its worker may ask for them.

    Room for what is brought is held in *held*, as for the pixels that went with the request.
    """

    def __init__(
        self,
        preparer: Preparer,
        admission: Admission,
        held: contextlib.AsyncExitStack,
        served: ServedModel,
        draft: Draft,
        salt: bytes,
    ) -> None:
        self._preparer = preparer
        self._admission = admission
        self._held = held
        self._served = served
        self._draft: Draft | None = draft
        self._salt = salt

    async def __call__(self, media: Sequence[int]) -> tuple[MediaPixels, ...]:
        """Return where the pixels of *media*, by index, are; each is a use of its slot of its own.

        Raises WorkerUnavailable where they are not ready in time, and what preparing raises.
        """
        draft = self._draft
        if draft is None or not all(0 <= index < len(draft.pictures) for index in media):
            raise InternalError("The worker asked for pixels that it was not sent a picture for.")
        wanted = draft.of(media)
        await self._held.enter_async_context(self._admission.pixels(wanted.num_pixel_bytes))
        brought = await self._preparer.bring(self._served, wanted, self._salt)
        return tuple(
            MediaPixels(index, item.slot, item.inline) for index, item in zip(media, brought.media, strict=True)
        )

    def forget(self) -> None:
        """Let go of the pictures: the worker has begun to answer."""
        self._draft = None
