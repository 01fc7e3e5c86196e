"""From encoded pictures to media items: pixels in slots, in the form of the chosen worker's wire.

A worker that is believed to hold a picture's encoding gets the picture by its hash, without pixels; PixelResend keeps
the encoded picture until the worker has begun to answer, for the case that it does not hold it after all.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from saccade.errors import InternalError, RequestError, UnsupportedParameter, WorkerUnavailable
from saccade.gateway.limits.admission import Admission
from saccade.gateway.limits.byte_budget import Reservation
from saccade.gateway.pictures.collect import Picture
from saccade.gateway.pictures.concurrency import all_or_none
from saccade.gateway.pictures.decode_pool.pool import DecodePool, PreparedPicture
from saccade.gateway.pictures.processor_cache import ProcessorCache
from saccade.models.family import Layout
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.request import MediaPixels
from saccade.telemetry import Metrics


@dataclass(frozen=True)
class PromptPictures:
    """The pictures of one prompt: the tokens of pictures[i] lie in the spans of spans[i].

    Pictures with a content hash in *held* go without pixels, because the worker is believed to hold them.
    """

    pictures: tuple[Picture, ...] = ()
    spans: tuple[tuple[Span, ...], ...] = ()
    held: frozenset[bytes] = frozenset()

    @property
    def num_encoded_bytes(self) -> int:
        """Encoded bytes that are held."""
        return sum(len(picture.encoded) for picture in self.pictures)

    @property
    def num_pixel_bytes(self) -> int:
        """Bytes of the patches to come; a picture that is there twice counts once."""
        return sum(picture.layout.num_pixel_bytes for picture in self.to_prepare().values())

    def to_prepare(self) -> dict[bytes, Picture]:
        """Return the pictures that need pixels, each once, by content hash."""
        wanted: dict[bytes, Picture] = {}
        for picture in self.pictures:
            if picture.content_hash not in self.held:
                wanted.setdefault(picture.content_hash, picture)
        return wanted

    def on_wire(
        self, layout: Layout, pixel_dtype: str, is_held: Callable[[bytes], bool] = lambda _: False
    ) -> "PromptPictures":
        """Return the same with pixels in the form of the wire: uint8 on ours, normalised as *pixel_dtype* on others.

        *is_held* tells by content hash which pictures go without. Raises UnsupportedParameter where the model's family
        is not sent so.
        """
        held = frozenset(picture.content_hash for picture in self.pictures if is_held(picture.content_hash))
        pictures = self.pictures
        if pixel_dtype != "uint8":
            _refuse_videos(pictures)
            pictures = tuple(
                dataclasses.replace(picture, layout=layout.external(picture.layout, pixel_dtype))
                for picture in self.pictures
            )
        return PromptPictures(pictures, self.spans, held)

    def is_by_hash(self, index: int) -> bool:
        """Whether the picture of *index* is there and goes by its hash."""
        return 0 <= index < len(self.pictures) and self.pictures[index].content_hash in self.held

    def all_by_hash(self) -> "PromptPictures":
        """Return the same as if every picture went by its hash."""
        return dataclasses.replace(self, held=frozenset(picture.content_hash for picture in self.pictures))

    def by_hash(self) -> "PromptPictures":
        """Return the same with encoded bytes only of the pictures that go by their hash."""
        pictures = (
            picture if self.is_by_hash(index) else dataclasses.replace(picture, encoded=b"")
            for index, picture in enumerate(self.pictures)
        )
        return dataclasses.replace(self, pictures=tuple(pictures))

    def of(self, media: Sequence[int]) -> "PromptPictures":
        """Return the same with only the pictures of these indices, all with pixels."""
        return PromptPictures(tuple(self.pictures[i] for i in media), tuple(self.spans[i] for i in media))


@dataclass(frozen=True)
class PixelPreparer:
    """Has pictures decoded by *pool*, where *cache* does not hold their pixels already."""

    pool: DecodePool
    cache: ProcessorCache
    metrics: Metrics
    resend_seconds: float

    async def prepare(self, family: str, media: PromptPictures, salt: bytes, client: Hashable) -> tuple[MediaItem, ...]:
        """Return an item for each picture of *media*, with its pixels where a worker can read them.

        Videos are decoded in turns of *client*.

        A picture that is there twice is prepared once and lies in one slot. Each item with a slot holds one reference
        to it, until the item is sent or released; on failure and cancellation there are none. Raises RequestError,
        naming the field.
        """
        self.metrics.pictures_by_hash.inc(sum(picture.content_hash in media.held for picture in media.pictures))
        pixels: dict[bytes, PreparedPicture] = {}

        async def prepare(key: bytes, picture: Picture) -> None:
            pixels[key] = await self._pixels(family, picture, salt, client)

        with self.metrics.stage("media"):
            try:
                await all_or_none(prepare(key, picture) for key, picture in media.to_prepare().items())
            except BaseException:
                self.pool.release(done.slot.name for done in pixels.values() if done.slot is not None)
                raise
        return tuple(self._items(media, pixels))

    def release(self, items: Iterable[MediaItem]) -> None:
        """Give back the slots of items that will not be sent."""
        self.pool.release(item.slot.name for item in items if item.slot is not None)

    async def resend(self, family: str, media: PromptPictures, salt: bytes, client: Hashable) -> tuple[MediaItem, ...]:
        """Return what prepare() does, for a worker that waits for it.

        Raises WorkerUnavailable after *resend_seconds*.
        """
        self.metrics.pixels_wanted.inc(len(media.pictures))
        try:
            async with asyncio.timeout(self.resend_seconds):
                return await self.prepare(family, media, salt, client)
        except TimeoutError as error:
            raise WorkerUnavailable(
                "The worker no longer held a picture, and preparing it again took too long; send the request again."
            ) from error

    async def _pixels(self, family: str, picture: Picture, salt: bytes, client: Hashable) -> PreparedPicture:
        async def prepare() -> PreparedPicture:
            if picture.video is None:
                pixels = await self.pool.picture(picture.encoded, family, picture.settings, picture.layout)
            else:
                pixels = await self.pool.video(
                    picture.encoded, picture.video, family, picture.settings, picture.layout, client
                )
            self.metrics.observe_stage("queue", pixels.waited_seconds)
            for stage, seconds in msgspec.structs.asdict(pixels.seconds).items():
                self.metrics.observe_stage(stage, seconds)
            return pixels

        try:
            return await self.cache.get((salt, picture.content_hash, picture.layout.pixel_dtype), prepare)
        except RequestError as error:
            raise error.at(picture.field) from error

    def _items(self, media: PromptPictures, pixels: Mapping[bytes, PreparedPicture]) -> Iterable[MediaItem]:
        seen: set[bytes] = set()
        for picture, spans in zip(media.pictures, media.spans, strict=True):
            prepared = pixels.get(picture.content_hash)
            if prepared is not None and picture.content_hash in seen:
                self.pool.retain(prepared)
            seen.add(picture.content_hash)
            yield _item(picture, spans, prepared)


def _refuse_videos(pictures: Iterable[Picture]) -> None:
    for picture in pictures:
        if picture.video is not None:
            raise UnsupportedParameter("This model's workers take no videos; send pictures.", picture.field)


def _item(picture: Picture, spans: tuple[Span, ...], pixels: PreparedPicture | None) -> MediaItem:
    return MediaItem(
        modality="image" if picture.video is None else "video",
        content_hash=picture.content_hash,
        grid=picture.layout.grid,
        spans=spans,
        pixel_shape=picture.layout.pixel_shape,
        pixel_dtype=picture.layout.pixel_dtype,
        original_size=picture.layout.original_size,
        seconds_per_group=picture.layout.seconds_per_group,
        slot=pixels.slot if pixels else None,
        inline=pixels.inline if pixels else None,
    )


class PixelResend:
    """The encoded pictures that a request sent by their hash, while its worker may ask for their pixels.

    *memory* counts the encoded pictures, *admission* the pixels, until *held* ends. With *keeps_all* the others are
    counted too: the caller keeps them until the worker answers, for another worker.
    """

    def __init__(
        self,
        preparer: PixelPreparer,
        family: str,
        media: PromptPictures,
        salt: bytes,
        *,
        admission: Admission,
        held: contextlib.AsyncExitStack,
        memory: Reservation,
        keeps_all: bool = False,
    ) -> None:
        self._preparer = preparer
        self._family = family
        self._media: PromptPictures | None = media.by_hash()
        self._salt = salt
        self._admission = admission
        self._held = held
        self._memory = memory
        memory.keep((media if keeps_all else self._media).num_encoded_bytes)

    async def __call__(self, media: Sequence[int]) -> tuple[MediaPixels, ...]:
        """Return where the pixels of *media*, by index, are; each holds one reference to its slot.

        Raises WorkerUnavailable where they are not ready in time, and what preparing raises.
        """
        kept = self._media
        if kept is None or not all(kept.is_by_hash(index) for index in media):
            raise InternalError("The worker asked for pixels that it was not sent a picture for.")
        wanted = kept.of(media)
        await self._held.enter_async_context(self._admission.pixels(wanted.num_pixel_bytes))
        items = await self._preparer.resend(self._family, wanted, self._salt, self._memory.client)
        return tuple(MediaPixels(index, item.slot, item.inline) for index, item in zip(media, items, strict=True))

    def forget(self) -> None:
        """Let go of the pictures: the worker has begun to answer."""
        if self._media is not None:
            self._media = None
            self._memory.keep(0)
