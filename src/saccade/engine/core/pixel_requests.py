"""Request pixels from gateways, and accept the answers.

An image may come by its hash alone, because the gateway believes that this engine holds its encoder output. If it does
not, the engine parks the sequence and asks its gateway for the pixels, once per request: a gateway keeps an image only
until the first token. The gateway of a decode leg, which has no pixels, keeps its images until the request ends: a
preempted sequence computes its prompt here.
"""

import math
import time

from saccade.engine.core.schedule import Schedule
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.sequence import Sequence
from saccade.errors import InternalError, WorkerUnavailable
from saccade.protocol.kv_transfer import ReceiveKv
from saccade.protocol.output import PixelsWanted
from saccade.protocol.request import MediaPixels, SupplyPixels

ANSWER_SECONDS = 60.0
"""After this time without an answer a request for pixels counts as lost; the gateway's deadline is shorter."""

NO_LONGER_HELD = "The worker no longer holds an image of this request; the request can be sent again."


class PixelRequests:
    """Requests for pixels. Each is open, until its deadline, for the images that are marked as requested."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._deadlines: dict[tuple[int, str], float] = {}

    @property
    def overdue(self) -> bool:
        """Whether a request for pixels has passed its deadline."""
        first = next(iter(self._deadlines.values()), None)
        return first is not None and first <= time.monotonic()

    def expire(self) -> None:
        """Fail the requests whose gateway did not answer in time."""
        expired = set()
        while self.overdue:
            expired.add(key := next(iter(self._deadlines)))
            del self._deadlines[key]
        for sequence in [one for one in self._scheduler.parked if (one.connection, one.request_id) in expired]:
            error = WorkerUnavailable("The image's pixels did not arrive in time; send the request again.")
            self._scheduler.fail(sequence, error)

    def settle(self, schedule: Schedule) -> None:
        """Fail the requests whose pixels could not be read for *schedule*, and request the pixels that it lacks.

        A sequence fails too if its gateway may have dropped them.
        """
        for sequence, error in schedule.unreadable.items():
            self._scheduler.fail(sequence, error)
        for sequence, media in schedule.lacking.items():
            key = (sequence.connection, sequence.request_id)
            images = [sequence.images[index] for index in media]
            is_asked = key in self._deadlines and all(image.is_requested for image in images)
            if is_asked or sequence.finish_reason is not None:
                continue
            has_begun = sequence.index or sequence.num_generated_tokens
            if has_begun and not isinstance(sequence.request.kv_transfer, ReceiveKv):
                self._scheduler.fail(sequence, WorkerUnavailable(NO_LONGER_HELD))
                continue
            for image in images:
                image.is_requested = True
            # Removed first: a dict keeps the place of a key that is set again, and deadlines are in order.
            self._deadlines.pop(key, None)
            self._deadlines[key] = time.monotonic() + ANSWER_SECONDS
            self._scheduler.frames.ask(sequence.connection, PixelsWanted(sequence.request_id, media))

    def take(self, connection: int, answer: SupplyPixels) -> None:
        """Queue the sequences again that wait for *answer*; an invalid answer fails their request.

        If the request has ended, its slots are released.
        """
        samples = self._scheduler.samples(connection, answer.request_id)
        self._deadlines.pop((connection, answer.request_id), None)
        problem = _problem(answer.media, samples[0]) if samples else ""
        if not samples or problem:
            slots = [pixels.slot.name for pixels in answer.media if pixels.slot is not None]
            self._scheduler.frames.released_slots(connection).extend(slots)
        if problem:
            self._scheduler.fail(samples[0], InternalError(problem))
            return
        for pixels in answer.media if samples else ():
            samples[0].images[pixels.index].bring(pixels.slot, pixels.inline)
        for sequence in samples:
            if sequence in self._scheduler.parked:
                self._scheduler.resume(sequence)


def _problem(media: tuple[MediaPixels, ...], sequence: Sequence) -> str:
    """Return the fault of the pixels in *media* as a sentence; empty if they match the request for pixels."""
    indices = [index for index, image in enumerate(sequence.images) if image.is_requested]
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
