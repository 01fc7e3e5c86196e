"""Waits until a worker has room for an engine request, chooses and books a worker, and sends the request there."""

import asyncio
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from saccade.connectors.sink import Sink, Stream
from saccade.errors import InternalError, WorkerFailed, WorkerUnavailable
from saccade.fair_queue import Background, FairQueue
from saccade.fleet.bits import members_of
from saccade.fleet.cost import NUM_REQUESTS
from saccade.fleet.decision_metrics import DecisionMetrics
from saccade.fleet.index import BlockIndex, Partition, image_key
from saccade.fleet.legs import Pair
from saccade.fleet.lookup import LocalLookup, Lookup, Overlaps
from saccade.fleet.places import UNBOUNDED
from saccade.fleet.pool import Model, WorkerPool
from saccade.fleet.prompt import Prompt
from saccade.fleet.prompt_keys import PromptKeys
from saccade.fleet.router import Booking, RoutedImage, RoutedPrompt, Router, RoutingChoice
from saccade.fleet.serving import Serving, option_of
from saccade.fleet.settings import DEFAULT_LIMITS, DispatchLimits, RoutingSettings
from saccade.fleet.worker import Worker
from saccade.identity.blocks import root_key
from saccade.protocol.chat import ChatPrompt
from saccade.protocol.media import MediaItem
from saccade.protocol.needs import Lacks
from saccade.protocol.request import MAX_NUM_SAMPLES, EngineRequest, MediaPixels
from saccade.transport import shared_memory

logger = logging.getLogger(__name__)

M = TypeVar("M", MediaItem, MediaPixels)


ADVANCE_SECONDS = 1.0
"""How often waiting requests are checked. A breaker can open a place without an event."""


@dataclass(frozen=True)
class Placement:
    """The worker that a request for *model* goes to; *pixel_dtype* is the dtype in which it takes pixels.

    With a *pair*, *worker* is its prefill worker. *keeps_images*: the images are needed until the answer's end.
    *held_share* is the share of the prompt that the worker held, or None if unknown. It is expected to have the images
    with the content hashes *held_images*. *can_retry*: if the worker fails, another one may be tried. *takes_chat*: the
    worker gets the chat, which has the images, instead of token ids. *num_at_once* is how many samples of the request
    may run at a time, *priority* its priority in the worker's queue.
    """

    worker: Worker
    pixel_dtype: str
    booking: Booking | None = None
    pair: Pair | None = None
    model: str = ""
    held_share: float | None = None
    held_images: frozenset[bytes] = frozenset()
    can_retry: bool = False
    takes_chat: bool = False
    keeps_images: bool = False
    num_at_once: int = MAX_NUM_SAMPLES
    priority: int = 0

    @property
    def url(self) -> str:
        """The url of the worker, or both of the pair, for the log."""
        return (self.pair or self.worker).url

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The worker, or both of the pair."""
        return (self.worker,) if self.pair is None else self.pair.workers

    def needs_pixels(self, content_hash: bytes) -> bool:
        """Return whether the worker needs the pixels of an image."""
        return not (self.takes_chat or content_hash in self.held_images)

    @property
    def failed_worker(self) -> Worker:
        """The worker that did not answer."""
        return self.worker if self.pair is None else self.pair.failed_worker

    def first_token(self) -> None:
        """Record that the prompt is computed."""
        if self.booking is not None:
            self.booking.first_token()
        if self.pair is not None:
            self.pair.on_first_token()


@dataclass(frozen=True)
class Preview:
    """Where *prompt* would go now."""

    model: Model
    prompt: Prompt
    choice: RoutingChoice


class Dispatcher:
    """Sends each request to the worker of *worker_pool* that *router* chooses, given the overlaps from *lookup*.

    *metrics* records choices between several workers. *num_placed* counts requests by the worker's url, *num_retried*
    by model those that were sent to another worker.
    """

    def __init__(
        self,
        worker_pool: WorkerPool,
        router: Router | None = None,
        metrics: DecisionMetrics | None = None,
        limits: DispatchLimits = DEFAULT_LIMITS,
        lookup: Lookup | None = None,
    ) -> None:
        self.limits = limits
        self.num_placed: Counter[str] = Counter()
        self.num_retried: Counter[str] = Counter()
        self._queues: dict[str, FairQueue] = {}
        self._num_booked: Counter[str] = Counter()
        self._served: dict[str, Serving] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._worker_pool = worker_pool
        self._router = router or Router("auto", BlockIndex(RoutingSettings.routing_index_bytes), Random())
        self._lookup = lookup or LocalLookup(self._router.index)
        self._metrics = metrics or DecisionMetrics(CollectorRegistry(), lambda worker: worker.state.exactness)
        self.prompt_keys = PromptKeys()
        # Workers other than Saccade's do not report which user they run as.
        self._namespaces = (shared_memory.readers(), shared_memory.namespace())
        worker_pool.on_change(self.advance)
        worker_pool.on_load(self._note_load)
        worker_pool.on_forget(self._forget)

    @property
    def num_waiting(self) -> int:
        """How many requests wait for a worker."""
        return sum(queue.num_waiting for queue in self._queues.values())

    @property
    def num_requests(self) -> int:
        return int(self._router.work[NUM_REQUESTS].sum())

    def num_requests_at(self, worker: str) -> int:
        """Return how many requests are booked at the worker with the url *worker*."""
        return self._router.work_of(worker).num_requests

    async def _forget(self, worker: str) -> None:
        self._router.forget(worker)
        self._metrics.forget(worker)
        del self.num_placed[worker]

    def release(self, slots: Sequence[str]) -> None:
        """Release *slots* that were not sent."""
        self._worker_pool.release(slots)

    def lacks(self, model: str) -> Lacks:
        """Return the needs that workers of *model* cannot serve. Raises as place() does."""
        return self._serving(model).lacks

    async def preview(self, model: str, prompt: Prompt) -> Preview:
        """Return where place() would put a prompt now. Raises ModelNotFound and WorkerUnavailable."""
        serving = self._serving(model)
        routed = await self._routed(serving, prompt, prompt.num_samples)
        return Preview(serving.model, prompt, self._router.preview(routed, time.monotonic()))

    @asynccontextmanager
    async def place(self, model: str, prompt: Prompt) -> AsyncIterator[Placement]:
        """Choose a worker for a prompt, and book it there until the block ends.

        If every worker is at its limit, wait until one is not: one free place is enough. A request weighs as much as it
        has samples, or what its tenant may hold if that is less; no more samples run at a time. Raises ModelNotFound,
        WorkerUnavailable, QueueFull, and the prompt's own error if no worker can take it.
        """
        serving = self._serving(model)
        name, queue = serving.model.name, self._queue_of(serving.model.name)
        weight = min(prompt.num_samples, serving.most_rows)
        with ExitStack() as booked:
            self._advance_later()
            client = Background(prompt.tenant) if prompt.is_background else prompt.tenant
            turn = await queue.enter(client, weight, prompt.tenant_priority, prompt, prompt.priority)
            # The end of the turn lets others have its place, when all else is given back.
            booked.enter_context(turn)
            serving = self._serving(model)
            routed = await self._routed(serving, prompt, turn.weight)
            self._num_booked[name] += turn.weight
            booked.callback(self._num_booked.subtract, {name: turn.weight})
            start = time.perf_counter()
            worker, booking = self._book(serving, routed, booked)
            self.num_placed[worker.url] += 1
            held_share = None
            if len(routed.rows) > 1:
                seconds = time.perf_counter() - start
                held_share = self._metrics.observe(serving.model, worker, len(prompt.token_ids), booking, seconds)
            state, pair = worker.state, None
            description = state.description
            if description is not None and description.role == "prefill":
                pair = await self._pair(serving, worker, booking, prompt, booked)
            hashes = (run.content_hash for run in prompt.runs)
            tried, takes_chat = {*prompt.excluded, worker.url}, state.takes_chats
            yield Placement(
                worker=worker,
                pixel_dtype=description.pixel_dtype if description else "uint8",
                booking=booking,
                pair=pair,
                model=name,
                held_share=held_share,
                held_images=frozenset(itertools.compress(hashes, booking.has_images.tolist())),
                can_retry=len(tried) <= self.limits.max_retries and serving.is_left(tried),
                takes_chat=takes_chat,
                # A chat has them, and a pair may ask for any of them.
                keeps_images=takes_chat or pair is not None,
                num_at_once=turn.weight,
                # A worker knows no tenants: at several, a request would overtake those of others there.
                priority=prompt.priority if self.limits.client_share == 1 else 0,
            )

    def advance(self) -> None:
        """Let requests that wait go on if a worker has room for them."""
        for queue in self._queues.values():
            queue.advance()

    def _queue_of(self, model: str) -> FairQueue:
        """Return the queue of *model*; a request keeps its turn until its answer ends."""
        if model not in self._queues:
            self._queues[model] = FairQueue(
                UNBOUNDED,
                "requests to busy workers",
                max_waiting=self.limits.max_waiting,
                wait_seconds=self.limits.wait_seconds,
                client_capacity=partial(self._num_rows_for_one, model) if self.limits.client_share < 1 else None,
                client_share=self.limits.client_share,
                obstacle_to=partial(self._obstacle_to, model),
            )
        return self._queues[model]

    def _serving(self, model: str) -> Serving:
        """Return the workers of *model* as they are now. Raises ModelNotFound and WorkerUnavailable."""
        now = self._worker_pool.model(model)
        serving = self._served.get(now.name)
        if serving is None or serving.model is not now:
            serving = self._served[now.name] = Serving(now, self._router, self.limits)
        return serving

    def _note_load(self, worker: Worker) -> None:
        if (description := worker.state.description) is not None and description.model in self._served:
            self._router.describe(option_of(worker, self._served[description.model].model))

    def _obstacle_to(self, model: str, prompt: object) -> Hashable:
        """Return what keeps *prompt*, a request's in the queue, from a worker, if all are full: the key of these.

        Raises ModelNotFound, WorkerUnavailable, and the prompt's own error if no worker can take it.
        """
        if not isinstance(prompt, Prompt):
            return None
        serving = self._serving(model)
        places = serving.takers_of(prompt, time.monotonic())
        # Some requests have their turn but are not booked yet.
        if serving.num_free(places).sum() > self._queues[model].weight - self._num_booked[model]:
            return None
        return serving.key_of(prompt, places)

    async def _routed(self, serving: Serving, prompt: Prompt, num_at_once: int) -> RoutedPrompt:
        """Look up *prompt* at the workers that may get it and have room, or at all that may if none has.

        If decode workers lack little of it, they are these workers.
        """
        if serving.has_pairs and self.limits.disaggregation_min_tokens:
            alone = await self._alone(serving, prompt, num_at_once)
            if alone is not None:
                return alone
        places = serving.takers_of(prompt, time.monotonic())
        with_room = places[serving.num_free(places) > 0]
        return await self._look_up(serving, with_room if len(with_room) else places, prompt, num_at_once)

    def _num_rows_for_one(self, model: str, num_of_others: int) -> int:
        """Return how many rows at workers of *model* one tenant may hold if others hold *num_of_others*."""
        return max(1, math.ceil(self.limits.client_share * (self._served[model].num_rows - num_of_others)))

    def _advance_later(self) -> None:
        """Advance every ADVANCE_SECONDS as long as requests wait."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(ADVANCE_SECONDS, self._advance_again)

    def _advance_again(self) -> None:
        self._timer = None
        self.advance()
        if self.num_waiting:
            self._advance_later()

    def _book(self, serving: Serving, prompt: RoutedPrompt, booked: ExitStack) -> tuple[Worker, Booking]:
        """Book *prompt* at one of its workers, until *booked* closes or earlier."""
        booking = self._router.book(prompt, time.monotonic())
        booked.callback(lambda: booking.close(time.monotonic()))
        return serving.worker(booking.worker), booking

    async def _alone(self, serving: Serving, prompt: Prompt, num_at_once: int) -> RoutedPrompt | None:
        """Return the decode workers that lack too little of *prompt* for a prefill worker; None if there are none.

        Dynamo's and llm-d's gateways do the same, as conditional disaggregation.
        """
        places = serving.decoders_of(prompt, time.monotonic())
        if not len(places):
            return None
        routed = await self._find(serving, places, prompt, num_at_once)
        num_left = self._router.num_left(routed, time.monotonic())
        few = (num_left < self.limits.disaggregation_min_tokens).nonzero()[0]
        return routed.among(routed.rows[few], routed.overlaps.at(few)) if len(few) else None

    async def _pair(
        self, serving: Serving, first: Worker, at_first: Booking, prompt: Prompt, booked: ExitStack
    ) -> Pair | None:
        """Also book *prompt* at a decode worker for *first*, a prefill worker; return None if it serves alone."""
        places = serving.partners_of(first, prompt, time.monotonic())
        if not len(places):
            return None
        routed = await self._look_up(serving, places, prompt, prompt.num_samples)
        second, booking = self._book(serving, routed, booked)

        def end_prefill() -> None:
            at_first.first_token()
            at_first.close(time.monotonic())
            self.advance()

        return Pair((first, second), end_prefill, booking.first_token)

    async def send(
        self, placement: Placement, request: EngineRequest, sink: Sink, chat: Callable[[], ChatPrompt]
    ) -> Stream:
        """Send *request* with pixels that the worker can read; its deltas go to *sink*.

        A worker that takes chats gets what *chat* returns. The worker pool releases every slot of *request*, even if
        this raises. Raises WorkerUnavailable and the errors of connectors.
        """
        worker = placement.worker
        request = msgspec.structs.replace(request, media=await self.reachable(worker, request.media))
        return (placement.pair or worker).generate(request, sink, chat)

    def begun(self, placement: Placement, request: EngineRequest) -> None:
        """Record the first token of *request*, whose images have arrived at *placement*."""
        placement.first_token()
        if request.media and (max_bytes := placement.worker.state.kept_image_bytes):
            images = ((image_key(request.salt, item.content_hash), _num_bytes(item)) for item in request.media)
            self._router.kept_images.note_sent(self._router.row_of(placement.worker.url), images, max_bytes)
        self._metrics.first_token(placement.model, placement.held_share)
        for worker in placement.workers:
            if self._router.breakers.succeeded(worker.url):
                logger.info("routing: worker %s answers again and gets requests", worker.url)

    def failed(self, worker: Worker, error: WorkerFailed | WorkerUnavailable) -> None:
        """Record that a request failed at *worker* before its first token."""
        now, breakers = time.monotonic(), self._router.breakers
        if breakers.failed(worker.url, error.reason, now):
            report = breakers.report(worker.url, now)
            logger.warning(
                "routing: worker %s gets no requests for %.0f s: %s", worker.url, report.wait_seconds, report.reason
            )

    def lacked_images(self, worker: str) -> None:
        """Record that the worker with this url asked for images that it was expected to hold."""
        self._router.kept_images.note_missed(self._router.row_of(worker))

    async def _look_up(
        self, serving: Serving, places: NDArray[np.intp], prompt: Prompt, num_at_once: int
    ) -> RoutedPrompt:
        """Return what the router needs to choose a worker at *places*. Raises WorkerUnavailable if none is ready."""
        if len(places) > 1:
            return await self._find(serving, places, prompt, num_at_once)
        routed = RoutedPrompt(len(prompt.token_ids), num_samples=prompt.num_samples, num_samples_at_once=num_at_once)
        if not prompt.runs:
            return routed.among(serving.rows[places], Overlaps.unknown(1))
        # There is nothing to choose, but images that the worker holds are not sent.
        images = _image_keys(prompt)
        overlaps = await self._lookup.overlaps(serving.targets, {}, images)
        return self._among(serving, places, routed, images, overlaps)

    async def _find(self, serving: Serving, places: NDArray[np.intp], prompt: Prompt, num_at_once: int) -> RoutedPrompt:
        """Look up what the workers at *places* hold of *prompt*. Raises WorkerUnavailable if none is ready."""
        images = _image_keys(prompt)
        with self._metrics.stage("keys"):
            routed = self._with_keys(prompt, images, serving.partitions, num_at_once)
        with self._metrics.stage("lookup"):
            overlaps = await self._lookup.overlaps(serving.targets, routed.keys, images)
        return self._among(serving, places, routed, images, overlaps)

    def _among(
        self,
        serving: Serving,
        places: NDArray[np.intp],
        routed: RoutedPrompt,
        images: Sequence[bytes],
        overlaps: Overlaps,
    ) -> RoutedPrompt:
        """Return *routed* for those of *places* that are still ready. Raises WorkerUnavailable if none is."""
        now = self._worker_pool.model(serving.model.name)
        if now is not serving.model:
            workers, urls = serving.model.workers, {worker.url for worker in now.workers}
            places = np.array([place for place in places.tolist() if workers[place].url in urls], np.intp)
        if not len(places):
            raise WorkerUnavailable(f"No worker of the model {serving.model.name!r} is ready; try again shortly.")
        rows = serving.rows
        if len(places) < len(rows):
            rows, overlaps = rows[places], overlaps.at(places)
        if images and (kept_images := self._router.kept_images):
            for key, have_image in zip(images, overlaps.have_images, strict=True):
                have_image |= members_of(kept_images.rows_of(key), rows)
        return routed.among(rows, overlaps)

    def _with_keys(
        self, prompt: Prompt, images: Sequence[bytes], partitions: Iterable[Partition], num_at_once: int
    ) -> RoutedPrompt:
        """Return the prompt in the router's terms, with keys for *images*, and without workers yet."""
        num_tokens = len(prompt.token_ids)
        # The last token is always computed, so its block is never reused.
        token_ids = prompt.token_ids[: num_tokens - 1]
        keys = {
            partition: self.prompt_keys.of(
                root_key(partition.fingerprint, prompt.salt), token_ids, prompt.runs, partition.block_size
            )
            for partition in partitions
        }
        routed_images = tuple(
            RoutedImage(key, run.start + run.length, run.length) for key, run in zip(images, prompt.runs, strict=True)
        )
        # Only this policy uses it, and without images it takes a hash.
        affinity = _affinity(prompt) if self._router.policy == "consistent_hash" else b""
        return RoutedPrompt(
            num_tokens, keys, routed_images, affinity, prompt.reads_cache, prompt.num_samples, num_at_once
        )

    async def reachable(self, worker: Worker, media: tuple[M, ...]) -> tuple[M, ...]:
        """Return *media*, with pixels inline if *worker* cannot read our shared memory. Raises InternalError."""
        description = worker.state.description
        slots = [item.slot.name for item in media if item.slot is not None]
        if not slots or (description is not None and description.shm_namespace in self._namespaces):
            return media
        try:
            return await asyncio.to_thread(lambda: tuple(_inlined(item) for item in media))
        except shared_memory.SlotError as error:
            raise InternalError("An image was lost on its way to the worker; the request can be sent again.") from error
        finally:
            self._worker_pool.release(slots)


def _affinity(prompt: Prompt) -> bytes:
    if prompt.runs:
        return prompt.salt + prompt.runs[0].content_hash
    return prompt.beginning_key(prompt.salt)


def _image_keys(prompt: Prompt) -> list[bytes]:
    return [image_key(prompt.salt, run.content_hash) for run in prompt.runs]


def _num_bytes(item: MediaItem) -> int:
    """Return how many bytes of pixels are sent with *item*."""
    return len(item.inline or b"") if item.slot is None else item.slot.nbytes


def _inlined(item: M) -> M:
    if item.slot is None:
        return item
    return msgspec.structs.replace(item, slot=None, inline=shared_memory.read_slot(item.slot))
