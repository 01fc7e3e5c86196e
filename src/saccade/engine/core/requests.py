"""Requests from gateways, and the pixels that the engine requests from them.

An image may come as a hash alone, because the gateway believes that this engine holds its encoder output. If it does
not, the engine parks the sequence and asks the gateway for the pixels. It asks once per request, since a gateway keeps
an image only until the first token. A decode leg has no pixels; its gateway keeps the images until the request ends,
because a preempted sequence computes its prompt here.
"""

import math
import time

import structlog

from saccade.engine.core.grammars import Grammars
from saccade.engine.core.request_validation import RequestValidator
from saccade.engine.core.schedule import Schedule
from saccade.engine.core.scheduler import Scheduler, failure_of
from saccade.engine.core.sequence import Sequence
from saccade.errors import InternalError, SaccadeError, UnsupportedParameter, WorkerUnavailable
from saccade.protocol.kv_transfer import ReceiveKv
from saccade.protocol.output import FinishReason, PixelsWanted, TokenDelta
from saccade.protocol.request import EngineRequest, MediaPixels, SupplyPixels

ANSWER_SECONDS = 60.0
"""After this time without an answer a request for pixels counts as lost; the gateway's deadline is shorter."""

NO_LONGER_HELD = "The worker no longer holds an image of this request; the request can be sent again."

NO_GRAMMARS = "This worker cannot constrain answers by a grammar; leave `grammar` out."

logger = structlog.get_logger(__name__)


class Requests:
    """Validates requests and passes them to *scheduler*, which parks them until *grammars* has compiled their grammars.

    Connection and request_id identify a request. A request for pixels stays open for the images that are marked as
    requested, until its deadline in the scheduler's *pixel_deadlines*.
    """

    def __init__(self, scheduler: Scheduler, validator: RequestValidator, grammars: Grammars | None) -> None:
        self.grammars = grammars
        self._scheduler = scheduler
        self._validator = validator
        self._num_arrived = 0
        self._pixel_deadlines = scheduler.pixel_deadlines

    @property
    def has_work(self) -> bool:
        """Whether there is output, a request for pixels has expired, or a grammar is being compiled."""
        return self._scheduler.frames.has_output or self._has_expired or bool(self.grammars and self.grammars.pending)

    def submit(self, connection: int, request: EngineRequest) -> None:
        """Queue a request, or drop it if its id is in use. If it is invalid, its only delta is the error."""
        slots = [item.slot.name for item in request.media if item.slot is not None]
        if self._scheduler.find(connection, request.request_id) is not None:
            logger.warning(
                "dropped a request with a duplicate id", request_id=request.request_id, connection=connection
            )
            self._scheduler.frames[connection].released.extend(slots)
            return
        self._num_arrived += 1
        try:
            self._scheduler.check_queue()
            sequence = self._validator.validated(connection, request, self._num_arrived)
            if sequence.grammar is not None and self.grammars is None:
                raise UnsupportedParameter(NO_GRAMMARS, "grammar")
            self._scheduler.kv_connector.open(sequence)
        except SaccadeError as error:
            self._scheduler.frames[connection].released.extend(slots)
            self.refuse(connection, request.request_id, error)
            return
        if sequence.grammar is not None and self.grammars is not None:
            self.grammars.begin_grammar(sequence, sequence.grammar)
        sequence.clock.arrived = time.perf_counter()
        sequence.max_num_tokens = min(sequence.max_num_tokens, self._validator.max_model_len)
        if not sequence.awaits_kv:  # else the prefill worker counts them
            self._scheduler.counters.prompt_tokens_total += sequence.num_prompt_tokens
        self._scheduler.add_sequence(sequence)

    def refuse(self, connection: int, request_id: str, error: SaccadeError) -> None:
        """Send an error for a request that never became a sequence."""
        delta = TokenDelta(request_id, [], FinishReason.ERROR, failure=failure_of(error))
        self._scheduler.frames[connection].deltas.append(delta)

    def abort(self, connection: int, request_id: str, index: int | None = None) -> None:
        """End a request, or its sample *index*, without further work. An unknown request is ignored."""
        request = self._scheduler.find(connection, request_id)
        if request is None:
            return
        for other in [other for other in request.unstarted if index in (None, other)]:
            request.unstarted.remove(other)
            delta = TokenDelta(request_id, [], FinishReason.ABORT, index=other)
            self._scheduler.frames[connection].deltas.append(delta)
        for sequence in [live for live in request.live.values() if index in (None, live.index)]:
            self._scheduler.end_sequence(sequence, FinishReason.ABORT)
        if self._scheduler.find(connection, request_id) is None and self.grammars is not None:
            self.grammars.give_up(connection, request_id)

    def hangup(self, connection: int) -> None:
        """End all requests of a closed connection, and discard its output."""
        for request_id in list(self._scheduler.requests.get(connection, ())):
            self.abort(connection, request_id)
        self._scheduler.requests.pop(connection, None)
        self._scheduler.frames.pop(connection, None)

    @property
    def _has_expired(self) -> bool:
        """Whether a request for pixels has passed its deadline."""
        first = next(iter(self._pixel_deadlines.values()), None)
        return first is not None and first <= time.monotonic()

    def expire_pixels(self) -> None:
        """Fail the requests whose gateway did not answer in time."""
        expired = set()
        while self._has_expired:
            expired.add(key := next(iter(self._pixel_deadlines)))
            del self._pixel_deadlines[key]
        for sequence in [one for one in self._scheduler.parked if (one.connection, one.request_id) in expired]:
            error = WorkerUnavailable("The image's pixels did not arrive in time; send the request again.")
            self._scheduler.fail(sequence, error)

    def settle_pixels(self, schedule: Schedule) -> None:
        """Fail the requests whose pixels could not be read for *schedule*, and request the pixels that it lacks.

        A sequence also fails if its gateway may have dropped its pixels.
        """
        for sequence, error in schedule.unreadable.items():
            self._scheduler.fail(sequence, error)
        for sequence, media in schedule.lacking.items():
            key = (sequence.connection, sequence.request_id)
            images = [sequence.images[index] for index in media]
            is_asked = key in self._pixel_deadlines and all(image.is_requested for image in images)
            if is_asked or sequence.finish_reason is not None:
                continue
            has_begun = sequence.index or sequence.num_generated_tokens
            if has_begun and not isinstance(sequence.request.kv_transfer, ReceiveKv):
                self._scheduler.fail(sequence, WorkerUnavailable(NO_LONGER_HELD))
                continue
            for image in images:
                image.is_requested = True
            # Removed first: a dict keeps the place of a key that is set again, and deadlines are in order.
            self._pixel_deadlines.pop(key, None)
            self._pixel_deadlines[key] = time.monotonic() + ANSWER_SECONDS
            wanted = PixelsWanted(sequence.request_id, media)
            self._scheduler.frames[sequence.connection].pixels_wanted.append(wanted)

    def supply(self, connection: int, answer: SupplyPixels) -> None:
        """Accept the pixels that were requested from a gateway; an invalid answer fails the request.

        If the request has ended or the answer is invalid, the answer's slots are released.
        """
        samples = self._scheduler.samples(connection, answer.request_id)
        self._pixel_deadlines.pop((connection, answer.request_id), None)
        problem = _problem(answer.media, samples[0]) if samples else ""
        if not samples or problem:
            slots = [pixels.slot.name for pixels in answer.media if pixels.slot is not None]
            self._scheduler.frames[connection].released.extend(slots)
        if problem:
            self._scheduler.fail(samples[0], InternalError(problem))
            return
        for pixels in answer.media if samples else ():
            samples[0].images[pixels.index].bring(pixels.slot, pixels.inline)
        for sequence in samples:
            if sequence in self._scheduler.parked:
                self._scheduler.resume(sequence)


def _problem(media: tuple[MediaPixels, ...], sequence: Sequence) -> str:
    """Return what is wrong with the pixels in *media* as a sentence, or "" if they match the request for pixels."""
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
