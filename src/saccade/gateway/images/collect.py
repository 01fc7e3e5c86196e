"""From the sources of images to encoded images: decoded from data: URLs or fetched, then read and hashed."""

import dataclasses
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from saccade.errors import ImageTooLarge, RequestError, UnsupportedParameter
from saccade.gateway.chat import ImageSource, is_file_id
from saccade.gateway.concurrency import all_or_none
from saccade.gateway.images.file_store import FileStore
from saccade.gateway.images.media_loader import MediaLoader, decode_data_url, is_data_url
from saccade.gateway.limits import WorkThreads
from saccade.gateway.request import Request
from saccade.gateway.served_models.served_model import ServedModel
from saccade.identity.content import content_hash
from saccade.media.header import ImageLimits, read_header
from saccade.models.family import VideoOptions
from saccade.protocol.media import ImageLayout, VideoHeader
from saccade.telemetry import Metrics

THREAD_FROM_BYTES = 1 << 20
"""A longer image is read in a thread; a shorter one takes less time than the switch to a thread."""


@dataclass(frozen=True)
class EncodedImage:
    """An encoded image or video of a request; *video* is the header of a video.

    *field* is its place in the request, such as `messages[0].content[1].image_url.url`. *num_pixels* is of one frame.
    """

    field: str
    encoded: bytes
    num_pixels: int
    content_hash: bytes
    layout: ImageLayout
    settings: Mapping[str, Any]
    video: VideoHeader | None = None


@dataclass(frozen=True)
class ImageCollector:
    """Collects the images of a request: each within *limits*, together within *max_encoded_bytes*.

    *video_header* reads a video's header for a client, in another process.
    """

    loader: MediaLoader
    files: FileStore
    video_header: Callable[[bytes, Hashable], Awaitable[VideoHeader]]
    limits: ImageLimits
    max_encoded_bytes: int
    metrics: Metrics
    threads: WorkThreads

    async def collect(
        self, request: Request, served: ServedModel, sources: list[ImageSource], salt: bytes
    ) -> list[EncodedImage]:
        """Return the images of *sources*, whose bytes *request* counts; a repeated URL is fetched once.

        *salt* separates the caches of tenants. Empties *sources*, so that a decoded data: URL is freed. If
        one image fails, the others are cancelled. Raises RequestError, naming the field.
        """
        pending = list(sources)
        sources.clear()
        images: dict[int, EncodedImage] = {}

        async def read(position: int) -> None:
            source = pending[position]
            try:
                images[position] = await self._open(request, served, source, salt)
            except RequestError as error:
                raise error.at(source.field) from error
            pending[position] = dataclasses.replace(source, url="", content=None)
            self._check_together(images.values())

        await all_or_none(read(position) for position in range(len(pending)))
        request.memory.keep(sum(len(image.encoded) for image in images.values()))
        return [images[position] for position in range(len(pending))]

    async def _open(self, request: Request, served: ServedModel, source: ImageSource, salt: bytes) -> EncodedImage:
        if isinstance(source.options, VideoOptions):
            return await self._open_video(request, served, source, source.options, salt)
        options = source.options

        def read(content: bytes) -> EncodedImage:
            header = read_header(content)
            self.limits.check(header, len(content))
            settings = served.layout.settings_for(options)
            layout = served.layout.image(*header.upright, settings)
            with self.metrics.stage("hash"):
                known_as = content_hash(content, served.fingerprint(settings))
            return EncodedImage(source.field, content, header.width * header.height, known_as, layout, settings)

        if is_data_url(source.url):
            num_bytes = len(source.url)
            is_long = num_bytes > THREAD_FROM_BYTES
            return await self.threads.run(is_long, num_bytes, lambda: read(decode_data_url(source.url)))
        if source.content is not None:
            content = source.content
        elif is_file_id(source.url):
            content = self.files.get(request.tenant.id, source.url, source.field).content
            request.memory.take(len(content))
        else:
            content = await self.loader.fetch(request, source.url, salt)
        return await self.threads.run(len(content) > THREAD_FROM_BYTES, len(content), partial(read, content))

    async def _open_video(
        self, request: Request, served: ServedModel, source: ImageSource, options: VideoOptions, salt: bytes
    ) -> EncodedImage:
        if served.videos is None:
            raise UnsupportedParameter("This model takes no videos here.")
        videos = served.videos
        settings = videos.layout.settings_for(options)
        if source.content is not None:
            content = source.content
        elif is_data_url(source.url):
            num_bytes = len(source.url)
            content = await self.threads.run(
                num_bytes > THREAD_FROM_BYTES, num_bytes, lambda: decode_data_url(source.url)
            )
        else:
            content = await self.loader.fetch(request, source.url, salt)
        header = await self.video_header(content, request.client)

        def read() -> EncodedImage:
            layout = videos.layout.video(header, settings)
            with self.metrics.stage("hash"):
                known_as = content_hash(content, served.video_fingerprint(settings))
            return EncodedImage(source.field, content, header.width * header.height, known_as, layout, settings, header)

        return await self.threads.run(len(content) > THREAD_FROM_BYTES, len(content), read)

    def _check_together(self, images: Iterable[EncodedImage]) -> None:
        """Raise ImageTooLarge if the *images* of one request so far are too large together."""
        num_bytes = num_pixels = 0
        for image in images:
            num_bytes += len(image.encoded)
            num_pixels += image.num_pixels
        for number, limit, unit in (
            (num_bytes, self.max_encoded_bytes, "bytes"),
            (num_pixels, self.limits.max_request_pixels, "pixels"),
        ):
            if number > limit:
                raise ImageTooLarge(
                    f"The images and videos have more than {limit} {unit} together; send fewer or smaller.",
                    "messages",
                )
