"""Waits until a worker has room for a request, then chooses and books a worker."""

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from random import Random

from prometheus_client import CollectorRegistry

from saccade.fair_queue import Background, FairQueue
from saccade.fleet.cost import NUM_REQUESTS
from saccade.fleet.decision_metrics import DecisionMetrics
from saccade.fleet.index import BlockIndex
from saccade.fleet.legs import Pair
from saccade.fleet.lookup import LocalLookup, Lookup
from saccade.fleet.placement import Placement
from saccade.fleet.places import UNBOUNDED
from saccade.fleet.pool import Model, WorkerPool
from saccade.fleet.prompt import Prompt
from saccade.fleet.prompt_lookup import PromptLookup
from saccade.fleet.router import Booking, RoutedPrompt, Router, RoutingChoice
from saccade.fleet.sender import Sender
from saccade.fleet.serving import Serving, option_of
from saccade.fleet.settings import DEFAULT_LIMITS, DispatchLimits, RoutingSettings
from saccade.fleet.worker import Worker
from saccade.protocol.needs import Lacks

ADVANCE_SECONDS = 1.0
"""How often waiting requests are checked. A breaker can open a place without an event."""


@dataclass(frozen=True)
class Preview:
    """Where *prompt* would go now."""

    model: Model
    prompt: Prompt
    choice: RoutingChoice


class Dispatcher:
    """Gives each request a place at the worker of *worker_pool* that *router* chooses, by the overlaps from *lookup*.

    *sender* sends the request there. *metrics* records choices between several workers. *num_placed* counts requests by
    the worker's url, *num_retried* by model those that were sent to another worker.
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
        self._metrics = metrics or DecisionMetrics(CollectorRegistry(), lambda worker: worker.state.exactness)
        self.lookup = PromptLookup(worker_pool, self._router, lookup or LocalLookup(self._router.index), self._metrics)
        self.sender = Sender(worker_pool, self._router, self._metrics)
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
        return await self.lookup.look_up(serving, with_room if len(with_room) else places, prompt, num_at_once)

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
        routed = await self.lookup.find(serving, places, prompt, num_at_once)
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
        routed = await self.lookup.look_up(serving, places, prompt, prompt.num_samples)
        second, booking = self._book(serving, routed, booked)

        def end_prefill() -> None:
            at_first.first_token()
            at_first.close(time.monotonic())
            self.advance()

        return Pair((first, second), end_prefill, booking.first_token)
