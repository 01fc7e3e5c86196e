"""Collects encoded images from their sources: decodes data: URLs or fetches files, then reads and hashes them."""

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from saccade.concurrency import all_or_none
from saccade.errors import (
    ImageTooLarge,
    InvalidValue,
    RequestError,
    TooManyImages,
    UnsupportedParameter,
)
from saccade.gateway.image_source import ImageSource, is_file_id
from saccade.gateway.images.encoded_image import EncodedImage, num_encoded_bytes
from saccade.gateway.images.file_store import FileStore
from saccade.gateway.images.frames_url import check_frame_count, is_frames_url, join_frames, read_frames
from saccade.gateway.images.media_loader import MediaLoader, decode_data_url, is_data_url
from saccade.gateway.prompt.media_options import OF_ALL, OF_VIDEOS
from saccade.gateway.request import Request
from saccade.gateway.served_models.served_model import ServedModel, VideoSide
from saccade.gateway.work_threads import WorkThreads
from saccade.identity.content import content_hash
from saccade.media.header import ImageLimits
from saccade.media.pdf_pages import PdfPage, read_image_header
from saccade.media.video_header import FRAMES_PREFIX
from saccade.models.family import ImageOptions, VideoOptions
from saccade.protocol.media import ImageLayout, VideoHeader
from saccade.telemetry import Metrics

T = TypeVar("T")

THREAD_FROM_BYTES = 1 << 20
"""A longer image is read in a thread; a shorter one takes less time than the switch to a thread."""


@dataclass(frozen=True)
class ImageCollector:
    """Collects a request's images: each within *limits*, all together within *max_encoded_bytes*.

    *video_header* and *pdf_pages* read a video's header and a PDF's pages for a client, in another process. *layout*
    computes an image's layout there, for a library's family.
    *pdf_decoder* identifies the PDF renderer, including its fonts.
    """

    loader: MediaLoader
    files: FileStore
    video_header: Callable[[bytes, Hashable], Awaitable[VideoHeader]]
    pdf_pages: Callable[[bytes, Hashable], Awaitable[list[PdfPage]]]
    layout: Callable[[str, Mapping[str, Any], int, int, Hashable], Awaitable[ImageLayout]]
    pdf_decoder: str
    limits: ImageLimits
    max_encoded_bytes: int
    metrics: Metrics
    threads: WorkThreads

    async def collect_images(
        self, request: Request, served: ServedModel, sources: list[ImageSource], salt: bytes
    ) -> list[EncodedImage]:
        """Return the images of *sources*, and count their bytes in *request*. A repeated URL is fetched once.

        A PDF becomes one image for each page. *salt* separates the tenants' caches. *sources* ends up empty, so that
        data: URLs are freed once they are decoded. If one image fails, the others are cancelled. Raises a RequestError
        that names the field.
        """
        pending = list(sources)
        sources.clear()
        images: dict[int, list[EncodedImage]] = {}

        async def read(position: int) -> None:
            source = pending[position]
            try:
                opened = await self._open(request, served, source, salt)
                if source.limits:
                    opened = [replace(image, limits=source.limits) for image in opened]
                images[position] = opened
            except RequestError as error:
                raise _of_part(error, source).at(source.field) from error
            pending[position] = replace(source, url="", content=None, frames=())
            self._check_together([image for several in images.values() for image in several])

        await all_or_none(read(position) for position in range(len(pending)))
        collected = [image for position in range(len(pending)) for image in images[position]]
        request.memory.keep(num_encoded_bytes(collected))
        return collected

    async def _open(
        self, request: Request, served: ServedModel, source: ImageSource, salt: bytes
    ) -> list[EncodedImage]:
        options, videos = source.options, served.videos
        if isinstance(options, VideoOptions):
            if videos is None:
                raise UnsupportedParameter("This model takes no videos here.")
            settings = videos.layout.settings_for(options)
            if source.frames:
                frames = await self._read_frames(request, source, salt)
                work = partial(self._frames, served, videos, settings, source, options, frames)
                return await self._run(sum(map(len, frames)), work)
            if is_frames_url(source.url):
                return await self._run(
                    len(source.url), partial(self._frames, served, videos, settings, source, options)
                )
            if options.times.indices or options.times.num_frames is not None:
                raise InvalidValue(
                    f"`{OF_VIDEOS}`: only sampled frames, `{FRAMES_PREFIX}`, have indices and a total.", OF_VIDEOS
                )
            content = await self._read(request, source, salt, bytes)
            header = await self.video_header(content, request.client)
            work = partial(self._video, served, videos, settings, source.field, content, header)
            return await self._run(len(content), work)
        opened = await self._read(request, source, salt, partial(self._image, served, options, source))
        if not isinstance(opened, list):
            pages = await self.pdf_pages(opened, request.client)
            work = partial(self._pages, served, options, source.field, opened, pages)
            opened = await self._run(len(opened), work)
        if served.declaration.library is None:
            return opened
        return [replace(image, layout=await self._processors_layout(request, served, image)) for image in opened]

    async def _processors_layout(self, request: Request, served: ServedModel, image: EncodedImage) -> ImageLayout:
        sizes = image.layout.resized_width, image.layout.resized_height
        return await self.layout(served.family, image.settings, *sizes, request.client)

    async def _read(self, request: Request, source: ImageSource, salt: bytes, then: Callable[[bytes], T]) -> T:
        """Return what *then* returns for the file of *source*. A data: URL is decoded in the same turn as *then*."""
        url, content = source.url, source.content
        if content is None and is_data_url(url):
            return await self._run(len(url), lambda: then(decode_data_url(url)))
        if content is None and is_file_id(url):
            content = (await self.files.get(request.tenant.id, url, source.field)).content
            request.memory.take_bytes(len(content))
        elif content is None:
            content = await self.loader.fetch(request, url, salt)
        return await self._run(len(content), partial(then, content))

    async def _read_frames(self, request: Request, source: ImageSource, salt: bytes) -> list[bytes]:
        """Return the encoded frames of *source*, which are read or fetched like images."""
        check_frame_count(len(source.frames), source.options)
        files: dict[int, bytes] = {}

        async def read(position: int, url: str) -> None:
            one = ImageSource(f"{source.field}[{position}]", url, source.options)
            try:
                files[position] = await self._read(request, one, salt, bytes)
            except RequestError as error:
                raise error.at(one.field) from error

        await all_or_none(read(position, url) for position, url in enumerate(source.frames))
        return [files[position] for position in range(len(files))]

    async def _run(self, num_bytes: int, work: Callable[[], T]) -> T:
        return await self.threads.run_work(num_bytes > THREAD_FROM_BYTES, num_bytes, work)

    def _image(
        self, served: ServedModel, options: ImageOptions, source: ImageSource, content: bytes
    ) -> list[EncodedImage] | bytes:
        """Return the image in *content*, or *content* itself if it is a PDF."""
        header = read_image_header(content, source.url)
        if header is None:
            return content
        self.limits.check_header(header, len(content))
        settings = served.layout.settings_for(options)
        layout = _layout(served, *header.upright, settings)
        with self.metrics.stage("hash"):
            known_as = content_hash(content, served.fingerprint(settings))
        return [EncodedImage(source.field, content, header.width * header.height, known_as, layout, settings)]

    def _pages(
        self, served: ServedModel, options: ImageOptions, field: str, content: bytes, pages: list[PdfPage]
    ) -> list[EncodedImage]:
        settings = served.layout.settings_for(options)
        with self.metrics.stage("hash"):
            file_hash = content_hash(content, served.fingerprint({**settings, "pdf": self.pdf_decoder}))
        images = []
        for page in pages:
            layout = _layout(served, page.width, page.height, settings)
            known_as = content_hash(file_hash, msgspec.json.encode(page))
            num_pixels = page.width * page.height
            images.append(EncodedImage(field, content, num_pixels, known_as, layout, settings, page=page))
        return images

    def _frames(
        self,
        served: ServedModel,
        videos: VideoSide,
        settings: Mapping[str, Any],
        source: ImageSource,
        options: VideoOptions,
        frames: Sequence[bytes] = (),
    ) -> list[EncodedImage]:
        if frames:
            content, header = join_frames(frames, options, self.limits, source.field)
        else:
            content, header = read_frames(source.url, options, self.limits)
        return self._video(served, videos, settings, source.field, content, header)

    def _video(
        self,
        served: ServedModel,
        videos: VideoSide,
        settings: Mapping[str, Any],
        field: str,
        content: bytes,
        header: VideoHeader,
    ) -> list[EncodedImage]:
        layout = videos.layout.video(header, settings)
        with self.metrics.stage("hash"):
            fingerprint = served.fingerprint if header.indices else served.video_fingerprint
            known_as = content_hash(content, fingerprint(settings))
        return [EncodedImage(field, content, header.width * header.height, known_as, layout, settings, header)]

    def _check_together(self, images: Sequence[EncodedImage]) -> None:
        """Raise ImageTooLarge or TooManyImages if a request's *images* so far exceed a limit together."""
        if len(images) > 1 and any(image.layout.stands_alone for image in images):
            raise TooManyImages(
                "This model takes one image a request: its processor changes an image if there are others.",
                "messages",
            )
        for number, limit, unit in (
            (num_encoded_bytes(images), self.max_encoded_bytes, "bytes"),
            (sum(image.num_pixels for image in images), self.limits.max_request_pixels, "pixels"),
        ):
            if number > limit:
                raise ImageTooLarge(
                    f"The images and videos have more than {limit} {unit} together; send fewer or smaller.",
                    "messages",
                )


def _layout(served: ServedModel, width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
    """Return an image's layout. If the processor computes it in another process, return the image's size only."""
    if served.declaration.library is not None:
        return ImageLayout(resized_height=height, resized_width=width, grid=(1, 0, 0), num_tokens=0, pixel_shape=(0,))
    return served.layout.image(width, height, settings)


def _of_part(error: RequestError, source: ImageSource) -> RequestError:
    """Return *error*. If it names a limit for all images but *source* has its own limits, name one of those instead."""
    kind, _, name = (error.param or "").partition(".")
    if kind != OF_ALL or not source.limits:
        return error
    field = next((place for place in source.limits if place.endswith(f".{name}")), source.limits[0])
    return type(error)(error.message, field)
