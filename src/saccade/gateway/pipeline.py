"""The stages of a chat: read it, collect images, build the prompt, place it, prepare pixels, send, stream."""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import msgspec
from msgspec import UNSET

from saccade.errors import SaccadeError, WorkerFailed, WorkerUnavailable
from saccade.fleet.attempt import Attempt, Output
from saccade.fleet.dispatch import Dispatcher, Preview
from saccade.fleet.prompt import Prompt, media_runs
from saccade.gateway.chat import Chat, PlainPrompt
from saccade.gateway.chat_request import ChatRequest, TokenizeRequest
from saccade.gateway.images.collect import ImageCollector
from saccade.gateway.images.encoded_image import EncodedImage, num_encoded_bytes, with_pages
from saccade.gateway.images.pixel_resend import PixelResend
from saccade.gateway.images.pixels import PixelPreparer
from saccade.gateway.images.prompt_images import PromptImages
from saccade.gateway.output.answer import Answer
from saccade.gateway.output.sampling import TokenRules, sampling_params, token_rules
from saccade.gateway.prompt.chat_prompt import chat_prompt, errors_as_chat
from saccade.gateway.prompt.conversation import conversation_of
from saccade.gateway.prompt.prompt_builder import PromptBuilder, is_long
from saccade.gateway.request import Request
from saccade.gateway.served_models.model_registry import ModelRegistry
from saccade.gateway.served_models.served_model import ServedModel
from saccade.gateway.structured_output.constraint import Constraint, read_constraint, with_calls, without_constraint
from saccade.gateway.structured_output.grammars import AnswerGrammar, RequestGrammars
from saccade.gateway.tenants.account import request_salt
from saccade.protocol.request import EngineRequest
from saccade.telemetry import Metrics
from saccade.tracing.trace import TRACE

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RequestPart:
    """One prompt of a request."""

    params: ChatRequest
    """Without messages, so that images are dropped as soon as they are decoded."""
    chat: Chat
    served: ServedModel
    salt: bytes
    """Separates its caches from those of other tenants."""
    rules: TokenRules
    """The answer keeps them. All parts of a request share them, and *answer_grammar*."""
    answer_grammar: AnswerGrammar | None = None
    """The answer must match it."""
    priority: int = 0
    """That of the request; 0 if the server serves none."""


@dataclass(frozen=True)
class Pipeline:
    """Reads requests, over HTTP or from Python, and answers their parts.

    Each stage is a method; the fields do the work.
    """

    model_registry: ModelRegistry
    prompts: PromptBuilder
    grammars: RequestGrammars
    images: ImageCollector
    dispatcher: Dispatcher
    pixels: PixelPreparer
    metrics: Metrics

    def read_chat(
        self, request: Request, params: ChatRequest, prompts: Sequence[PlainPrompt] = ()
    ) -> Awaitable[list[RequestPart]]:
        """Do the quick part of reading a chat, or several plain *prompts* that share its parameters.

        The caller awaits the result after its turn, and gets a RequestPart for each prompt. From then on, *request*
        holds memory only for the chat. Both steps raise SaccadeError.
        """
        constraint = read_constraint(params)
        params = without_constraint(params)
        served = self.model_registry.get(params.model)
        request.charge.model = served.name
        chat = None if prompts or is_long(params) else self.prompts.read_chat(served, params)
        return self._parts(request, params, prompts, constraint, served, chat)

    async def _parts(
        self,
        request: Request,
        params: ChatRequest,
        prompts: Sequence[PlainPrompt],
        constraint: Constraint | None,
        served: ServedModel,
        chat: Chat | None,
    ) -> list[RequestPart]:
        if chat is not None:
            chats = [chat]
        elif prompts:
            chats = await self.prompts.read_plain(served, params, prompts)
        else:
            chats = [await self.prompts.read_long(served, params)]
        tokens = served.tool_calls if chats[0].plain is None else None
        constraint = with_calls(constraint, params, chats[0].tools, tokens)
        # Nothing else has the messages, so they are dropped here.
        params = msgspec.structs.replace(params, messages=[])
        request.keep_chat()
        salt, answer_grammar = request_salt(request.tenant.salt, params.cache_salt), None
        rules = token_rules(params, served)
        if constraint is not None:
            answer_grammar = await self.grammars.grammar_of(constraint, salt, request.client, request.tenant.priority)
        priority = (params.priority or 0) if self.dispatcher.limits.takes_priorities else 0
        return [RequestPart(params, one, served, salt, rules, answer_grammar, priority) for one in chats]

    async def answer(self, request: Request, part: RequestPart, deliver: Callable[[Answer], Output]) -> None:
        """Send *part* to a worker, and pass the worker's deltas to the delivery that *deliver* returns for the answer.

        If a worker fails before the first delta, try another. Cancellation aborts the answer. Raises SaccadeError; if
        several workers fail, this is the last one's error.
        """
        begun_at = time.perf_counter()
        async with AsyncExitStack() as resources:
            with self.metrics.stage("prepare"):
                # A request that waits for other servers holds no place.
                images = await self._collect(request, part.served, part.chat, part.salt)
                resources.enter_context(request.place())
                prompt = await self._build_prompt(request, part, images)
                request.account.use_prompt(len(prompt.token_ids), part.served.name)
                answer = resources.enter_context(self._open(request, part, prompt, images, begun_at))
                output = deliver(answer)
                of_attempt = await resources.enter_async_context(AsyncExitStack())
                work = _Work(request, part, prompt, images, output, answer.id)
                attempt = await self._attempt(of_attempt, work)
            while True:
                answer.sent_to(attempt.placement.url, attempt.abort_sample)
                try:
                    return await attempt.run()
                except (WorkerFailed, WorkerUnavailable) as error:
                    if attempt.has_begun or not attempt.placement.can_retry:
                        raise
                    worker = attempt.placement.failed_worker.url
                    work.prompt = replace(work.prompt, excluded=work.prompt.excluded | {worker})
                    await of_attempt.aclose()
                    try:
                        attempt = await self._attempt(of_attempt, work)
                    except SaccadeError as other:
                        logger.info(
                            "request %s: worker %s failed, and no other took it: %s", answer.id, worker, other.reason
                        )
                        raise error from None
                    self.dispatcher.num_retried[part.served.name] += 1
                    logger.warning("request %s: worker %s failed: %s", answer.id, worker, error.reason)

    def _open(
        self, request: Request, part: RequestPart, prompt: Prompt, images: Sequence[EncodedImage], begun_at: float
    ) -> Answer:
        """Return the answer to *part*, still empty."""
        start = time.perf_counter()
        layouts = [image.layout for image in images]
        answer = Answer(
            part.params,
            part.chat,
            part.served,
            prompt.token_ids,
            list(zip(layouts, prompt.spans, strict=True)),
            metrics=self.metrics,
            account=request.account,
            begun_at=begun_at,
        )
        self.metrics.note_pause("choices", start)
        return answer

    async def preview(self, request: Request, part: RequestPart) -> Preview:
        """Return where *part* would go now, without booking, charging or decoding anything. Raises SaccadeError."""
        images = await self.images.collect_images(request, part.served, part.chat.images, part.salt)
        with request.place():
            return await self.dispatcher.preview(part.served.name, await self._build_prompt(request, part, images))

    async def count(self, request: Request, part: RequestPart) -> int:
        """Return the number of tokens in the prompt of *part*. Raises SaccadeError, as for an answer."""
        images = await self._collect(request, part.served, part.chat, part.salt)
        with request.place():
            return len((await self._build_prompt(request, part, images)).token_ids)

    async def token_ids(self, request: Request, served: ServedModel, params: TokenizeRequest) -> tuple[list[int], str]:
        """Return the token ids of a chat's prompt, with images expanded, and a warning or "". Raises SaccadeError."""
        chat = await self.prompts.read_long(served, params)
        request.keep_chat()
        images = await self._collect(request, served, chat, request.tenant.salt)
        with request.place():
            layouts = [image.layout for image in images]
            built = await self.prompts.build_prompt(
                served, params, with_pages(chat, images), layouts, num_encoded_bytes(images), salt=request.tenant.salt
            )
            return built.token_ids, chat.warning

    async def _collect(self, request: Request, served: ServedModel, chat: Chat, salt: bytes) -> list[EncodedImage]:
        """Collect the images of *chat*, and charge the tenant for them. Raises a RequestError that names the field."""
        num_frames = sum(source.num_fetched_frames for source in chat.images if source.frames)
        request.account.begin_images(len(chat.images) + num_frames)
        images = await self.images.collect_images(request, served, chat.images, salt)
        request.account.use_images(num_encoded_bytes(images), served.name)
        return images

    async def _build_prompt(self, request: Request, part: RequestPart, images: Sequence[EncodedImage]) -> Prompt:
        """Return the prompt, on which the choice of a worker depends. Raises a RequestError that names the field."""
        params, served = part.params, part.served
        lacks = self.dispatcher.lacks(served.name)
        layouts = [image.layout for image in images]
        chat = with_pages(part.chat, images)
        built = await self.prompts.build_prompt(
            served, params, chat, layouts, num_encoded_bytes(images), lacks=lacks.of_all, salt=part.salt
        )
        grammar = part.answer_grammar
        of_answer = None if grammar is None else grammar.grammar
        sampling = sampling_params(params, served, part.rules, built.token_ids, of_answer)
        settings = [image.settings for image in images]
        limits = [field for image in images for field in image.limits]
        errors = {
            **errors_as_chat(served, chat, settings, limits, lacks.of_some),
            **({} if grammar is None else grammar.errors),
        }
        return Prompt(
            token_ids=built.token_ids,
            runs=media_runs(zip((image.content_hash for image in images), built.spans, strict=True)),
            salt=part.salt,
            spans=built.spans,
            reads_cache=sampling.num_prompt_logprobs is None,
            num_samples=params.n or 1,
            sampling=sampling,
            errors=errors,
            tenant=request.tenant.id,
            tenant_priority=request.tenant.priority,
            priority=part.priority,
            conversation=conversation_of(chat, [image.content_hash for image in images]),
            is_background=request.is_background,
        )

    async def _attempt(self, resources: AsyncExitStack, work: "_Work") -> Attempt:
        """Place the prompt of *work* with a worker that it does not exclude, and prepare its pixels.

        Nothing is sent yet. *resources* takes over whatever the attempt holds. An attempt that cannot be retried drops
        the images of *work*. Raises SaccadeError.
        """
        request, part, prompt, images = work.request, work.part, work.prompt, work.images
        served = part.served
        with self.metrics.stage("route"):
            placement = await resources.enter_async_context(self.dispatcher.place(served.name, prompt))
        if not self.model_registry.is_current(served):
            raise WorkerUnavailable("The model's workers have changed; send the request again.")
        media = PromptImages(tuple(images), prompt.spans).on_wire(
            served.layout, placement.pixel_dtype, placement.needs_pixels
        )
        if not (placement.can_retry or placement.keeps_images):
            images.clear()
        resources.enter_context(await request.pixels(media.num_pixel_bytes))
        items = await self.pixels.prepare_images(served.family, media, prompt.salt, request.client)
        trace = TRACE.get()
        engine_request = EngineRequest(
            request_id=work.request_id,
            token_ids=prompt.token_ids,
            sampling=prompt.sampling,
            media=items,
            salt=prompt.salt,
            num_samples=prompt.num_samples,
            num_at_once=UNSET if prompt.num_samples <= placement.num_at_once else placement.num_at_once,
            priority=placement.priority or UNSET,
            traceparent=UNSET if trace is None else trace.traceparent,
        )
        # The worker may ask for images that were sent by their hash; it has the pixels of the others.
        resendable = media.all_by_hash() if placement.keeps_images else media
        resend = PixelResend(
            preparer=self.pixels,
            family=served.family,
            media=resendable,
            salt=prompt.salt,
            request=request,
            resources=resources,
            keeps_all=placement.can_retry,
        )

        def forget_images() -> None:
            images.clear()
            if not placement.keeps_images:
                resend.forget_images()

        attempt = Attempt(
            sender=self.dispatcher.sender,
            placement=placement,
            request=engine_request,
            output=work.output,
            count=request.count_waiting,
            resend=resend,
            on_first_delta=forget_images,
            chat=lambda: chat_prompt(served, part.chat, [image.encoded for image in images]),
        )
        resources.callback(attempt.release_unsent)
        if media.images:
            # Requests that waited for the same image continue at the same moment.
            async with request.turn(num_encoded_bytes(media.images)):
                pass
        return attempt


@dataclass
class _Work:
    """State that all attempts to answer a part share.

    *prompt* excludes the workers of those that failed. *images* are dropped when no attempt needs them any more.
    """

    request: Request
    part: RequestPart
    prompt: Prompt
    images: list[EncodedImage]
    output: Output
    request_id: str
