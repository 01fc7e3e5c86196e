"""Turns encoded images into media items: pixels in slots, in the chosen worker's wire format."""

import asyncio
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from saccade.concurrency import all_or_none
from saccade.errors import RequestError, WorkerUnavailable
from saccade.gateway.images.decode_pool.pool import DecodePool, PreparedImage
from saccade.gateway.images.decode_pool.queue import FileTime
from saccade.gateway.images.encoded_image import EncodedImage
from saccade.gateway.images.processor_cache import ProcessorCache
from saccade.gateway.images.prompt_images import PromptImages
from saccade.protocol.media import MediaItem, Span
from saccade.telemetry import Metrics


@dataclass(frozen=True)
class PixelPreparer:
    """Decodes images in *pool* unless *cache* already has their pixels."""

    pool: DecodePool
    cache: ProcessorCache
    metrics: Metrics
    resend_seconds: float

    async def prepare_images(
        self, family: str, media: PromptImages, salt: bytes, client: Hashable
    ) -> tuple[MediaItem, ...]:
        """Return an item for each image in *media*, with pixels in a slot or inline unless it is sent by its hash.

        The decode queue is fair between clients. A repeated image is prepared once and has one slot. An item with a
        slot holds one reference to it until the item is sent or the slot is released. Failure and cancellation leave no
        reference. Raises a RequestError that names the field.
        """
        self.metrics.images_by_hash.inc(sum(image.content_hash in media.held_hashes for image in media.images))
        pixels: dict[bytes, PreparedImage] = {}
        # The pages of a PDF share its bytes.
        file_times = {id(image.encoded): self.pool.file_time() for image in media.images if image.page is not None}
        with self.metrics.stage("media"):
            try:
                await all_or_none(
                    self._add_pixels(pixels, family, image, salt, client, file_times.get(id(image.encoded)))
                    for image in media.to_prepare().values()
                )
            except BaseException:
                self.pool.release(done.slot.name for done in pixels.values() if done.slot is not None)
                raise
        return tuple(self._items(media, pixels))

    async def resend(self, family: str, media: PromptImages, salt: bytes, client: Hashable) -> tuple[MediaItem, ...]:
        """Prepare images as prepare_images() does, for a worker that waits for the pixels.

        Raises WorkerUnavailable after *resend_seconds*.
        """
        self.metrics.pixels_wanted.inc(len(media.images))
        try:
            async with asyncio.timeout(self.resend_seconds):
                return await self.prepare_images(family, media, salt, client)
        except TimeoutError as error:
            raise WorkerUnavailable(
                "The worker no longer held an image, and preparing it again took too long; send the request again."
            ) from error

    async def _add_pixels(
        self,
        pixels: dict[bytes, PreparedImage],
        family: str,
        image: EncodedImage,
        salt: bytes,
        client: Hashable,
        file_time: FileTime | None,
    ) -> None:
        """Add the pixels of *image* to *pixels*, keyed by content hash."""
        key = salt, image.content_hash, image.layout.pixel_dtype
        try:
            pixels[image.content_hash] = await self.cache.get(key, self._decode, family, image, client, file_time)
        except RequestError as error:
            raise error.at(image.field) from error

    async def _decode(
        self, family: str, image: EncodedImage, client: Hashable, file_time: FileTime | None
    ) -> PreparedImage:
        pixels = await self.pool.prepare_image(
            image.encoded, family, image.settings, image.layout, client, image.video, image.page, file_time
        )
        self.metrics.observe_stages({"queue": pixels.waited_seconds, **msgspec.structs.asdict(pixels.seconds)})
        return pixels

    def _items(self, media: PromptImages, pixels: Mapping[bytes, PreparedImage]) -> Iterable[MediaItem]:
        hashes: set[bytes] = set()
        for image, spans in zip(media.images, media.spans, strict=True):
            prepared = pixels.get(image.content_hash)
            if prepared is not None and image.content_hash in hashes:
                self.pool.retain(prepared)
            hashes.add(image.content_hash)
            yield _item(image, spans, prepared)


def _item(image: EncodedImage, spans: tuple[Span, ...], pixels: PreparedImage | None) -> MediaItem:
    return MediaItem(
        modality="image" if image.video is None else "video",
        content_hash=image.content_hash,
        grid=image.layout.grid,
        spans=spans,
        pixel_shape=image.layout.pixel_shape,
        pixel_dtype=image.layout.pixel_dtype,
        original_size=image.layout.original_size,
        seconds_per_group=image.layout.seconds_per_group,
        slot=pixels.slot if pixels else None,
        inline=pixels.inline if pixels else None,
    )
