"""From a request to the answer that a worker generates: collect pictures, draft, place, prepare pixels, send."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

from saccade.gateway.fleet.dispatch import Dispatcher, Prompt, media_runs
from saccade.gateway.generation.answer import Answer
from saccade.gateway.generation.sampling import sampling_params
from saccade.gateway.http.auth import request_salt
from saccade.gateway.limits.admission import Admission
from saccade.gateway.limits.byte_budget import Reservation
from saccade.gateway.openai.messages import Chat
from saccade.gateway.openai.requests import ChatRequest
from saccade.gateway.pictures.collect import PictureCollector
from saccade.gateway.pictures.pixels import PixelPreparer, PixelResend, PromptPictures
from saccade.gateway.prompt.draft import PromptDrafter
from saccade.gateway.served_models.served_model import ServedModel
from saccade.protocol.output import TokenDelta
from saccade.protocol.request import EngineRequest
from saccade.telemetry import Metrics


@dataclass(frozen=True)
class Asked:
    """A request: its parameters, its chat, its model, the salt of its tenant, and *memory*, which counts its bytes.

    *request* has no messages: its pictures are dropped as soon as they are decoded.
    """

    request: ChatRequest
    chat: Chat
    served: ServedModel
    tenant_salt: bytes
    memory: Reservation


@dataclass(frozen=True)
class Generation:
    """Answers requests."""

    admission: Admission
    prompts: PromptDrafter
    pictures: PictureCollector
    pixels: PixelPreparer
    dispatcher: Dispatcher
    metrics: Metrics

    @contextlib.asynccontextmanager
    async def answer(self, asked: Asked) -> AsyncIterator[tuple[Answer, AsyncIterator[TokenDelta]]]:
        """Yield an answer and the deltas for it; the end of the block aborts an unfinished one. Raises SaccadeError."""
        request, served = asked.request, asked.served
        salt = request_salt(asked.tenant_salt, request.cache_salt)
        async with contextlib.AsyncExitStack() as held:
            # The answer's clock starts here, so that its ttft includes the preparation.
            answer = held.enter_context(Answer(request, served, self.metrics))
            with self.metrics.stage("prepare"):
                # While the request waits for other servers it holds no place.
                pictures = await self.pictures.collect(served, asked.chat.pictures, salt, asked.memory)
                held.enter_context(self.admission.admit(asked.tenant_salt))
                layouts = [picture.layout for picture in pictures]
                num_bytes = sum(len(picture.encoded) for picture in pictures)
                draft = await self.prompts.draft(served, request, asked.chat, layouts, num_bytes)
                answer.begin(draft.token_ids)
                sampling = sampling_params(request, served, len(draft.token_ids))
                hashes = [picture.content_hash for picture in pictures]
                runs = media_runs(zip(hashes, draft.spans, strict=True))
                prompt = Prompt(
                    draft.token_ids,
                    runs,
                    salt,
                    reads_cache=sampling.num_prompt_logprobs is None,
                    max_tokens=sampling.max_tokens,
                    num_samples=len(answer.choices),
                )
                with self.metrics.stage("route"):
                    placement = held.enter_context(self.dispatcher.place(served.name, prompt))
                is_held = partial(placement.worker.holds, salt)
                media = PromptPictures(pictures, draft.spans).on_wire(served.layout, placement.pixel_dtype, is_held)
                del pictures
                await held.enter_async_context(self.admission.pixels(media.num_pixel_bytes))
                items = await self.pixels.prepare(served.family, media, salt)
                unsent = held.enter_context(contextlib.ExitStack())
                unsent.callback(self.pixels.release, items)
                if media.pictures:
                    # Requests that wait for the same picture go on at the same moment; they take turns.
                    async with self.admission.turn(num_bytes):
                        pass
                # The worker may ask for pictures that were sent by their hash; it has the pixels of the others. Of a
                # split request, one worker has the pixels of none.
                resend = PixelResend(
                    self.pixels,
                    served.family,
                    media if placement.split is None else media.all_by_hash(),
                    salt,
                    admission=self.admission,
                    held=held,
                    memory=asked.memory,
                )
                del media
            engine_request = EngineRequest(
                request_id=answer.id,
                token_ids=draft.token_ids,
                sampling=sampling,
                media=items,
                salt=salt,
                num_samples=len(answer.choices),
            )
            answer.sent_to(placement.split or placement.worker)
            stream = self.dispatcher.stream(
                placement, engine_request, resend, on_begin=unsent.pop_all, on_delta=resend.forget
            )
            async with contextlib.aclosing(stream) as deltas:
                yield answer, deltas
