"""A request on its way to a worker: placed, its pixels prepared, sent; and to another worker where the first fails."""

import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial

from saccade.errors import SaccadeError, WorkerFailed, WorkerUnavailable
from saccade.gateway.images.collect import EncodedImage
from saccade.gateway.images.pixels import PixelPreparer, PixelResend, PromptImages
from saccade.gateway.limits.admission import Admission
from saccade.gateway.limits.byte_budget import Reservation
from saccade.gateway.openai.messages import Chat
from saccade.gateway.prompt.chat_prompt import chat_prompt
from saccade.gateway.prompt.draft import Draft
from saccade.gateway.served_models.served_model import ServedModel
from saccade.gateway.workers.dispatch import Dispatcher, Placement, Prompt
from saccade.gateway.workers.worker import Answering, takes_chats_only
from saccade.protocol.chat import ChatPrompt
from saccade.protocol.media import MediaItem
from saccade.protocol.output import TokenDelta
from saccade.protocol.request import EngineRequest, SamplingParams
from saccade.telemetry import Metrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drafted:
    """A request as it stands before the choice of a worker: *prompt* is what the choice looks at.

    *chat* is for workers that take no token ids.
    """

    draft: Draft
    sampling: SamplingParams
    prompt: Prompt
    chat: Chat


@dataclass(frozen=True)
class AnswerRequest:
    """*num_samples* answers to a drafted request for a model, which workers know as *request_id*."""

    request_id: str
    num_samples: int
    served: ServedModel
    drafted: Drafted


@dataclass(frozen=True)
class Sender:
    """What a delivery needs of the gateway."""

    admission: Admission
    pixels: PixelPreparer
    dispatcher: Dispatcher
    metrics: Metrics


@dataclass(frozen=True)
class _Attempt:
    """A request at one worker, ready to be sent; *unsent* gives back its slots if it is not.

    With *chat* it goes as that, and its media have no pixels.
    """

    placement: Placement
    request: EngineRequest
    resend: PixelResend
    unsent: contextlib.ExitStack
    chat: ChatPrompt | None


class Delivery:
    """Sends a request to a worker, and relays its deltas.

    Until the first of them, the encoded *images* are kept where another worker could be tried: pixels are prepared
    anew for each. *memory* counts them. Call prepare() before deltas(), and close() at the end, whatever was raised.
    """

    def __init__(
        self, sender: Sender, request: AnswerRequest, images: tuple[EncodedImage, ...], memory: Reservation
    ) -> None:
        self._sender = sender
        self._request = request
        self._served = request.served
        self._drafted = request.drafted
        self._images = images
        self._memory = memory
        self._has_begun = False
        self._can_retry = False
        self._failed: frozenset[str] = frozenset()
        self._held = contextlib.AsyncExitStack()
        self._attempt: _Attempt | None = None

    async def prepare(self) -> Answering:
        """Choose a worker or a pair, return it, and prepare pixels for it; nothing is sent yet. Raises SaccadeError."""
        sender, drafted = self._sender, self._drafted
        with sender.metrics.stage("route"):
            place = sender.dispatcher.place(self._served.name, drafted.prompt, self._failed)
            placement = await self._held.enter_async_context(place)
        self._can_retry = sender.dispatcher.can_retry(self._served.name, self._failed | {placement.worker.url})
        chat = self._chat() if takes_chats_only(placement.worker) else None
        is_held = partial(placement.worker.holds, drafted.prompt.salt) if chat is None else _needs_no_pixels
        media = PromptImages(self._images, drafted.draft.spans)
        if not self._can_retry:
            self._images = ()
        media = media.on_wire(self._served.layout, placement.pixel_dtype, is_held)
        items = await self._pixels(media)
        unsent = self._held.enter_context(contextlib.ExitStack())
        unsent.callback(sender.pixels.release, items)
        await self._take_turn(media)
        # The worker may ask for images that were sent by their hash; it has the pixels of the others. The decode
        # worker of a pair has the pixels of none.
        resend = PixelResend(
            sender.pixels,
            self._served.family,
            media if placement.pair is None else media.all_by_hash(),
            drafted.prompt.salt,
            admission=sender.admission,
            held=self._held,
            memory=self._memory,
            keeps_all=self._can_retry,
        )
        request = EngineRequest(
            request_id=self._request.request_id,
            token_ids=drafted.draft.token_ids,
            sampling=drafted.sampling,
            media=items,
            salt=drafted.prompt.salt,
            num_samples=self._request.num_samples,
        )
        self._attempt = _Attempt(placement, request, resend, unsent, chat)
        return placement.pair or placement.worker

    async def close(self) -> None:
        """End what is prepared or sent: its place and its pixels."""
        self._attempt = None
        held, self._held = self._held, contextlib.AsyncExitStack()
        await held.aclose()

    async def deltas(self, on_worker: Callable[[Answering], object]) -> AsyncGenerator[TokenDelta, None]:
        """Send the request and yield its deltas; *on_worker* is told of a worker that takes the place of another.

        Raises what Dispatcher.stream() does: of the last worker, where another was tried.
        """
        while True:
            try:
                async with contextlib.aclosing(self._stream()) as deltas:
                    async for delta in deltas:
                        yield delta
                return
            except (WorkerFailed, WorkerUnavailable) as error:
                worker = await self._move(error)
                if worker is None:
                    raise
                on_worker(worker)

    def _stream(self) -> AsyncGenerator[TokenDelta, None]:
        if self._attempt is None:
            raise RuntimeError("prepare() comes before deltas()")
        attempt = self._attempt
        return self._sender.dispatcher.stream(
            attempt.placement,
            attempt.request,
            attempt.resend,
            on_begin=attempt.unsent.pop_all,
            on_delta=lambda: self._begun(attempt),
            chat=attempt.chat,
        )

    def _begun(self, attempt: _Attempt) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._images = ()
            # A chat keeps its images, so they stay counted; a decode worker may ask for any of them.
            if attempt.chat is None and attempt.placement.pair is None:
                attempt.resend.forget()

    async def _move(self, error: WorkerFailed | WorkerUnavailable) -> Answering | None:
        """Prepare the request for another worker and return that; None where *error* stands."""
        attempt, model = self._attempt, self._served.name
        if attempt is None or self._has_begun or not self._can_retry:
            return None
        failed = attempt.placement.failed_worker.url
        self._failed |= {failed}
        await self.close()
        try:
            worker = await self.prepare()
        except SaccadeError as another:
            reason = another.reason
            logger.info(
                "request %s: worker %s failed, and no other took it: %s", self._request.request_id, failed, reason
            )
            return None
        self._sender.dispatcher.num_retried[model] += 1
        logger.warning("request %s: worker %s failed: %s", self._request.request_id, failed, error.reason)
        return worker

    def _chat(self) -> ChatPrompt:
        return chat_prompt(self._served, self._drafted.chat, [image.encoded for image in self._images])

    async def _pixels(self, media: PromptImages) -> tuple[MediaItem, ...]:
        await self._held.enter_async_context(self._sender.admission.pixels(media.num_pixel_bytes))
        salt = self._drafted.prompt.salt
        return await self._sender.pixels.prepare(self._served.family, media, salt, self._memory.client)

    async def _take_turn(self, media: PromptImages) -> None:
        """Take turns with requests that waited for the same image: they go on at the same moment."""
        if media.images:
            async with self._sender.admission.turn(media.num_encoded_bytes):
                pass


def _needs_no_pixels(_: bytes) -> bool:
    return True
