"""From a request to an answer that a worker is writing: prepare, place, bring the pixels, send."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

from saccade.gateway.admission import Admission
from saccade.gateway.answer import Answer
from saccade.gateway.auth import request_salt
from saccade.gateway.byte_budget import Reservation
from saccade.gateway.dispatch import Dispatcher
from saccade.gateway.messages import Chat
from saccade.gateway.openai_requests import ChatRequest
from saccade.gateway.pixel_supply import PixelSupply, Room
from saccade.gateway.prepare import Preparer, on_wire
from saccade.gateway.sampling import sampling_params
from saccade.gateway.served_model import ServedModel
from saccade.protocol.output import TokenDelta
from saccade.protocol.request import EngineRequest
from saccade.telemetry import Metrics


@dataclass(frozen=True)
class Asked:
    """A request: its parameters, the chat in it, the model that it names, the salt of its tenant, the bytes it holds.

    *request* holds no messages any more: their pictures go as soon as they are decoded.
    """

    request: ChatRequest
    chat: Chat
    served: ServedModel
    tenant_salt: bytes
    memory: Reservation


@dataclass(frozen=True)
class Generation:
    """What it takes to have requests answered."""

    admission: Admission
    preparer: Preparer
    dispatcher: Dispatcher
    metrics: Metrics

    @contextlib.asynccontextmanager
    async def answer(self, asked: Asked) -> AsyncIterator[tuple[Answer, AsyncIterator[TokenDelta]]]:
        """Yield an answer and the deltas for it; when the block ends, what is not done is aborted.

        Raises SaccadeError.
        """
        request, served = asked.request, asked.served
        salt = request_salt(asked.tenant_salt, request.cache_salt)
        async with contextlib.AsyncExitStack() as held:
            # Its clock starts here, so that its ttft includes the way of the pixels.
            answer = held.enter_context(Answer(request, served, self.metrics))
            with self.metrics.stage("prepare"):
                # A request that waits for others' servers holds no place.
                pictures = await self.preparer.collect(served, asked.chat, salt, asked.memory)
                held.enter_context(self.admission.admit(asked.tenant_salt))
                draft = await self.preparer.draft(served, request, asked.chat, pictures)
                del pictures
                answer.begin(draft.token_ids)
                sampling = sampling_params(request, served, len(draft.token_ids))
                with self.metrics.stage("route"):
                    placement = held.enter_context(self.dispatcher.place(served.name, len(draft.token_ids)))
                draft = on_wire(served, draft, placement.pixel_dtype, partial(placement.worker.holds, salt))
                await held.enter_async_context(self.admission.pixels(draft.num_pixel_bytes))
                prompt = await self.preparer.prompt(served, draft, salt)
                unsent = held.enter_context(contextlib.ExitStack())
                unsent.callback(self.preparer.give_back, prompt)
                if draft.pictures:
                    # A picture that many waited for is ready for all of them at once.
                    async with self.admission.turn(draft.num_encoded_bytes):
                        pass
                # The worker may ask for pictures that go by their hash; the others are with it.
                supply = PixelSupply(
                    self.preparer, Room(self.admission, held, asked.memory), served, draft.by_hash(), salt
                )
                del draft
            engine_request = EngineRequest(
                request_id=answer.id,
                token_ids=prompt.token_ids,
                sampling=sampling,
                media=prompt.media,
                salt=salt,
                num_samples=len(answer.samples),
            )
            answer.sent_to(placement.worker)
            stream = self.dispatcher.stream(placement, engine_request, supply, on_begin=unsent.pop_all)
            async with contextlib.aclosing(stream) as deltas:
                yield answer, deltas
