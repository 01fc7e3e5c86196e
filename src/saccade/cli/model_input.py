"""The model's input for a message with images, for `saccade inspect`. The gateway's own code makes it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from saccade import models
from saccade.gateway.chat_request import ChatMessage, ChatRequest, ContentPart, ImageUrl, VideoUrl
from saccade.gateway.config import GatewayConfig, MediaSettings
from saccade.gateway.image_source import NO_FILE
from saccade.gateway.images.decode_pool.pool import DecodePool
from saccade.gateway.images.encoded_image import EncodedImage, with_pages
from saccade.gateway.images.media import Media
from saccade.gateway.prompt.prompt_builder import PromptBuilder, PromptTokens
from saccade.gateway.request import Limits, Request
from saccade.gateway.served_models.served_model import ServedModel
from saccade.gateway.tenants.account import EVERYBODY, Account
from saccade.log_setup import log_warnings
from saccade.media.decode import decode
from saccade.media.header import SERVED_VIDEOS, ImageLimits, MediaLimits, other_format
from saccade.telemetry import Metrics

Patches = npt.NDArray[np.uint8]
UNSHOWN = ""
"""The stage of what no gateway does."""


@dataclass
class Stopwatch:
    """The times of stages, in ms."""

    stages: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def __str__(self) -> str:
        return "  ".join(f"{stage}: {ms:.1f} ms" for stage, ms in self.stages.items() if stage != UNSHOWN)

    def lap(self, stage: str) -> None:
        """Record the time since the last lap as *stage*."""
        now = time.perf_counter()
        self.add_seconds(stage, now - self._last)
        self._last = now

    def add_seconds(self, stage: str, seconds: float) -> None:
        """Record *seconds* more of *stage*."""
        self.stages[stage] = self.stages.get(stage, 0.0) + 1000 * seconds


class ModelInput(NamedTuple):
    """The images of one message, pages and videos included, and its prompt.

    *patches* has the patches of PDF pages, since their decode process has ended, and None for other images.
    """

    images: list[EncodedImage]
    prompt: PromptTokens
    patches: list[Patches | None]


def model_input(served: ServedModel, encoded: Sequence[bytes], question: str, watch: Stopwatch) -> ModelInput:
    """Return the input for the files *encoded* and then the *question*. Raises RequestError and StartupError."""
    return asyncio.run(_model_input(served, encoded, question, watch))


async def _model_input(served: ServedModel, encoded: Sequence[bytes], question: str, watch: Stopwatch) -> ModelInput:
    async with _decode_pool(encoded, watch) as pool:
        images, prompt = await build_prompt(served, encoded, question, pool)
        watch.lap("header, hash, template, tokenize")
        return ModelInput(images, prompt, [await _page(pool, served, image, watch) for image in images])


@contextlib.asynccontextmanager
async def _decode_pool(encoded: Sequence[bytes], watch: Stopwatch) -> AsyncIterator[DecodePool]:
    """Provide a pool, started if the gateway would read one of the files *encoded* in another process."""
    pool = DecodePool(MediaSettings(num_decode_processes=1, shared_memory_bytes=0))
    try:
        if any(other_format(content) in ("PDF", *SERVED_VIDEOS) for content in encoded):
            log_warnings()
            await pool.start()
            watch.lap("start of a decode process")
        yield pool
    finally:
        await pool.close()


async def build_prompt(
    served: ServedModel, encoded: Sequence[bytes], question: str, pool: DecodePool | None = None
) -> tuple[list[EncodedImage], PromptTokens]:
    """Return the images and prompt of one message: the files *encoded*, then the *question*. Raises RequestError.

    PDFs and videos need a *pool* that is started.
    """
    config = GatewayConfig(media_limits=MediaLimits(images=len(encoded), videos=len(encoded)))
    limits, metrics = Limits.of_config(config), Metrics()
    media = Media(config, pool or DecodePool(config), limits.work_threads(), metrics)
    prompts = PromptBuilder(config.media_limits, metrics, media.threads)
    parts = [_part(content) for content in encoded]
    message = ChatMessage("user", [*parts, ContentPart(type="text", text=question)])
    request = ChatRequest(model=served.name, messages=[message])
    chat = prompts.read_chat(served, request)
    sources = [replace(source, content=content) for source, content in zip(chat.images, encoded, strict=True)]
    with Request.begin_request(limits, Account(EVERYBODY), client=None) as call:
        images = await media.images.collect_images(call, served, sources, salt=b"")
    layouts = [image.layout for image in images]
    return images, await prompts.build_prompt(served, request, with_pages(chat, images), layouts)


def _part(content: bytes) -> ContentPart:
    if other_format(content) in SERVED_VIDEOS:
        return ContentPart(type="video_url", video_url=VideoUrl(url=NO_FILE))
    return ContentPart(type="image_url", image_url=ImageUrl(url=NO_FILE))


async def _page(pool: DecodePool, served: ServedModel, image: EncodedImage, watch: Stopwatch) -> Patches | None:
    """Return the patches of a PDF's page; None for other images. Raises RequestError."""
    if image.page is None:
        return None
    family, layout = served.family, image.layout
    answer = await pool.prepare_image(image.encoded, family, image.settings, layout, page=image.page)
    watch.add_seconds("decode", answer.seconds.decode)
    watch.add_seconds("resize and patches", answer.seconds.preprocess)
    watch.lap(UNSHOWN)
    return np.frombuffer(answer.inline or b"", np.uint8).reshape(layout.pixel_shape)


def preview_of(image: EncodedImage, patches: Patches | None, served: ServedModel, watch: Stopwatch) -> Patches | None:
    """Return what the model sees of *image*, uint8 [h, w, 3], or None for a video. Raises RequestError.

    An image without *patches* is decoded and resized as a decode process would do it.
    """
    if image.video is not None:
        return None
    family = models.load_pixels(served.family)(image.settings)
    if patches is None:
        watch.lap(UNSHOWN)
        pixels = decode(image.encoded, ImageLimits(), served.declaration.keeps_alpha)
        watch.lap("decode")
        patches = np.empty(image.layout.pixel_shape, dtype=np.uint8)
        family.write_pixels(pixels, image.layout, patches)
        watch.lap("resize and patches")
    return np.ascontiguousarray(family.to_image(patches, image.layout))
