"""POST /v1/chat/completions, from the body to the last byte: parse, prepare, dispatch, respond."""

import contextlib
import time
import uuid
from dataclasses import dataclass

from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from saccade.gateway.admission import Admission
from saccade.gateway.border import SALT, read_body
from saccade.gateway.catalogue import Catalogue
from saccade.gateway.dispatch import Dispatcher
from saccade.gateway.openai import ChatCompletionChunk, ChatRequest, parse_chat
from saccade.gateway.prepare import Preparer, on_wire
from saccade.gateway.respond import EventStream, answer_to, report_errors, send_stream, send_whole, unless_disconnected
from saccade.gateway.sampling import sampling_params
from saccade.gateway.served_model import ServedModel
from saccade.protocol.request import EngineRequest
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        with self.admission.admit():
            body = await read_body(scope, receive, self.max_body_bytes)
            async with self.admission.turn():
                request = parse_chat(body)
            served = self.catalogue.get(request.model)
            if request.stream:
                stream = EventStream(send, self.ping_interval_seconds)
                work = report_errors(stream, self._answer(request, served, scope[SALT], stream))
                await unless_disconnected(receive, work, stream.keep_alive())
            else:
                await unless_disconnected(receive, self._answer(request, served, scope[SALT], send))

    async def _answer(self, request: ChatRequest, served: ServedModel, salt: bytes, out: EventStream | Send) -> None:
        # Its clock starts here, so that its ttft includes the way of the pixels.
        answer = answer_to(request, served, self.metrics)
        async with contextlib.AsyncExitStack() as held:
            with self.metrics.stage("prepare"):
                async with self.admission.turn():
                    draft = await self.preparer.draft(served, request, salt)
                answer.begin(draft.token_ids)
                sampling = sampling_params(request, served, len(draft.token_ids))
                placement = held.enter_context(self.dispatcher.place(served.name, len(draft.token_ids)))
                draft = on_wire(served, draft, placement.pixel_dtype)
                await held.enter_async_context(self.admission.pixels(draft.num_pixel_bytes))
                prompt = await self.preparer.prompt(served, draft, salt)
            engine_request = EngineRequest(
                request_id=f"chatcmpl-{uuid.uuid4().hex}",
                token_ids=prompt.token_ids,
                sampling=sampling,
                media=prompt.media,
                salt=salt,
            )
            chunk = _first_chunk(request, engine_request.request_id, served.name)
            async with contextlib.aclosing(self.dispatcher.stream(placement, engine_request)) as deltas:
                if isinstance(out, EventStream):
                    await send_stream(out, answer, deltas, chunk)
                else:
                    await send_whole(out, answer, deltas, chunk)


def _first_chunk(request: ChatRequest, request_id: str, model: str) -> ChatCompletionChunk:
    include_usage = request.stream_options is not None and request.stream_options.include_usage
    return ChatCompletionChunk(
        id=request_id, created=int(time.time()), model=model, choices=[], usage=None if include_usage else UNSET
    )
