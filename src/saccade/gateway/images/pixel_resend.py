"""Sends the pixels of images that a worker got by hash alone, if the worker asks for them.

If a worker should already hold an image's encoder output, it gets the image without pixels. PixelResend keeps the
encoded image until the worker begins to answer, in case the output is missing after all.
"""

import contextlib
from collections.abc import Sequence

from saccade.errors import InternalError
from saccade.gateway.images.encoded_image import num_encoded_bytes
from saccade.gateway.images.pixels import PixelPreparer
from saccade.gateway.images.prompt_images import PromptImages
from saccade.gateway.request import Request
from saccade.protocol.request import MediaPixels


class PixelResend:
    """Keeps the encoded images that a request sent by hash, as long as its worker may ask for their pixels.

    *request* counts the encoded images and, until *resources* closes, the pixels. With *keeps_all*, it also counts the
    other images, which the caller keeps for another worker until this one answers.
    """

    def __init__(
        self,
        preparer: PixelPreparer,
        family: str,
        media: PromptImages,
        salt: bytes,
        request: Request,
        resources: contextlib.AsyncExitStack,
        *,
        keeps_all: bool,
    ) -> None:
        self._preparer = preparer
        self._family = family
        self._media: PromptImages | None = media.by_hash()
        self._salt = salt
        self._request = request
        self._resources = resources
        request.memory.keep(num_encoded_bytes((media if keeps_all else self._media).images))

    async def __call__(self, media: Sequence[int]) -> tuple[MediaPixels, ...]:
        """Return the slots or inline pixels of the images at the indices *media*; each holds one reference to its slot.

        Raises InternalError for an image that was not sent by its hash, and WorkerUnavailable if the pixels are not
        ready in time. Also raises the errors of prepare_images().
        """
        images = self._media
        if images is None or not all(images.is_by_hash(index) for index in media):
            raise InternalError("The worker asked for the pixels of an image that was not sent by its hash.")
        missing = images.images_at(media)
        self._resources.enter_context(await self._request.pixels(missing.num_pixel_bytes))
        items = await self._preparer.resend(self._family, missing, self._salt, self._request.client)
        return tuple(MediaPixels(index, item.slot, item.inline) for index, item in zip(media, items, strict=True))

    def forget_images(self) -> None:
        """Drop the images, once the worker has begun to answer."""
        if self._media is not None:
            self._media = None
            self._request.memory.keep(0)
