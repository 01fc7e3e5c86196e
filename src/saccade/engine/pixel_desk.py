"""Pixels between engine and gateways: read those a step needs, ask for those that did not come, take the answers.

A picture may come by its hash alone, because the gateway believes that its encoding is held here. Where it is not, the
sequence is parked and its gateway asked, once for each request: a gateway keeps a picture until the first token only.
"""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import structlog

from saccade.engine.encoder_cache import EncoderKey
from saccade.engine.outbox import Outbox
from saccade.engine.scheduler import Schedule, Scheduler
from saccade.engine.sequence import Sequence
from saccade.errors import InternalError, SaccadeError, WorkerUnavailable
from saccade.protocol.output import PixelsWanted
from saccade.protocol.request import MediaPixels, Pixels

PATIENCE_SECONDS = 60.0
"""A gateway that does not answer for so long has lost the question; its own deadline is shorter."""

NO_LONGER_HELD = "The worker no longer holds a picture of this request; the request can be sent again."

logger = structlog.get_logger(__name__)

PixelsByKey = dict[EncoderKey, bytes]
"""Patches to encode, in order."""

Fail = Callable[[Sequence, SaccadeError], object]
"""Ends the request of a sequence, and takes it out of the step."""


class _Question(NamedTuple):
    """One that is open: for which pictures, and until when."""

    media: frozenset[int]
    deadline: float


class PixelDesk:
    """*patience_seconds* is how long a parked sequence waits for its pixels."""

    def __init__(self, scheduler: Scheduler, outbox: Outbox, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.patience_seconds = patience_seconds
        self._scheduler = scheduler
        self._outbox = outbox
        self._questions: dict[tuple[int, str], _Question] = {}

    @property
    def overdue(self) -> bool:
        """Whether a question has been open for too long."""
        first = next(iter(self._questions.values()), None)
        return first is not None and first.deadline <= time.monotonic()

    def serve(self, schedule: Schedule, fail: Fail) -> PixelsByKey:
        """Return the pixels to encode in this step, ask for those that later ones need, fail who waited too long."""
        self._expire(fail)
        pixels = self._read(schedule, fail)
        self._ask(schedule, fail)
        return pixels

    def _expire(self, fail: Fail) -> None:
        """Fail the requests whose gateway did not answer in time."""
        while self.overdue:
            key = next(iter(self._questions))
            del self._questions[key]
            for sequence in [one for one in self._scheduler.parked if (one.connection, one.request_id) == key]:
                fail(sequence, WorkerUnavailable("The picture's pixels did not come in time; send the request again."))

    def _read(self, schedule: Schedule, fail: Fail) -> PixelsByKey:
        """Return the pixels to encode. A picture that cannot be read ends all who sent it, and only those."""
        pixels: PixelsByKey = {}
        for key, claims in schedule.encode.items():
            failure: SaccadeError | None = None
            for sequence, source in claims:
                if not source.available:
                    continue
                try:
                    pixels[key] = source.read(self._outbox.released(sequence.connection))
                    break
                except SaccadeError as error:
                    failure = failure or error
                except Exception:
                    logger.exception("reading a picture failed", request_id=sequence.request_id)
                    failure = failure or InternalError("Reading the picture's pixels failed.", source.param)
            else:
                self._do_without(key, schedule, failure or InternalError("A picture has no pixels."), fail)
        running = self._scheduler.running
        wanted = {key for key, claims in schedule.encode.items() if any(s in running for s, _ in claims)}
        return {key: content for key, content in pixels.items() if key in wanted}

    def _do_without(self, key: EncoderKey, schedule: Schedule, failure: SaccadeError, fail: Fail) -> None:
        """Fail all who brought the picture in vain; park those who came by its hash."""
        for sequence in dict.fromkeys(sequence for sequence, _ in schedule.encode[key]):
            if any(source.brought for source in sequence.sources if source.key == key):
                fail(sequence, failure)
            elif sequence in self._scheduler.running:
                absent = [index for index, source in enumerate(sequence.sources) if not source.available]
                self._scheduler.park(sequence, schedule, absent)

    def _ask(self, schedule: Schedule, fail: Fail) -> None:
        """Ask for what parked sequences of this step lack; one whose gateway may not be asked any more fails."""
        for sequence, media in schedule.lacking.items():
            key = (sequence.connection, sequence.request_id)
            question = self._questions.get(key)
            if question is not None and question.media.issuperset(media):
                continue
            if sequence.index or sequence.num_generated_tokens:
                fail(sequence, WorkerUnavailable(NO_LONGER_HELD))
                continue
            self._questions[key] = _Question(frozenset(media), time.monotonic() + self.patience_seconds)
            self._outbox.ask(sequence.connection, PixelsWanted(sequence.request_id, media))

    def take(self, connection: int, answer: Pixels, samples: list[Sequence], fail: Fail) -> None:
        """Put the sequences that wait for *answer* back in line; a wrong answer fails their request.

        *samples* are those of the request that *answer* names; of one that has ended, none.
        """
        question = self._questions.pop((connection, answer.request_id), None)
        problem = _problem(answer.media, question, samples[0]) if samples else ""
        if not samples or problem:
            slots = [pixels.slot.name for pixels in answer.media if pixels.slot is not None]
            self._outbox.released(connection).extend(slots)
        if problem:
            fail(samples[0], InternalError(problem))
            return
        for pixels in answer.media if samples else ():
            samples[0].sources[pixels.index].bring(pixels.slot, pixels.inline)
        for sequence in samples:
            if sequence in self._scheduler.parked:
                self._scheduler.resume(sequence)


def _problem(media: tuple[MediaPixels, ...], question: _Question | None, sequence: Sequence) -> str:
    """Return what is wrong with the answer to *question*, in a sentence; nothing where it is right."""
    if question is None:
        return "Pixels came that were not asked for."
    if sorted(pixels.index for pixels in media) != sorted(question.media):
        return "Pixels came of other pictures than those asked for."
    for pixels in media:
        sizes = [len(pixels.inline)] if pixels.inline is not None else []
        sizes += [pixels.slot.nbytes] if pixels.slot is not None else []
        if sizes != [math.prod(sequence.request.media[pixels.index].pixel_shape)]:
            return "A picture's pixels came in another size than its grid makes, or twice, or not at all."
    return ""
