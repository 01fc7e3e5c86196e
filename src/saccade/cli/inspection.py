"""The computations of `saccade inspect`, with the gateway's own functions."""

import time
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from saccade import models
from saccade.gateway.chat import NO_FILE, ChatMessage, ChatRequest, ContentPart, ImageUrl
from saccade.gateway.config import GatewayConfig
from saccade.gateway.images.collect import EncodedImage
from saccade.gateway.images.decode_pool.pool import DecodePool
from saccade.gateway.images.media import Media
from saccade.gateway.prompt.draft import Draft, PromptDrafter
from saccade.gateway.request import Limits, Request
from saccade.gateway.served_models.served_model import ServedModel
from saccade.gateway.tenants.account import EVERYBODY, Account
from saccade.media.decode import decode
from saccade.media.header import ImageLimits, MediaLimits
from saccade.telemetry import Metrics


@dataclass
class Stopwatch:
    """The times of stages, in ms."""

    stages: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, stage: str) -> None:
        """Record the time since the last lap as *stage*."""
        now = time.perf_counter()
        self.stages[stage] = self.stages.get(stage, 0.0) + 1000 * (now - self._last)
        self._last = now


async def draft_of(served: ServedModel, encoded: list[bytes], question: str) -> tuple[list[EncodedImage], Draft]:
    """Return images and prompt of one message: the images, then the question. Raises RequestError."""
    config = GatewayConfig(media_limits=MediaLimits(images=len(encoded)))
    limits, metrics = Limits.of(config), Metrics()
    media = Media(config, DecodePool(config), limits.admission, metrics)
    prompts = PromptDrafter(config.media_limits, metrics, media.threads)
    parts = [ContentPart(type="image_url", image_url=ImageUrl(url=NO_FILE)) for _ in encoded]
    message = ChatMessage("user", [*parts, ContentPart(type="text", text=question)])
    request = ChatRequest(model=served.name, messages=[message])
    chat = prompts.read(served, request)
    sources = [replace(source, content=content) for source, content in zip(chat.images, encoded, strict=True)]
    with Request.begin(limits, Account(EVERYBODY), client=None) as call:
        images = await media.images.collect(call, served, sources, salt=b"")
    layouts = [image.layout for image in images]
    return images, await prompts.draft(served, request, chat, layouts)


def resized(image: EncodedImage, served: ServedModel, watch: Stopwatch) -> npt.NDArray[np.uint8]:
    """Decode and resize *image* as a decode process does; return uint8 [h, w, 3]. Raises RequestError."""
    layout = image.layout
    watch.lap("report")
    pixels = decode(image.encoded, ImageLimits())
    watch.lap("decode")
    patches = np.empty(layout.pixel_shape, dtype=np.uint8)
    family = models.load_pixels(served.family)(image.settings)
    family.write(pixels, layout, patches)
    watch.lap("resize and patches")
    return np.ascontiguousarray(family.to_image(patches, layout))
