"""From the sources of images to encoded images: decoded from data: URLs or fetched, then read and hashed.

Fetched images are kept for as long as their servers allow (RFC 9111, a private cache for each tenant).

Frames that a client has sampled from a video come as vLLM's `data:video/jpeg;base64,`, with commas between the images.
`media_io_kwargs.video` has their times: `fps` of the whole video, by default 1, `total_num_frames`, and the indices of
the frames in it, by default 0, 1, 2 and so on.
"""

import time
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import msgspec

from saccade.byte_lru import ByteLru
from saccade.errors import (
    ImageTooLarge,
    InvalidImageUrl,
    InvalidValue,
    InvalidVideo,
    RequestError,
    UnsupportedImageFormat,
    UnsupportedParameter,
    UnsupportedVideoFormat,
    VideoTooLarge,
)
from saccade.gateway.chat import Chat
from saccade.gateway.concurrency import SingleFlight, all_or_none
from saccade.gateway.image_source import ImageSource, is_file_id
from saccade.gateway.images.base64_text import decode_base64
from saccade.gateway.images.file_store import FileStore
from saccade.gateway.limits import Reservation, WorkThreads
from saccade.gateway.prompt.media_options import OF_ALL, OF_VIDEOS
from saccade.gateway.request import Request
from saccade.gateway.served_models.served_model import ServedModel, VideoSide
from saccade.identity.content import content_hash
from saccade.media.fetch import Fetcher
from saccade.media.freshness import Reuse
from saccade.media.header import SERVED_VIDEOS, ImageHeader, ImageLimits, other_format, read_header
from saccade.media.pdf_pages import PdfPage, read_image_header
from saccade.media.video_header import FRAMES_PREFIX, VideoLimits
from saccade.models.family import FrameTimes, ImageOptions, VideoOptions
from saccade.protocol.media import ImageLayout, VideoHeader
from saccade.telemetry import Metrics

ENTRY_BYTES = 2048
"""Memory of an entry besides its image and its URLs, at most; includes its validator."""

_CHARACTER_BYTES = 4
"""Bytes of a character in a text that is not ASCII, at most."""


@dataclass(frozen=True)
class CachedImage:
    """An encoded image; once it is no longer fresh, *reuse* revalidates it with its server."""

    encoded: bytes
    reuse: Reuse
    is_fresh: bool


@dataclass(frozen=True, slots=True)
class _Entry:
    """A cache entry; *fresh_until* in seconds of the cache's clock."""

    encoded: bytes
    reuse: Reuse
    fresh_until: float


class UrlCache:
    """Encoded images by (salt, URL): an LRU cache of *capacity_bytes*; 0 turns it off.

    *clock* returns seconds. *num_hits* counts fresh images; stale ones that need revalidation count as *num_misses*.
    """

    def __init__(self, capacity_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_hits = 0
        self.num_misses = 0
        self._clock = clock
        self._entries = ByteLru[tuple[bytes, str], _Entry](capacity_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries."""
        return self._entries.num_bytes

    def get(self, salt: bytes, url: str) -> CachedImage | None:
        """Return the cached image of *url* for the tenant of *salt*."""
        entry = self._entries.get((salt, url))
        is_fresh = entry is not None and self._clock() < entry.fresh_until
        self.num_hits += is_fresh
        self.num_misses += not is_fresh
        if entry is None:
            return None
        return CachedImage(entry.encoded, entry.reuse, is_fresh)

    def put(self, salt: bytes, url: str, encoded: bytes, reuse: Reuse) -> None:
        """Replace the entry of *url* by *encoded*, which has just arrived, or drop it if *reuse* forbids storing."""
        key = (salt, url)
        self._entries.pop(key)
        is_elsewhere = reuse.url != url
        num_bytes = len(encoded) + _num_bytes(url) + is_elsewhere * _num_bytes(reuse.url) + ENTRY_BYTES
        if not reuse.is_storable or num_bytes > self._entries.budget_bytes:
            return
        entry_reuse = reuse if is_elsewhere else replace(reuse, url=url)  # only one copy of the URL is counted
        self._entries.put(key, _Entry(encoded, entry_reuse, self._clock() + reuse.fresh_seconds), num_bytes)

    def clear(self) -> None:
        """Drop all entries."""
        self._entries.clear()


def _num_bytes(text: str) -> int:
    return len(text) * (1 if text.isascii() else _CHARACTER_BYTES)


class MediaLoader:
    """Fetches images; simultaneous requests of one tenant for the same URL share one fetch."""

    def __init__(self, fetcher: Fetcher, url_cache: UrlCache, metrics: Metrics) -> None:
        self._fetcher = fetcher
        self._cache = url_cache
        self._metrics = metrics
        self._flights = SingleFlight[tuple[bytes, str], bytes]()

    async def fetch(self, request: Request, url: str, salt: bytes) -> bytes:
        """Return the encoded image at *url*, for the tenant of *salt*; *request* counts it.

        Raises InvalidImageUrl, ImageTooLarge and QueueFull.
        """
        encoded = await self._flights.join((salt, url), lambda: self._fetch(salt, url, request.reservation()))
        request.memory.take(len(encoded))
        return encoded

    async def _fetch(self, salt: bytes, url: str, reservation: Reservation) -> bytes:
        cached = self._cache.get(salt, url)
        if cached is not None and cached.is_fresh:
            return cached.encoded
        # A shared fetch has its own reservation: the request that started it may end before the others.
        with self._metrics.stage("fetch"), reservation as memory:
            reuse = cached.reuse if cached is not None else None
            fetched = await self._fetcher.fetch(url, reuse, client=memory.client, hold=memory.grow)
        encoded = cached.encoded if cached is not None and fetched.not_modified else fetched.encoded
        self._cache.put(salt, url, encoded, fetched.reuse)
        return encoded


def is_data_url(url: str) -> bool:
    """Whether *url* contains the image itself."""
    return url[:5].lower() == "data:"


def decode_data_url(url: str) -> bytes:
    """Return the bytes of a data: URL. Raises InvalidImageUrl and InvalidBase64."""
    head, comma, payload = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidImageUrl(
            "A data: URL must be `data:image/png;base64,`, or another media type, followed by the file in base64."
        )
    return decode_base64(payload)


MAX_FRAMES = 768
DEFAULT_FPS = 1.0


def is_frames_url(url: str) -> bool:
    """Whether *url* has frames in place of a video."""
    return url[: len(FRAMES_PREFIX)].lower() == FRAMES_PREFIX


def read_frames(url: str, options: VideoOptions, limits: ImageLimits) -> tuple[bytes, VideoHeader]:
    """Return the frames in *url* and their header, in the form of the decode processes, and the header.

    Raises InvalidBase64, InvalidVideo, VideoTooLarge, InvalidValue and the errors of images.
    """
    payload = url[len(FRAMES_PREFIX) :]
    _check_number(payload.count(",") + 1, options)
    return join_frames([decode_base64(frame) for frame in payload.split(",")], options, limits)


def _check_number(num_frames: int, options: ImageOptions | VideoOptions) -> None:
    """Raise VideoTooLarge for more frames than *options* or this server allow."""
    stated = (options.num_frames, options.max_frames) if isinstance(options, VideoOptions) else ()
    most = min((MAX_FRAMES, *(number for number in stated if number is not None)))
    if num_frames > most:
        raise VideoTooLarge(f"The video has more than {most} frames; send fewer.")


def join_frames(
    frames: Sequence[bytes], options: VideoOptions, limits: ImageLimits, field: str = ""
) -> tuple[bytes, VideoHeader]:
    """Return *frames*, encoded images from the list *field*, as read_frames() does."""
    sizes = set()
    for position, frame in enumerate(frames):
        try:
            image = _read_frame_header(frame)
            limits.check(image, len(frame))
        except RequestError as error:
            raise error.at(f"{field}[{position}]") if field else error from error
        sizes.add(image.upright)
    if len(sizes) > 1:
        raise InvalidVideo("The video's frames have several sizes, which is not supported.")
    ((width, height),) = sizes
    VideoLimits().check_size(width, height)
    indices = _indices(options.times, len(frames))
    num_frames = options.times.num_frames or indices[-1] + 1
    header = VideoHeader(num_frames, options.times.fps or DEFAULT_FPS, width, height, indices)
    return msgspec.msgpack.encode((header, frames)), header


def _read_frame_header(frame: bytes) -> ImageHeader:
    try:
        return read_header(frame)
    except UnsupportedImageFormat:
        name = other_format(frame)
        if name not in SERVED_VIDEOS:
            raise
        media_type = SERVED_VIDEOS[name]
        raise UnsupportedVideoFormat(
            f"The bytes are {name}, not a frame: send it as {media_type}, in `data:{media_type};base64,`. "
            f"`{FRAMES_PREFIX}` takes images, with commas between them."
        ) from None


def _indices(times: FrameTimes, num_frames: int) -> tuple[int, ...]:
    indices, field = times.indices or tuple(range(num_frames)), f"{OF_VIDEOS}.frames_indices"
    if len(indices) != num_frames:
        raise InvalidValue(f"`{field}` has {len(indices)} numbers for {num_frames} frames; send one for each.", field)
    if any(first >= second for first, second in pairwise(indices)):
        raise InvalidValue(f"`{field}` must ascend.", field)
    if times.num_frames is not None and indices[-1] >= times.num_frames:
        field = f"{OF_VIDEOS}.total_num_frames"
        raise InvalidValue(f"`{field}` must be over {indices[-1]}, the last frame's index.", field)
    return indices


T = TypeVar("T")
THREAD_FROM_BYTES = 1 << 20
"""A longer image is read in a thread; a shorter one takes less time than the switch to a thread."""


@dataclass(frozen=True)
class EncodedImage:
    """An encoded image or video of a request; *video* is the header of a video.

    *field* is its place in the request, such as `messages[0].content[1].image_url.url`, and *limits* are the places of
    limits of this one alone. *num_pixels* is of one frame. The images of a PDF share its bytes; each is one *page*.
    """

    field: str
    encoded: bytes
    num_pixels: int
    content_hash: bytes
    layout: ImageLayout
    settings: Mapping[str, Any]
    video: VideoHeader | None = None
    page: PdfPage | None = None
    limits: tuple[str, ...] = ()


@dataclass(frozen=True)
class ImageCollector:
    """Collects the images of a request: each within *limits*, together within *max_encoded_bytes*.

    *video_header* and *pdf_pages* read a video's header and a PDF's pages for a client, in another process.
    *pdf_decoder* names what draws the pages, its fonts included.
    """

    loader: MediaLoader
    files: FileStore
    video_header: Callable[[bytes, Hashable], Awaitable[VideoHeader]]
    pdf_pages: Callable[[bytes, Hashable], Awaitable[list[PdfPage]]]
    pdf_decoder: str
    limits: ImageLimits
    max_encoded_bytes: int
    metrics: Metrics
    threads: WorkThreads

    async def collect(
        self, request: Request, served: ServedModel, sources: list[ImageSource], salt: bytes
    ) -> list[EncodedImage]:
        """Return the images of *sources*, whose bytes *request* counts; a repeated URL is fetched once.

        A PDF becomes several, one for each page. *salt* separates the caches of tenants. Empties *sources*, so that a
        decoded data: URL is freed. If one image fails, the others are cancelled. Raises RequestError, naming the field.
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
        if isinstance(opened, list):
            return opened
        pages = await self.pdf_pages(opened, request.client)
        return await self._run(len(opened), partial(self._pages, served, options, source.field, opened, pages))

    async def _read(self, request: Request, source: ImageSource, salt: bytes, then: Callable[[bytes], T]) -> T:
        """Return what *then* returns of the file of *source*. A data: URL is decoded in the same turn."""
        url, content = source.url, source.content
        if content is None and is_data_url(url):
            return await self._run(len(url), lambda: then(decode_data_url(url)))
        if content is None and is_file_id(url):
            content = self.files.get(request.tenant.id, url, source.field).content
            request.memory.take(len(content))
        elif content is None:
            content = await self.loader.fetch(request, url, salt)
        return await self._run(len(content), partial(then, content))

    async def _read_frames(self, request: Request, source: ImageSource, salt: bytes) -> list[bytes]:
        """Return the files of the frames of *source*, which are read or fetched as images are."""
        _check_number(len(source.frames), source.options)
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
        return await self.threads.run(num_bytes > THREAD_FROM_BYTES, num_bytes, work)

    def _image(
        self, served: ServedModel, options: ImageOptions, source: ImageSource, content: bytes
    ) -> list[EncodedImage] | bytes:
        """Return the image in *content*; a PDF is returned as it is."""
        header = read_image_header(content, source.url)
        if header is None:
            return content
        self.limits.check(header, len(content))
        settings = served.layout.settings_for(options)
        layout = served.layout.image(*header.upright, settings)
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
            layout = served.layout.image(page.width, page.height, settings)
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
        """Raise ImageTooLarge if the *images* of one request so far are too large together."""
        for number, limit, unit in (
            (num_encoded_bytes(images), self.max_encoded_bytes, "bytes"),
            (sum(image.num_pixels for image in images), self.limits.max_request_pixels, "pixels"),
        ):
            if number > limit:
                raise ImageTooLarge(
                    f"The images and videos have more than {limit} {unit} together; send fewer or smaller.",
                    "messages",
                )


def _of_part(error: RequestError, source: ImageSource) -> RequestError:
    """Return *error*, about limits that the request has for all its images, as one about those of *source* alone."""
    kind, _, name = (error.param or "").partition(".")
    if kind != OF_ALL or not source.limits:
        return error
    field = next((place for place in source.limits if place.endswith(f".{name}")), source.limits[0])
    return type(error)(error.message, field)


def num_encoded_bytes(images: Sequence[EncodedImage]) -> int:
    """Return the bytes of the files of *images*; what several share, such as the pages of a PDF, counts once."""
    return sum({id(image.encoded): len(image.encoded) for image in images}.values())


def with_pages(chat: Chat, images: Sequence[EncodedImage]) -> Chat:
    """Return *chat* with an image for each of *images*, those of PDFs included."""
    if all(image.page is None for image in images):
        return chat
    numbers = [0 if image.page is None else image.page.number for image in images]
    firsts = [position for position, number in enumerate(numbers) if number == 0]
    return chat.with_pages([stop - first for first, stop in pairwise([*firsts, len(images)])])
