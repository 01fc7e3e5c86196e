"""POST /v1/chat/completions, from the body to the last byte: parse, prepare, dispatch, respond."""

from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from saccade.gateway.admission import Admission
from saccade.gateway.border import SALT, WARNINGS, read_body
from saccade.gateway.catalogue import Catalogue
from saccade.gateway.disconnect import unless_disconnected
from saccade.gateway.dispatch import Dispatcher
from saccade.gateway.event_stream import EventStream, report_errors
from saccade.gateway.generation import Asked, Generation
from saccade.gateway.parameters import parse_chat
from saccade.gateway.prepare import Preparer
from saccade.gateway.respond import send_stream, send_whole
from saccade.telemetry import Metrics


@dataclass(frozen=True)
class ChatCompletions:
    """The endpoint. A client that leaves, streaming or not, takes its request with it: the engine stops at once."""

    admission: Admission
    catalogue: Catalogue
    preparer: Preparer
    dispatcher: Dispatcher
    metrics: Metrics
    max_body_bytes: int
    ping_interval_seconds: float
    strict_parameters: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        with self.admission.admit():
            body = await read_body(scope, receive, self.max_body_bytes, self.admission)
            async with self.admission.turn(len(body)):
                request, scope[WARNINGS] = parse_chat(body, self.strict_parameters)
            asked = Asked(request, self.catalogue.get(request.model), scope[SALT], len(body))
            if request.stream:
                stream = EventStream(send, self.ping_interval_seconds)
                work = report_errors(stream, self._answer(asked, stream))
                await unless_disconnected(receive, work, stream.keep_alive())
            else:
                await unless_disconnected(receive, self._answer(asked, send))

    async def _answer(self, asked: Asked, out: EventStream | Send) -> None:
        generation = Generation(self.admission, self.preparer, self.dispatcher, self.metrics)
        async with generation.answer(asked) as (answer, deltas):
            if isinstance(out, EventStream):
                await send_stream(out, answer, deltas)
            else:
                await send_whole(out, answer, deltas)
