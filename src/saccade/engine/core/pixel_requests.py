"""Exchange pixels with gateways: read those that a step needs, request those that are missing, and accept the answers.

An image may come by its hash alone, because the gateway believes that this engine holds its encoder output. If it does
not, the engine parks the sequence and asks its gateway for the pixels, once per request: a gateway keeps an image only
until the first token. The gateway of a decode leg, which has no pixels, keeps its images until the request ends: a
preempted sequence computes its prompt here.
"""

import math
import time
from collections.abc import Mapping

import structlog

from saccade.engine.core.frame_builder import FrameBuilder
from saccade.engine.core.images import EncoderKey, State
from saccade.engine.core.schedule import Fail, Schedule
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.sequence import Sequence
from saccade.errors import InternalError, SaccadeError, WorkerUnavailable
from saccade.protocol.kv_transfer import ReceiveKv
from saccade.protocol.output import PixelsWanted
from saccade.protocol.request import MediaPixels, SupplyPixels

ANSWER_SECONDS = 60.0
"""After this time without an answer a request for pixels counts as lost; the gateway's deadline is shorter."""

NO_LONGER_HELD = "The worker no longer holds an image of this request; the request can be sent again."

logger = structlog.get_logger(__name__)

PixelsByKey = dict[EncoderKey, bytes]
"""Patches to encode, in order."""


class PixelRequests:
    """Requests for pixels. Each is open, until its deadline, for the images that are in the state REQUESTED."""

    def __init__(self, scheduler: Scheduler, frames: FrameBuilder) -> None:
        self._scheduler = scheduler
        self._frames = frames
        self._deadlines: dict[tuple[int, str], float] = {}

    @property
    def overdue(self) -> bool:
        """Whether a request for pixels has passed its deadline."""
        first = next(iter(self._deadlines.values()), None)
        return first is not None and first <= time.monotonic()

    def serve(self, schedule: Schedule, fail: Fail) -> PixelsByKey:
        """Return the pixels to encode in this step, request missing ones, and fail requests past their deadline.

        An image without pixels is not encoded after all.
        """
        self._expire(fail)
        pixels = self._read(schedule, fail)
        self._ask(schedule, fail)
        for key in schedule.encode.keys() - pixels:
            self._scheduler.encoder_scheduler.encoder_cache.abandon(key)
            del schedule.encode[key]
            schedule.background.discard(key)
        return pixels

    def _expire(self, fail: Fail) -> None:
        """Fail the requests whose gateway did not answer in time."""
        expired = set()
        while self.overdue:
            expired.add(key := next(iter(self._deadlines)))
            del self._deadlines[key]
        for sequence in [one for one in self._scheduler.parked if (one.connection, one.request_id) in expired]:
            fail(sequence, WorkerUnavailable("The image's pixels did not arrive in time; send the request again."))

    def _read(self, schedule: Schedule, fail: Fail) -> PixelsByKey:
        """Return the pixels to encode. An unreadable image ends only the requests that sent it."""
        pixels: PixelsByKey = {}
        for key, claims in schedule.encode.items():
            failures: dict[Sequence, SaccadeError] = {}
            for sequence, image in claims:
                if image.state is not State.ENCODING or not image.has_pixels:
                    continue
                try:
                    pixels[key] = image.read(self._frames.released_slots(sequence.connection))
                    break
                except SaccadeError as error:
                    failures[sequence] = error
                except Exception:
                    logger.exception("reading an image failed", request_id=sequence.request_id)
                    failures[sequence] = InternalError("Reading the image's pixels failed.", image.param)
            else:
                self._do_without(key, schedule, failures, fail)
        running = self._scheduler.running
        keys = {key for key, claims in schedule.encode.items() if any(s in running for s, _ in claims)}
        return {key: content for key, content in pixels.items() if key in keys}

    def _do_without(
        self, key: EncoderKey, schedule: Schedule, failures: Mapping[Sequence, SaccadeError], fail: Fail
    ) -> None:
        """Fail the requests whose pixels could not be read; park sequences that have the image by its hash alone."""
        for sequence, failure in failures.items():
            fail(sequence, failure)
        for sequence in dict.fromkeys(sequence for sequence, _ in schedule.encode[key]):
            if sequence in self._scheduler.running:
                self._scheduler.park(sequence, schedule, sequence.images_without_pixels)

    def _ask(self, schedule: Schedule, fail: Fail) -> None:
        """Request the missing pixels of parked sequences. A sequence fails if its gateway may have dropped them."""
        for sequence, media in schedule.missing_images.items():
            key = (sequence.connection, sequence.request_id)
            images = [sequence.images[index] for index in media]
            if key in self._deadlines and all(image.state is State.REQUESTED for image in images):
                continue
            has_begun = sequence.index or sequence.num_generated_tokens
            if has_begun and not isinstance(sequence.request.kv_transfer, ReceiveKv):
                fail(sequence, WorkerUnavailable(NO_LONGER_HELD))
                continue
            for image in images:
                image.ask()
            # Removed first: a dict keeps the place of a key that is set again, and deadlines are in order.
            self._deadlines.pop(key, None)
            self._deadlines[key] = time.monotonic() + ANSWER_SECONDS
            self._frames.ask(sequence.connection, PixelsWanted(sequence.request_id, media))

    def take(self, connection: int, answer: SupplyPixels, samples: list[Sequence], fail: Fail) -> None:
        """Queue the sequences again that wait for *answer*; an invalid answer fails their request.

        *samples* belong to the request of *answer*; the list is empty if the request has ended.
        """
        self._deadlines.pop((connection, answer.request_id), None)
        problem = _problem(answer.media, samples[0]) if samples else ""
        if not samples or problem:
            slots = [pixels.slot.name for pixels in answer.media if pixels.slot is not None]
            self._frames.released_slots(connection).extend(slots)
        if problem:
            fail(samples[0], InternalError(problem))
            return
        for pixels in answer.media if samples else ():
            samples[0].images[pixels.index].bring(pixels.slot, pixels.inline)
        for sequence in samples:
            if sequence in self._scheduler.parked:
                self._scheduler.resume(sequence)


def _problem(media: tuple[MediaPixels, ...], sequence: Sequence) -> str:
    """Return the fault of the pixels in *media* as a sentence; empty if they match the request for pixels."""
    indices = [index for index, image in enumerate(sequence.images) if image.state is State.REQUESTED]
    if not indices:
        return "The gateway sent pixels that were not requested."
    if sorted(pixels.index for pixels in media) != indices:
        return "The gateway sent pixels of other images than those requested."
    for pixels in media:
        sizes = [len(pixels.inline)] if pixels.inline is not None else []
        sizes += [pixels.slot.nbytes] if pixels.slot is not None else []
        if sizes != [math.prod(sequence.request.media[pixels.index].pixel_shape)]:
            return "The gateway sent an image's pixels twice, not at all, or in a size that does not match the grid."
    return ""
