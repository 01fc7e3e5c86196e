"""What gateways ask of the engine: requests, pixels, aborts."""

import time

import structlog

from saccade.engine.core.grammars import Grammars
from saccade.engine.core.pixel_requests import PixelRequests
from saccade.engine.core.request_validation import RequestValidator
from saccade.engine.core.scheduler import Scheduler, failure_of
from saccade.errors import SaccadeError, UnsupportedParameter
from saccade.protocol.output import FinishReason, TokenDelta
from saccade.protocol.request import EngineRequest, SupplyPixels

NO_GRAMMARS = "This worker cannot constrain answers by a grammar; leave `grammar` out."

logger = structlog.get_logger(__name__)


class Requests:
    """Takes requests by connection and request_id into *scheduler*, once they are valid and have their grammar."""

    def __init__(self, scheduler: Scheduler, validator: RequestValidator, grammars: Grammars | None) -> None:
        self.pixels = PixelRequests(scheduler)
        self.grammars = grammars
        self._scheduler = scheduler
        self._validator = validator
        self._num_arrived = 0

    @property
    def has_work(self) -> bool:
        """Whether there is output, a request for pixels has expired, or a grammar is being compiled."""
        return bool(self._scheduler.frames) or self.pixels.overdue or bool(self.grammars and self.grammars.pending)

    def submit(self, connection: int, request: EngineRequest) -> None:
        """Queue a request; if it is invalid, its only delta is the error."""
        slots = [item.slot.name for item in request.media if item.slot is not None]
        if self._scheduler.find(connection, request.request_id) is not None:
            logger.warning(
                "dropped a request with a duplicate id", request_id=request.request_id, connection=connection
            )
            self._scheduler.frames.released_slots(connection).extend(slots)
            return
        self._num_arrived += 1
        try:
            self._scheduler.check_queue()
            sequence = self._validator.validated(connection, request, self._num_arrived)
            if sequence.grammar is not None and self.grammars is None:
                raise UnsupportedParameter(NO_GRAMMARS, "grammar")
            if sequence.grammar is not None and self.grammars is not None:
                self.grammars.begin(sequence, sequence.grammar)
            self._scheduler.kv_connector.open(sequence)
        except SaccadeError as error:
            self._scheduler.frames.released_slots(connection).extend(slots)
            self.refuse(connection, request.request_id, error)
            return
        sequence.clock.arrived = time.perf_counter()
        sequence.max_num_tokens = min(sequence.max_num_tokens, self._validator.max_model_len)
        self._num_arrived += request.num_samples - 1
        if not sequence.awaits_kv:  # else the prefill worker counts them
            self._scheduler.counters.prompt_tokens_total += sequence.num_prompt_tokens
        self._scheduler.add(sequence)

    def refuse(self, connection: int, request_id: str, error: SaccadeError) -> None:
        """Send an error for a request that never became a sequence."""
        delta = TokenDelta(request_id, [], FinishReason.ERROR, failure=failure_of(error))
        self._scheduler.frames.say(connection, delta)

    def supply(self, connection: int, answer: SupplyPixels) -> None:
        """Accept the pixels that were requested from a gateway. If the request has ended, its slots are released."""
        self.pixels.take(connection, answer)

    def abort(self, connection: int, request_id: str, index: int | None = None) -> None:
        """End a request, or its sample *index*, without further work. An unknown request is ignored."""
        request = self._scheduler.find(connection, request_id)
        if request is None:
            return
        for other in [other for other in request.unstarted if index in (None, other)]:
            request.unstarted.remove(other)
            self._scheduler.frames.say(connection, TokenDelta(request_id, [], FinishReason.ABORT, index=other))
        for sequence in [live for live in request.live.values() if index in (None, live.index)]:
            self._scheduler.end(sequence, FinishReason.ABORT)

    def hangup(self, connection: int) -> None:
        """End all requests of a closed connection, and discard its output."""
        for request_id in list(self._scheduler.requests.get(connection, ())):
            self.abort(connection, request_id)
        self._scheduler.requests.pop(connection, None)
        self._scheduler.frames.forget(connection)
