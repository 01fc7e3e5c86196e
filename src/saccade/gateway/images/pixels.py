"""From encoded images to media items: pixels in slots, in the format of the chosen worker's wire.

A worker that is expected to hold an image's encoder output gets the image by its hash, without pixels. PixelResend
keeps the encoded image until the worker begins to answer, in case it does not hold the output after all.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from saccade.byte_lru import ByteLru
from saccade.errors import InternalError, RequestError, UnsupportedParameter, WorkerUnavailable
from saccade.gateway.concurrency import SingleFlight, all_or_none
from saccade.gateway.images.decode_pool.pool import DecodePool, PreparedImage
from saccade.gateway.images.decode_pool.queue import FileTime
from saccade.gateway.images.encoded_image import EncodedImage, num_encoded_bytes
from saccade.gateway.request import Request
from saccade.models.family import Layout
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.request import MediaPixels
from saccade.telemetry import Metrics

Key = tuple[bytes, bytes, str]


class ProcessorCache:
    """An LRU cache of at most *budget_bytes* of patches in slots of *pool*; 0 keeps nothing.

    Every image that get() returns holds one reference to its slot, which pool.release() drops.
    """

    def __init__(self, pool: DecodePool, budget_bytes: int) -> None:
        self._pool = pool
        self._flights = SingleFlight[Key, PreparedImage]()
        self._entries = ByteLru[Key, PreparedImage](budget_bytes, self._flights.__contains__, self._let_go)
        self.num_hits = 0
        self.num_misses = 0
        pool.reclaim = self._reclaim

    async def get(self, key: Key, prepare: Callable[[], Awaitable[PreparedImage]]) -> PreparedImage:
        """Return the image of *key*; call *prepare* if it is not cached. Raises the errors of *prepare*."""
        image = self._entries.get(key)
        if image is not None and self._pool.is_lost(image) and key not in self._flights:
            self._entries.drop(key)
            image = None
        if image is not None:
            self.num_hits += 1
            return self._lend(image)
        if key in self._flights:
            self.num_hits += 1
        else:
            self.num_misses += 1
        try:
            # Nothing else runs between the end of the flight and retain() that could release the slot.
            return self._lend(await self._flights.join(key, lambda: self._keep(key, prepare)))
        finally:
            self._entries.trim()

    @property
    def num_bytes(self) -> int:
        """Bytes of the cached images."""
        return self._entries.num_bytes

    @property
    def num_idle(self) -> int:
        """Cached slots that no request holds."""
        images = (image for _, image in self._entries.items() if image.slot is not None)
        return sum(not self._pool.is_held_by_others(image) for image in images)

    def clear(self) -> None:
        """Drop everything except images that requests wait for."""
        self._entries.clear()

    def close(self) -> None:
        """Drop everything."""
        for key in list(self._entries):
            self._entries.drop(key)

    async def _keep(self, key: Key, prepare: Callable[[], Awaitable[PreparedImage]]) -> PreparedImage:
        image = await prepare()
        self._entries.put(key, image, image.num_bytes)
        return image

    def _lend(self, image: PreparedImage) -> PreparedImage:
        self._pool.retain(image)
        return image

    def _let_go(self, _: Key, image: PreparedImage) -> None:
        if image.slot is not None:
            self._pool.release([image.slot.name])

    def _reclaim(self, num_bytes: int) -> bool:
        """Free slots of *num_bytes*, the least recently used first; slots that requests hold would free nothing."""
        missing_bytes = num_bytes
        for key, image in list(self._entries.items()):
            if missing_bytes <= 0:
                break
            if key not in self._flights and not self._pool.is_held_by_others(image):
                self._entries.drop(key)
                missing_bytes -= image.num_bytes
        return missing_bytes < num_bytes


@dataclass(frozen=True)
class PromptImages:
    """The images of one prompt: the tokens of images[i] lie in the spans of spans[i].

    Images with a content hash in *held_hashes* are sent without pixels: the worker should hold their encoder outputs.
    """

    images: tuple[EncodedImage, ...] = ()
    spans: tuple[tuple[Span, ...], ...] = ()
    held_hashes: frozenset[bytes] = frozenset()

    @property
    def num_pixel_bytes(self) -> int:
        """Bytes of the patches to prepare; a repeated image counts once."""
        return sum(image.layout.num_pixel_bytes for image in self.to_prepare().values())

    def to_prepare(self) -> dict[bytes, EncodedImage]:
        """Return the images that need pixels, each once, by content hash."""
        images: dict[bytes, EncodedImage] = {}
        for image in self.images:
            if image.content_hash not in self.held_hashes:
                images.setdefault(image.content_hash, image)
        return images

    def on_wire(
        self, layout: Layout, pixel_dtype: str, is_held: Callable[[bytes], bool] = lambda _: False
    ) -> "PromptImages":
        """Return a copy with pixels in the wire's format: uint8 on ours, normalised as *pixel_dtype* on others.

        Images whose content hash *is_held* are sent without pixels. Raises UnsupportedParameter if the model's family
        has no such format.
        """
        held_hashes = frozenset(image.content_hash for image in self.images if is_held(image.content_hash))
        images = self.images
        if pixel_dtype != "uint8":
            _refuse_videos(images)
            images = tuple(
                dataclasses.replace(image, layout=layout.external(image.layout, pixel_dtype)) for image in self.images
            )
        return PromptImages(images, self.spans, held_hashes)

    def is_by_hash(self, index: int) -> bool:
        """Whether there is an image *index* and it is sent by its hash."""
        return 0 <= index < len(self.images) and self.images[index].content_hash in self.held_hashes

    def all_by_hash(self) -> "PromptImages":
        """Return a copy in which every image is sent by its hash."""
        return dataclasses.replace(self, held_hashes=frozenset(image.content_hash for image in self.images))

    def by_hash(self) -> "PromptImages":
        """Return a copy with the encoded bytes of only the images that are sent by their hash."""
        images = (
            image if self.is_by_hash(index) else dataclasses.replace(image, encoded=b"")
            for index, image in enumerate(self.images)
        )
        return dataclasses.replace(self, images=tuple(images))

    def of(self, media: Sequence[int]) -> "PromptImages":
        """Return the images of these indices, all with pixels."""
        return PromptImages(tuple(self.images[i] for i in media), tuple(self.spans[i] for i in media))


@dataclass(frozen=True)
class PixelPreparer:
    """Decodes images in *pool* unless *cache* already has their pixels."""

    pool: DecodePool
    cache: ProcessorCache
    metrics: Metrics
    resend_seconds: float

    async def prepare(self, family: str, media: PromptImages, salt: bytes, client: Hashable) -> tuple[MediaItem, ...]:
        """Return an item for each image of *media*, with pixels in a slot or inline.

        The decode queue is fair between clients. A repeated image is prepared once and has one slot. Each item with a
        slot holds one reference to it until the item is sent or its slot is released; on failure and cancellation no
        reference is left. Raises RequestError, naming the field.
        """
        self.metrics.images_by_hash.inc(sum(image.content_hash in media.held_hashes for image in media.images))
        pixels: dict[bytes, PreparedImage] = {}
        # The pages of a PDF share its bytes.
        file_times = {id(image.encoded): self.pool.file_time() for image in media.images if image.page is not None}

        async def prepare(key: bytes, image: EncodedImage) -> None:
            file_time = None if image.page is None else file_times[id(image.encoded)]
            pixels[key] = await self._pixels(family, image, salt, client, file_time)

        with self.metrics.stage("media"):
            try:
                await all_or_none(prepare(key, image) for key, image in media.to_prepare().items())
            except BaseException:
                self.pool.release(done.slot.name for done in pixels.values() if done.slot is not None)
                raise
        return tuple(self._items(media, pixels))

    async def resend(self, family: str, media: PromptImages, salt: bytes, client: Hashable) -> tuple[MediaItem, ...]:
        """As prepare(), for a worker that waits for the pixels.

        Raises WorkerUnavailable after *resend_seconds*.
        """
        self.metrics.pixels_wanted.inc(len(media.images))
        try:
            async with asyncio.timeout(self.resend_seconds):
                return await self.prepare(family, media, salt, client)
        except TimeoutError as error:
            raise WorkerUnavailable(
                "The worker no longer held an image, and preparing it again took too long; send the request again."
            ) from error

    async def _pixels(
        self, family: str, image: EncodedImage, salt: bytes, client: Hashable, file_time: FileTime | None
    ) -> PreparedImage:
        async def prepare() -> PreparedImage:
            pixels = await self.pool.image(
                image.encoded, family, image.settings, image.layout, client, image.video, image.page, file_time
            )
            self.metrics.observe_stages({"queue": pixels.waited_seconds, **msgspec.structs.asdict(pixels.seconds)})
            return pixels

        try:
            return await self.cache.get((salt, image.content_hash, image.layout.pixel_dtype), prepare)
        except RequestError as error:
            raise error.at(image.field) from error

    def _items(self, media: PromptImages, pixels: Mapping[bytes, PreparedImage]) -> Iterable[MediaItem]:
        hashes: set[bytes] = set()
        for image, spans in zip(media.images, media.spans, strict=True):
            prepared = pixels.get(image.content_hash)
            if prepared is not None and image.content_hash in hashes:
                self.pool.retain(prepared)
            hashes.add(image.content_hash)
            yield _item(image, spans, prepared)


def _refuse_videos(images: Iterable[EncodedImage]) -> None:
    for image in images:
        if image.video is not None:
            raise UnsupportedParameter("This model's workers take no videos; send images.", image.field)


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


class PixelResend:
    """The encoded images that a request sent by hash, kept while its worker may ask for their pixels.

    *request* counts the encoded images, and the pixels until *resources* closes. With *keeps_all* it also counts the
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
        """Return the slots or inline pixels of *media*, by index; each holds one reference to its slot.

        Raises WorkerUnavailable if they are not ready in time, and the errors of prepare().
        """
        images = self._media
        if images is None or not all(images.is_by_hash(index) for index in media):
            raise InternalError("The worker asked for the pixels of an image that was not sent by its hash.")
        missing = images.of(media)
        self._resources.enter_context(await self._request.pixels(missing.num_pixel_bytes))
        items = await self._preparer.resend(self._family, missing, self._salt, self._request.client)
        return tuple(MediaPixels(index, item.slot, item.inline) for index, item in zip(media, items, strict=True))

    def forget(self) -> None:
        """Drop the images, once the worker has begun to answer."""
        if self._media is not None:
            self._media = None
            self._request.memory.keep(0)
