"""From a request to the answer that a worker generates: collect images, draft, place, prepare pixels, send."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec

from saccade.errors import UnsupportedParameter
from saccade.gateway.generation.delivery import AnswerRequest, Delivery, Drafted, Sender
from saccade.gateway.images.collect import Asker, EncodedImage, ImageCollector
from saccade.gateway.images.pixels import PixelPreparer
from saccade.gateway.limits.admission import Admission
from saccade.gateway.limits.byte_budget import Reservation
from saccade.gateway.openai.messages import Chat
from saccade.gateway.openai.requests import ChatRequest
from saccade.gateway.output.answer import Answer
from saccade.gateway.output.sampling import behind_reasoning, sampling_params
from saccade.gateway.prompt.chat_prompt import why_not_as_chat
from saccade.gateway.prompt.draft import PromptDrafter
from saccade.gateway.served_models.served_model import ServedModel
from saccade.gateway.structured_output.grammars import HeldAnswer
from saccade.gateway.tenants.account import Account
from saccade.gateway.tenants.tenant import request_salt
from saccade.gateway.workers.dispatch import Dispatcher, Preview, Prompt, media_runs
from saccade.protocol.output import TokenDelta
from saccade.telemetry import Metrics


@dataclass(frozen=True)
class Asked:
    """A request: its parameters, its chat, its model, its tenant's account, and *memory*, which counts its bytes.

    *request* has no messages: its images are dropped as soon as they are decoded. The answer may be *held* to a
    grammar.
    """

    request: ChatRequest
    chat: Chat
    served: ServedModel
    account: Account
    memory: Reservation
    held: HeldAnswer | None = None


@dataclass(frozen=True)
class Generation:
    """Answers requests."""

    admission: Admission
    prompts: PromptDrafter
    images: ImageCollector
    pixels: PixelPreparer
    dispatcher: Dispatcher
    metrics: Metrics

    @contextlib.asynccontextmanager
    async def answer(self, asked: Asked) -> AsyncIterator[tuple[Answer, AsyncIterator[TokenDelta]]]:
        """Yield an answer and the deltas for it; the end of the block aborts an unfinished one. Raises SaccadeError."""
        served = asked.served
        async with contextlib.AsyncExitStack() as held:
            # The answer's clock starts here, so that its ttft includes the preparation.
            answer = Answer(asked.request, asked.chat, served, self.metrics, asked.account)
            held.enter_context(answer)
            with self.metrics.stage("prepare"):
                salt = request_salt(asked.account.tenant.salt, asked.request.cache_salt)
                asked.account.begin_images(len(asked.chat.images))
                # While the request waits for other servers it holds no place.
                images = await self.images.collect(served, asked.chat.images, _asker(asked, salt), asked.memory)
                asked.account.use_images(sum(len(image.encoded) for image in images))
                held.enter_context(self.admission.admit(asked.account.tenant.id))
                drafted = await self._draft(asked, images, salt)
                asked.account.use_prompt(len(drafted.draft.token_ids))
                answer.begin(drafted.draft.token_ids)
                sender = Sender(self.admission, self.pixels, self.dispatcher, self.metrics)
                request = AnswerRequest(answer.id, len(answer.choices), served, drafted)
                delivery = Delivery(sender, request, tuple(images), asked.memory)
                # The delivery drops the images as soon as it can.
                del images
                held.push_async_callback(delivery.close)
                answer.sent_to(await delivery.prepare())
            async with contextlib.aclosing(delivery.deltas(answer.sent_to)) as deltas:
                yield answer, deltas

    async def preview(self, asked: Asked) -> Preview:
        """Return where a request would go now, by the steps of answer() up to the choice. Raises SaccadeError.

        Nothing is booked, and no pixel is decoded.
        """
        salt = request_salt(asked.account.tenant.salt, asked.request.cache_salt)
        images = await self.images.collect(asked.served, asked.chat.images, _asker(asked, salt), asked.memory)
        with self.admission.admit(asked.account.tenant.id):
            drafted = await self._draft(asked, images, salt)
            return await self.dispatcher.preview(asked.served.name, drafted.prompt)

    async def _draft(self, asked: Asked, images: Sequence[EncodedImage], salt: bytes) -> Drafted:
        layouts = [image.layout for image in images]
        num_bytes = sum(len(image.encoded) for image in images)
        some_take_chats, all_take_chats = self.dispatcher.takers_of_chats(asked.served.name)
        draft = await self.prompts.draft(
            asked.served, asked.request, asked.chat, layouts, num_bytes, as_vllm_chat=all_take_chats
        )
        sampling = sampling_params(asked.request, asked.served, draft.token_ids)
        if asked.held is not None:
            grammar = behind_reasoning(asked.held.grammar, asked.served, draft.token_ids)
            sampling = msgspec.structs.replace(sampling, grammar=grammar)
        runs = media_runs(zip((image.content_hash for image in images), draft.spans, strict=True))
        settings = [image.settings for image in images]
        prompt = Prompt(
            draft.token_ids,
            runs,
            salt,
            reads_cache=sampling.num_prompt_logprobs is None,
            num_samples=asked.request.n or 1,
            needs_token_ids=why_not_as_chat(asked.served, asked.chat, settings) if some_take_chats else None,
            sampling=sampling,
            needs_grammars=None if asked.held is None else _not_held(asked.held.param),
            tenant=asked.account.tenant,
        )
        return Drafted(draft, sampling, prompt, asked.chat)


def _asker(asked: Asked, salt: bytes) -> Asker:
    return Asker(asked.account.tenant.id, salt)


def _not_held(param: str) -> UnsupportedParameter:
    field = param.split(".")[0]
    return UnsupportedParameter(
        f"`{field}` is not served by this model's workers, which cannot hold answers to a grammar; leave it out.", field
    )
