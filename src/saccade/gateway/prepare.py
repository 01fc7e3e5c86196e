"""Messages to Prompt: template, media, placeholders. Counts tokens from header dimensions.

read     request -> chat, with the pictures that it names
collect  chat -> its pictures: encoded bytes from the request itself or fetched, all at once; headers, content hashes
draft    chat and pictures -> token ids and spans; no pixel is touched, so a refusal costs little
on_wire  draft -> the same with pixels in the form that the chosen worker takes, and none of pictures that it holds
prompt   draft -> the same with the pixels' whereabouts, prepared by decode processes all at once
bring    draft of pictures that the worker lacks after all -> prompt of these
"""

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec

from saccade.errors import (
    ImageTooLarge,
    InvalidValue,
    RequestError,
    TooManyImages,
    WorkerUnavailable,
)
from saccade.gateway.admission import Admission
from saccade.gateway.all_or_none import all_or_none
from saccade.gateway.byte_budget import Reservation
from saccade.gateway.media_pool import MediaPool, PreparedPicture
from saccade.gateway.messages import Chat, PictureSource
from saccade.gateway.openai_requests import ChatMessage, ChatRequest, TokenizeRequest
from saccade.gateway.picture_cache import PictureCache
from saccade.gateway.prompt_bounds import check_context, read_chat_that_may_fit
from saccade.gateway.served_model import ServedModel
from saccade.gateway.sources import Sources, decode_data_url, is_data_url
from saccade.identity.content import content_hash
from saccade.media.header import PictureLimits, read_header
from saccade.protocol.media import MediaItem, PictureLayout, Span
from saccade.telemetry import Metrics
from saccade.tokenization.chat_template import Message

THREAD_FROM_BYTES = 1 << 20
"""Longer input is worked on in a thread; shorter takes less time than a thread would hold it up."""

THREAD_FROM_CHARACTERS = 16 * 1024
"""The same for text, which takes longer to tokenise than bytes to hash."""

PART_CHARACTERS = 32
"""A message, or a part of one, takes at least as long as so many characters, however few it holds."""

T = TypeVar("T")


@dataclass(frozen=True)
class Picture:
    """An encoded picture of a request; *field* names where it was, as `messages[0].content[1].image_url.url`."""

    field: str
    encoded: bytes
    num_pixels: int
    content_hash: bytes
    layout: PictureLayout
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Draft:
    """A prompt whose pixels are still to come: pictures[i] fills spans[i].

    Pictures with a content hash in *held* go without pixels, because the worker is believed to hold them.
    """

    token_ids: list[int]
    pictures: tuple[Picture, ...] = ()
    spans: tuple[Span, ...] = ()
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

    def is_by_hash(self, index: int) -> bool:
        """Whether the picture of *index* is there and goes by its hash."""
        return 0 <= index < len(self.pictures) and self.pictures[index].content_hash in self.held

    def by_hash(self) -> "Draft":
        """Return the same with encoded bytes only of the pictures that go by their hash."""
        pictures = (
            picture if self.is_by_hash(index) else dataclasses.replace(picture, encoded=b"")
            for index, picture in enumerate(self.pictures)
        )
        return dataclasses.replace(self, pictures=tuple(pictures))

    def of(self, media: Sequence[int]) -> "Draft":
        """Return the same with only the pictures of these indices, all with pixels."""
        pictures, spans = tuple(self.pictures[i] for i in media), tuple(self.spans[i] for i in media)
        return Draft(self.token_ids, pictures, spans)


@dataclass(frozen=True)
class Prompt:
    """Token ids and media, ready for a worker."""

    token_ids: list[int]
    media: tuple[MediaItem, ...] = ()


@dataclass(frozen=True)
class RequestLimits:
    """What one request may cost: its pictures, each of them, and seconds to bring pixels that a worker lacks."""

    picture: PictureLimits
    num_images: int
    max_encoded_bytes: int
    bring_seconds: float


@dataclass(frozen=True)
class Preparer:
    """Prepares requests of one gateway. *threads* work on what would hold up the event loop."""

    admission: Admission
    pool: MediaPool
    cache: PictureCache
    sources: Sources
    metrics: Metrics
    limits: RequestLimits
    threads: Executor

    def read(self, served: ServedModel, request: ChatRequest | TokenizeRequest) -> Chat:
        """Return the chat in *request*. Raises RequestError, naming the field."""
        chat = read_chat_that_may_fit(request, served)
        if len(chat.pictures) > self.limits.num_images:
            raise TooManyImages(
                f"The messages hold {len(chat.pictures)} images; at most {self.limits.num_images} are served per "
                "request.",
                "messages",
            )
        return chat

    async def read_long(self, served: ServedModel, request: ChatRequest | TokenizeRequest) -> Chat:
        """Do what read() does in a thread, for a request that `is_long`."""
        return await self._work(True, 0, lambda: self.read(served, request))

    async def collect(self, served: ServedModel, chat: Chat, salt: bytes, memory: Reservation) -> tuple[Picture, ...]:
        """Return the pictures of *chat*, whose bytes *memory* counts; a URL that is there twice is fetched once.

        Takes the pictures out of *chat*, so that each data: URL goes when it is decoded. Where one fails, the others
        are given up. Raises RequestError, naming the field.
        """
        sources = list(chat.pictures)
        chat.pictures.clear()
        found: dict[int, Picture] = {}

        async def read(position: int) -> None:
            source = sources[position]
            try:
                found[position] = await self._open(served, source, salt, memory)
            except RequestError as error:
                raise _at(error, source.field) from error
            sources[position] = dataclasses.replace(source, url="")
            self._check_together(found.values())

        await all_or_none(read(position) for position in range(len(sources)))
        memory.keep(sum(len(picture.encoded) for picture in found.values()))
        return tuple(found[position] for position in range(len(sources)))

    async def draft(
        self,
        served: ServedModel,
        request: ChatRequest | TokenizeRequest,
        chat: Chat,
        pictures: tuple[Picture, ...],
    ) -> Draft:
        """Return the token ids of *chat* with the spans of its *pictures*. Raises RequestError, naming the field."""
        is_long = sum(map(_num_text_characters, chat.messages)) > THREAD_FROM_CHARACTERS
        num_bytes = sum(len(picture.encoded) for picture in pictures)
        with self.metrics.stage("tokenize"):
            token_ids = await self._encode(
                is_long,
                num_bytes,
                lambda: served.tokenizer.encode(
                    served.template.render(chat.messages, chat.add_generation_prompt, chat.switches)
                ),
                "messages",
            )
        counts = [picture.layout.num_tokens for picture in pictures]
        expanded, spans = expand(token_ids, served.placeholder_token_id, counts)
        check_context(len(expanded), request, served)
        return Draft(expanded, pictures, spans)

    async def token_ids(self, served: ServedModel, text: str) -> list[int]:
        """Return the token ids of plain *text*. Raises InvalidValue."""
        is_long = len(text) > THREAD_FROM_CHARACTERS
        return await self._encode(is_long, len(text), lambda: served.tokenizer.encode_text(text), "prompt")

    async def text_of(self, served: ServedModel, token_ids: Sequence[int]) -> str:
        """Return the text of *token_ids*, special tokens as they are written."""
        is_long = len(token_ids) > THREAD_FROM_CHARACTERS
        return await self._work(is_long, len(token_ids), lambda: served.tokenizer.decode(token_ids))

    async def prompt(self, served: ServedModel, draft: Draft, salt: bytes) -> Prompt:
        """Return *draft* with its pixels where a worker can read them.

        A picture that is there twice is prepared once and lies in one slot. Whoever gets the prompt owns a use of a
        slot for each of its media that has one, until it is sent or given back; on failure and cancellation there are
        none.
        """
        self.metrics.pictures_by_hash.inc(sum(picture.content_hash in draft.held for picture in draft.pictures))
        pixels: dict[bytes, PreparedPicture] = {}

        async def prepare(key: bytes, picture: Picture) -> None:
            pixels[key] = await self._pixels(served, picture, salt)

        with self.metrics.stage("media"):
            try:
                await all_or_none(prepare(key, picture) for key, picture in draft.to_prepare().items())
            except BaseException:
                self.pool.release(done.slot.name for done in pixels.values() if done.slot is not None)
                raise
        return Prompt(draft.token_ids, tuple(self._media(draft, pixels)))

    def give_back(self, prompt: Prompt) -> None:
        """Give back the slots of a prompt that will not be sent."""
        self.pool.release(item.slot.name for item in prompt.media if item.slot is not None)

    async def bring(self, served: ServedModel, draft: Draft, salt: bytes) -> Prompt:
        """Return what prompt() does, for a worker that waits for it. Raises WorkerUnavailable after its deadline."""
        self.metrics.pixels_wanted.inc(len(draft.pictures))
        try:
            async with asyncio.timeout(self.limits.bring_seconds):
                return await self.prompt(served, draft, salt)
        except TimeoutError as error:
            raise WorkerUnavailable(
                "The worker no longer held a picture, and preparing it again took too long; send the request again."
            ) from error

    async def _open(self, served: ServedModel, source: PictureSource, salt: bytes, memory: Reservation) -> Picture:
        """Return the picture of *source*; a refusal of it need not wait for other pictures."""

        def read(content: bytes) -> Picture:
            header = read_header(content)
            self.limits.picture.check(header, len(content))
            settings = served.layout.settings_for(source.options)
            layout = served.layout.picture(*header.upright, settings)
            with self.metrics.stage("hash"):
                known_as = content_hash(content, served.fingerprint(settings))
            return Picture(source.field, content, header.width * header.height, known_as, layout, settings)

        if is_data_url(source.url):
            num_bytes = len(source.url)
            return await self._work(num_bytes > THREAD_FROM_BYTES, num_bytes, lambda: read(decode_data_url(source.url)))
        content = await self.sources.fetch(source.url, salt, memory)
        return await self._work(len(content) > THREAD_FROM_BYTES, len(content), partial(read, content))

    def _check_together(self, found: Iterable[Picture]) -> None:
        """Raise ImageTooLarge where the pictures of one request are too much, of those that are there by now."""
        num_bytes = num_pixels = 0
        for picture in found:
            num_bytes += len(picture.encoded)
            num_pixels += picture.num_pixels
        for number, limit, unit in (
            (num_bytes, self.limits.max_encoded_bytes, "bytes"),
            (num_pixels, self.limits.picture.max_request_pixels, "pixels"),
        ):
            if number > limit:
                raise ImageTooLarge(
                    f"The images have more than {limit} {unit} together; send fewer or smaller.", "messages"
                )

    async def _pixels(self, served: ServedModel, picture: Picture, salt: bytes) -> PreparedPicture:
        async def prepare() -> PreparedPicture:
            pixels = await self.pool.picture(picture.encoded, served.family, picture.settings, picture.layout)
            self.metrics.observe_stage("queue", pixels.waited_seconds)
            for stage, seconds in msgspec.structs.asdict(pixels.seconds).items():
                self.metrics.observe_stage(stage, seconds)
            return pixels

        try:
            return await self.cache.get((salt, picture.content_hash, picture.layout.pixel_dtype), prepare)
        except RequestError as error:
            raise _at(error, picture.field) from error

    def _media(self, draft: Draft, pixels: Mapping[bytes, PreparedPicture]) -> Iterable[MediaItem]:
        seen: set[bytes] = set()
        for picture, span in zip(draft.pictures, draft.spans, strict=True):
            prepared = pixels.get(picture.content_hash)
            if prepared is not None and picture.content_hash in seen:
                self.pool.retain(prepared)
            seen.add(picture.content_hash)
            yield _media_item(picture, span, prepared)

    async def _encode(self, is_long: bool, num_bytes: int, encode: Callable[[], list[int]], field: str) -> list[int]:
        try:
            return await self._work(is_long, num_bytes, encode)
        except RequestError as error:
            raise _at(error, field) from error

    async def _work(self, is_long: bool, num_bytes: int, work: Callable[[], T]) -> T:
        """Return what *work* does: in a thread where it takes long, else on the event loop when its turn comes."""
        if is_long:
            return await asyncio.get_running_loop().run_in_executor(self.threads, work)
        async with self.admission.turn(num_bytes):
            return work()


def is_long(request: ChatRequest | TokenizeRequest) -> bool:
    """Whether reading the chat in *request* would hold up the event loop."""
    return sum(map(_num_characters, request.messages or ())) > THREAD_FROM_CHARACTERS


def on_wire(
    served: ServedModel, draft: Draft, pixel_dtype: str, is_held: Callable[[bytes], bool] = lambda _: False
) -> Draft:
    """Return *draft* with its pixels in the form of the wire: uint8 on ours, normalised as *pixel_dtype* on others.

    *is_held* tells by content hash which pictures go without. Raises UnsupportedParameter where the model's family is
    not sent so.
    """
    held = frozenset(picture.content_hash for picture in draft.pictures if is_held(picture.content_hash))
    draft = dataclasses.replace(draft, held=held)
    if pixel_dtype == "uint8":
        return draft
    pictures = tuple(
        dataclasses.replace(picture, layout=served.layout.foreign(picture.layout, pixel_dtype))
        for picture in draft.pictures
    )
    return dataclasses.replace(draft, pictures=pictures)


def expand(
    token_ids: list[int], placeholder_token_id: int, counts: Sequence[int]
) -> tuple[list[int], tuple[Span, ...]]:
    """Replace the i-th placeholder by counts[i] of them; return the ids and where each run lies.

    Raises InvalidValue where placeholders and pictures are not equally many.
    """
    num_placeholders = token_ids.count(placeholder_token_id)
    if num_placeholders != len(counts):
        raise InvalidValue(
            f"The model's chat template makes room for {num_placeholders} images; the messages hold {len(counts)}.",
            "messages",
        )
    expanded: list[int] = []
    spans: list[Span] = []
    position = 0
    for count in counts:
        found = token_ids.index(placeholder_token_id, position)
        expanded += token_ids[position:found]
        spans.append(Span(len(expanded), count))
        expanded += [placeholder_token_id] * count
        position = found + 1
    return expanded + token_ids[position:], tuple(spans)


def _media_item(picture: Picture, span: Span, pixels: PreparedPicture | None) -> MediaItem:
    return MediaItem(
        modality="image",
        content_hash=picture.content_hash,
        grid=picture.layout.grid,
        spans=(span,),
        pixel_shape=picture.layout.pixel_shape,
        pixel_dtype=picture.layout.pixel_dtype,
        original_size=picture.layout.original_size,
        slot=pixels.slot if pixels else None,
        inline=pixels.inline if pixels else None,
    )


def _num_characters(message: ChatMessage) -> int:
    """Return how much work *message* is, in characters."""
    num_characters = len(message.name or "") + len(message.reasoning_content or message.reasoning or "")
    num_characters += PART_CHARACTERS
    if isinstance(message.content, str):
        return num_characters + len(message.content)
    return num_characters + sum(len(part.text or "") + PART_CHARACTERS for part in message.content or ())


def _num_text_characters(message: Message) -> int:
    """Return the same of *message* as a template takes it."""
    content = message["content"]
    num_characters = len(message.get("name", "")) + len(message.get("reasoning_content", "")) + PART_CHARACTERS
    if isinstance(content, str):
        return num_characters + len(content)
    return num_characters + sum(len(part.get("text", "")) + PART_CHARACTERS for part in content)


def _at(error: RequestError, field: str) -> RequestError:
    """Return *error* with the request's field, which those who know only bytes could not name."""
    return type(error)(error.message, error.param or field)
