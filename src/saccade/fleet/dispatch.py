"""Chooses a worker for each engine request, waits for room, books it, and sends the request there."""

import asyncio
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TypeVar

import msgspec
from prometheus_client import CollectorRegistry

from saccade.connectors.sink import Sink, Stream
from saccade.errors import InternalError, WorkerFailed, WorkerUnavailable
from saccade.fair_queue import FairQueue
from saccade.fleet.decision_metrics import DecisionMetrics
from saccade.fleet.index import BlockIndex, Partition
from saccade.fleet.legs import Pair, first_workers, partners
from saccade.fleet.lookup import LocalLookup, Lookup, LookupTarget, Overlap
from saccade.fleet.places import UNBOUNDED, num_places, rows_of
from saccade.fleet.pool import Model, WorkerPool
from saccade.fleet.prompt import Prompt, takers_of
from saccade.fleet.prompt_keys import PromptKeys
from saccade.fleet.router import Booking, Option, RoutedImage, RoutedPrompt, Router, RoutingChoice
from saccade.fleet.settings import DEFAULT_LIMITS, DispatchLimits, RoutingSettings
from saccade.fleet.worker import Worker, takes_chats_only
from saccade.identity.blocks import block_key, root_key
from saccade.protocol.chat import ChatPrompt
from saccade.protocol.engine_load import Load
from saccade.protocol.media import MediaItem
from saccade.protocol.request import MAX_NUM_SAMPLES, EngineRequest, MediaPixels
from saccade.transport import shared_memory

logger = logging.getLogger(__name__)

M = TypeVar("M", MediaItem, MediaPixels)


NO_LOAD = Load()

AFFINITY_TOKENS = 256
"""consistent_hash hashes the first image; without one, this many tokens of the prompt's beginning."""


ADVANCE_SECONDS = 1.0
"""How often waiting requests are checked. A breaker can open a place without an event."""


@dataclass(frozen=True)
class Placement:
    """The worker that a request for *model* goes to; *pixel_dtype* is the dtype in which it takes pixels.

    With a *pair*, *worker* is its prefill worker, and the pair may ask for the pixels of any image until the answer's
    end. *held_share* is the share of the prompt that the worker held, None if that is not certain. *can_retry*: if the
    worker fails, another one may be tried. *takes_chat*: the worker takes the chat instead of token ids.
    *num_at_once* is how many samples of the request may run at a time, *priority* its priority in the worker's queue.
    """

    worker: Worker
    pixel_dtype: str
    booking: Booking | None = None
    pair: Pair | None = None
    model: str = ""
    held_share: float | None = None
    can_retry: bool = False
    takes_chat: bool = False
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


@dataclass(frozen=True)
class _Query:
    """A prompt in the router's terms, the workers that may get it, and what each of them holds of it."""

    options: Sequence[Option]
    prompt: RoutedPrompt
    overlaps: Mapping[str, Overlap]


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
        self._num_rows: defaultdict[str, int] = defaultdict(int)
        self._timer: asyncio.TimerHandle | None = None
        self._worker_pool = worker_pool
        self._router = router or Router("auto", BlockIndex(RoutingSettings.routing_index_bytes), Random())
        self._lookup = lookup or LocalLookup(self._router.index)
        self._metrics = metrics or DecisionMetrics(CollectorRegistry(), lambda worker: worker.exactness)
        self.prompt_keys = PromptKeys()
        # Workers other than Saccade's do not report which user they run as.
        self._namespaces = (shared_memory.readers(), shared_memory.namespace())
        worker_pool.on_change(self.advance)
        worker_pool.on_forget(self._forget)

    @property
    def num_waiting(self) -> int:
        """How many requests wait for a worker."""
        return sum(queue.num_waiting for queue in self._queues.values())

    @property
    def num_requests(self) -> int:
        return sum(work.num_requests for work in self._router.work.values())

    def num_requests_at(self, worker: str) -> int:
        """Return how many requests are booked at the worker with the url *worker*."""
        return self._router.work[worker].num_requests if worker in self._router.work else 0

    async def _forget(self, worker: str) -> None:
        self._router.forget(worker)
        self._metrics.forget(worker)
        del self.num_placed[worker]

    def release(self, slots: Sequence[str]) -> None:
        """Release *slots* that were not sent."""
        self._worker_pool.release(slots)

    def takers_of_chats(self, model: str) -> tuple[bool, bool]:
        """Return whether any worker of *model* takes chats only, and whether all do. Raises as place() does."""
        chats_only = [takes_chats_only(worker) for worker in self._worker_pool.model(model).workers]
        return any(chats_only), all(chats_only)

    async def preview(self, model: str, prompt: Prompt) -> Preview:
        """Return where place() would put a prompt now. Raises ModelNotFound and WorkerUnavailable."""
        serving = self._worker_pool.model(model)
        free = self._free_places(serving, prompt, frozenset())
        with_room = [worker for worker in serving.workers if free.get(worker.url)]
        allowed = [worker for worker in serving.workers if worker.url in free]
        query = await self._look_up(serving, with_room or allowed, prompt, prompt.num_samples)
        choice = self._router.preview(query.options, query.prompt, query.overlaps, time.monotonic())
        return Preview(serving, prompt, choice)

    @asynccontextmanager
    async def place(self, model: str, prompt: Prompt, excluded: Set[str] = frozenset()) -> AsyncIterator[Placement]:
        """Choose a worker outside *excluded* for a prompt, and book it there until the block ends.

        If every worker is at its limit, wait until one is not: one free place is enough. A request weighs its samples,
        or what its tenant may hold if that is less; no more of them run at a time. Raises ModelNotFound,
        WorkerUnavailable, QueueFull, and the prompt's own error if no worker can take it.
        """
        serving = self._worker_pool.model(model)
        name, free = serving.name, dict[str, int]()
        queue = self._queue_of(name)
        rows = rows_of(self.limits, serving)
        self._num_rows[name] = sum(rows.values())
        weight = min(prompt.num_samples, max(rows.values()))

        def full_workers() -> Set[str] | None:
            """Return the workers that could serve the prompt if all are at their limit, None if one is not."""
            nonlocal serving, free
            serving = self._worker_pool.model(model)
            self._num_rows[name] = sum(rows_of(self.limits, serving).values())
            free = self._free_places(serving, prompt, excluded)
            # Some requests have their turn but are not booked yet.
            return None if sum(free.values()) > queue.weight - self._num_booked[name] else frozenset(free)

        with ExitStack() as booked:
            self._advance_later()
            turn = await queue.enter(prompt.tenant, weight, prompt.tenant_priority, full_workers, prompt.priority)
            booked.enter_context(turn)
            workers = [worker for worker in serving.workers if free.get(worker.url)]
            query = await self._look_up(serving, workers, prompt, turn.weight)
            self._num_booked[name] += turn.weight
            booked.callback(self._num_booked.subtract, {name: turn.weight})
            start = time.perf_counter()
            worker, booking = self._book(query, workers, booked)
            self.num_placed[worker.url] += 1
            held_share = None
            if len(query.options) > 1:
                choice_seconds = time.perf_counter() - start
                held_share = self._metrics.observe(serving, len(prompt.token_ids), booking, choice_seconds)
            description, pair = worker.description, None
            if description is not None and description.role == "prefill":
                pair = await self._pair(serving, worker, booking, prompt, excluded, booked)
            tried = {*excluded, worker.url}
            can_retry = len(tried) <= self.limits.max_retries and not tried.issuperset(
                worker.url for worker in serving.workers
            )
            yield Placement(
                worker=worker,
                pixel_dtype=description.pixel_dtype if description else "uint8",
                booking=booking,
                pair=pair,
                model=name,
                held_share=held_share,
                can_retry=can_retry,
                takes_chat=takes_chats_only(worker),
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
            )
        return self._queues[model]

    def _num_rows_for_one(self, model: str, num_of_others: int) -> int:
        """Return how many rows at workers of *model* one tenant may hold if others hold *num_of_others*."""
        return max(1, math.ceil(self.limits.client_share * (self._num_rows[model] - num_of_others)))

    def _advance_later(self) -> None:
        """Advance every ADVANCE_SECONDS as long as requests wait."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(ADVANCE_SECONDS, self._advance_again)

    def _advance_again(self) -> None:
        self._timer = None
        self.advance()
        if self.num_waiting:
            self._advance_later()

    def _book(self, query: _Query, workers: Sequence[Worker], booked: ExitStack) -> tuple[Worker, Booking]:
        """Book the prompt of *query* at one of *workers*, until *booked* ends or before."""
        booking = self._router.book(query.options, query.prompt, query.overlaps, time.monotonic())
        booked.callback(self._end, booking)
        return next(worker for worker in workers if worker.url == booking.worker), booking

    def _end(self, booking: Booking) -> None:
        """End *booking*, and let others have its place."""
        booking.close(time.monotonic())
        self.advance()

    async def _pair(
        self, serving: Model, first: Worker, at_first: Booking, prompt: Prompt, excluded: Set[str], booked: ExitStack
    ) -> Pair | None:
        """Also book *prompt* at a decode worker for *first*, a prefill worker; return None if it serves alone."""
        workers = [worker for worker in serving.workers if worker.url not in excluded]
        max_tokens = prompt.sampling.max_tokens
        decoders = partners(first, workers, max_tokens, prompt.num_samples)
        if not decoders:
            return None
        now = time.monotonic()
        allowed = [worker for worker in decoders if self._router.breakers.allows(worker.url, now)] or decoders
        query = await self._look_up(serving, allowed, prompt, prompt.num_samples)
        second, booking = self._book(query, decoders, booked)

        def end_prefill() -> None:
            at_first.first_token()
            self._end(at_first)

        return Pair((first, second), end_prefill, booking.first_token)

    async def send(
        self, placement: Placement, request: EngineRequest, sink: Sink, chat: ChatPrompt | None = None
    ) -> Stream:
        """Send *request* with pixels that the worker can read; its deltas go to *sink*.

        A worker that takes chats only gets *chat*. The worker pool releases every slot of *request*, even if this
        raises. Raises WorkerUnavailable and the errors of connectors.
        """
        worker = placement.worker
        request = msgspec.structs.replace(request, media=await self.reachable(worker, request.media))
        if chat is not None and takes_chats_only(worker):
            return worker.generate_chat(request, chat, sink)
        return (placement.pair or worker).generate(request, sink)

    def begun(self, placement: Placement) -> None:
        """Record the first token of a request at *placement*."""
        placement.first_token()
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

    def _free_places(self, model: Model, prompt: Prompt, excluded: Set[str]) -> dict[str, int]:
        """Return by url how many more samples each eligible worker of *model* may get.

        Breakers never exclude the last worker. A model's only worker gets everything, since it queues by itself, unless
        *lone_worker_queue* is set for tenants. Raises WorkerUnavailable and the prompt's own error.
        """
        workers = [worker for worker in model.workers if worker.url not in excluded]
        if not workers:
            raise WorkerUnavailable("No other worker of the model is ready; try again shortly.")
        workers = takers_of(workers, prompt)
        takers: Sequence[Worker] = workers
        if len(model.workers) > 1:
            now = time.monotonic()
            takers = first_workers([one for one in workers if self._router.breakers.allows(one.url, now)] or workers)
        work = self._router.work
        return {one.url: max(0, num_places(self.limits, model, one) - work[one.url].num_rows) for one in takers}

    async def _look_up(self, model: Model, workers: Sequence[Worker], prompt: Prompt, num_rows: int) -> _Query:
        """Return what the router needs to choose one of *workers*. Raises WorkerUnavailable if none is ready."""
        options = [_option(worker, model, prompt.salt) for worker in workers]
        if len(options) == 1:
            routed = RoutedPrompt(len(prompt.token_ids), num_samples=prompt.num_samples, num_rows=num_rows)
            return _Query(options, routed, {})
        with self._metrics.stage("keys"):
            routed = self._routed(prompt, options, num_rows)
        with self._metrics.stage("lookup"):
            overlaps = await self._lookup.overlaps(
                [LookupTarget(name, part) for name, part, *_ in options], routed.keys
            )
        ready = {worker.url for worker in self._worker_pool.clients if worker.ready}
        options = [option for option in options if option.name in ready]
        if not options:
            raise WorkerUnavailable(f"No worker of the model {model.name!r} is ready; try again shortly.")
        return _Query(options, routed, overlaps)

    def _routed(self, prompt: Prompt, options: Sequence[Option], num_rows: int) -> RoutedPrompt:
        """Return the prompt in the router's terms."""
        num_tokens = len(prompt.token_ids)
        # The last token is always computed, so its block is never reused.
        token_ids = prompt.token_ids[: num_tokens - 1]
        keys = {
            partition: self.prompt_keys.of(
                root_key(partition.fingerprint, prompt.salt), token_ids, prompt.runs, partition.block_size
            )
            for partition in {option.partition for option in options}
        }
        images = tuple(
            RoutedImage(prompt.salt + run.content_hash, run.start + run.length, run.length) for run in prompt.runs
        )
        affinity = _affinity(prompt)
        return RoutedPrompt(num_tokens, keys, images, affinity, prompt.reads_cache, prompt.num_samples, num_rows)

    async def reachable(self, worker: Worker, media: tuple[M, ...]) -> tuple[M, ...]:
        """Return *media*, with pixels inline if *worker* cannot read our shared memory. Raises InternalError."""
        description = worker.description
        slots = [item.slot.name for item in media if item.slot is not None]
        if not slots or (description is not None and description.shm_namespace in self._namespaces):
            return media
        try:
            return await asyncio.to_thread(lambda: tuple(_inlined(item) for item in media))
        except shared_memory.SlotError as error:
            raise InternalError("An image was lost on its way to the worker; the request can be sent again.") from error
        finally:
            self._worker_pool.release(slots)


def _option(worker: Worker, model: Model, salt: bytes) -> Option:
    description, load = worker.description or model.description, worker.load or NO_LOAD
    return Option(
        name=worker.url,
        partition=Partition(description.fingerprint, description.block_size),
        resumes_at_states=description.resumes_at_states,
        encodes=lambda key: not worker.holds(salt, key[len(salt) :]),
        reports=worker.exactness.level != "NONE",
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        load_times=worker.load_times,
    )


def _affinity(prompt: Prompt) -> bytes:
    if prompt.runs:
        return prompt.salt + prompt.runs[0].content_hash
    start = prompt.token_ids[:AFFINITY_TOKENS]
    return block_key(prompt.salt, start, 0, ())


def _inlined(item: M) -> M:
    if item.slot is None:
        return item
    return msgspec.structs.replace(item, slot=None, inline=shared_memory.read_slot(item.slot))
