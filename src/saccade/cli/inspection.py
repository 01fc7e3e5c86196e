"""What `saccade inspect` shows, made by the gateway's own steps."""

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pybase64

from saccade import models
from saccade.gateway.admission import Admission
from saccade.gateway.byte_budget import ByteBudget
from saccade.gateway.config import GatewayConfig
from saccade.gateway.media_pool import MediaPool
from saccade.gateway.openai_requests import ChatMessage, ChatRequest, ContentPart, ImageUrl
from saccade.gateway.preparation import Preparation
from saccade.gateway.prepare import Draft, Picture
from saccade.gateway.served_model import ServedModel
from saccade.media.decode import decode
from saccade.media.header import PictureLimits
from saccade.telemetry import Metrics


@dataclass
class Stopwatch:
    """What each stage took, in ms."""

    stages: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, stage: str) -> None:
        """Book the time since the last lap as *stage*."""
        now = time.perf_counter()
        self.stages[stage] = self.stages.get(stage, 0.0) + 1000 * (now - self._last)
        self._last = now


async def draft_of(served: ServedModel, encoded: list[bytes], question: str) -> Draft:
    """Return the prompt of one turn: the pictures, then the question. Raises RequestError."""
    config = GatewayConfig(limit_images=len(encoded))
    admission = Admission(config.max_requests, config.max_pixel_bytes)
    memory = ByteBudget(config.max_request_memory_bytes)
    preparer = Preparation(config, MediaPool(config.media), admission, memory, Metrics()).preparer
    urls = [f"data:image;base64,{pybase64.b64encode(content).decode()}" for content in encoded]
    pictures = [ContentPart(type="image_url", image_url=ImageUrl(url=url)) for url in urls]
    asked = ChatMessage("user", [*pictures, ContentPart(type="text", text=question)])
    request = ChatRequest(model=served.name, messages=[asked])
    chat = preparer.read(served, request)
    with memory.reservation() as reserved:
        return await preparer.draft(served, request, chat, await preparer.collect(served, chat, b"", reserved))


def resized(picture: Picture, served: ServedModel, watch: Stopwatch) -> npt.NDArray[np.uint8]:
    """Take *picture* through a decode process's steps; return it resized, uint8 [h, w, 3]. Raises RequestError."""
    layout = picture.layout
    watch.lap("report")
    pixels = decode(picture.encoded, PictureLimits())
    watch.lap("decode")
    patches = np.empty(layout.pixel_shape, dtype=np.uint8)
    family = models.load_pixels(served.family)(picture.settings)
    family.write(pixels, layout, patches)
    watch.lap("resize and patches")
    return np.ascontiguousarray(family.shown(patches, layout))
