"""From an engine request to its deltas: choose a worker, put the pixels where it can read them, relay its deltas."""

import asyncio
import collections
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from saccade.errors import InternalError
from saccade.gateway.fleet.workers import Fleet, Worker
from saccade.protocol.media import MediaItem
from saccade.protocol.output import TokenDelta
from saccade.protocol.request import EngineRequest, MediaPixels
from saccade.routing.policy import WorkInFlight, least_work
from saccade.transport import shared_memory
from saccade.transport.client import Supply

M = TypeVar("M", MediaItem, MediaPixels)


@dataclass(frozen=True)
class Placement:
    """Where a request goes; *pixel_dtype* is the form in which that worker takes pixels."""

    worker: Worker
    pixel_dtype: str


class Dispatcher:
    """Sends requests to the workers of *fleet*, each to the one with the least work in flight."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        # Workers other than Saccade's do not report which user they run as.
        self._namespaces = (shared_memory.readers(), shared_memory.namespace())
        self._work: dict[str, WorkInFlight] = collections.defaultdict(WorkInFlight)

    @property
    def num_requests(self) -> int:
        return sum(work.num_requests for work in self._work.values())

    @contextlib.contextmanager
    def place(self, model: str, num_prompt_tokens: int) -> Iterator[Placement]:
        """Choose a worker for a prompt; it counts as that worker's until the block ends.

        Raises ModelNotFound and WorkerUnavailable.
        """
        workers = {worker.url: worker for worker in self._fleet.model(model).workers}
        url = least_work({url: self._work[url] for url in workers})
        self._work[url] = self._work[url].plus(num_prompt_tokens)
        described = workers[url].description
        try:
            yield Placement(workers[url], described.pixel_dtype if described else "uint8")
        finally:
            self._work[url] = self._work[url].minus(num_prompt_tokens)

    async def stream(
        self,
        placement: Placement,
        request: EngineRequest,
        supply: Supply | None = None,
        on_begin: Callable[[], object] = lambda: None,
        on_delta: Callable[[], object] = lambda: None,
    ) -> AsyncGenerator[TokenDelta, None]:
        """Yield the deltas of *request*, the last with a finish reason; closing the iterator early aborts the request.

        *on_begin* is called when the first delta is requested: from then on this method gives the request's slots back.
        *on_delta* is called with every delta.
        *supply* returns the pixels of pictures that the worker does not hold after all. Every slot of *request*, and of
        what was supplied, goes back through the fleet's on_released, also where this raises WorkerUnavailable,
        WorkerFailed or the engine's error.
        """
        on_begin()
        worker = placement.worker
        reachable = msgspec.structs.replace(request, media=await self._reachable(worker, request.media))
        if supply is None:
            generation = worker.generate(reachable)
        else:
            generation = worker.generate(reachable, functools.partial(self._supply, worker, supply))
        async with contextlib.aclosing(generation) as deltas:
            async for delta in deltas:
                on_delta()
                yield delta

    async def _supply(self, worker: Worker, supply: Supply, media: Sequence[int]) -> tuple[MediaPixels, ...]:
        return await self._reachable(worker, await supply(media))

    async def _reachable(self, worker: Worker, media: tuple[M, ...]) -> tuple[M, ...]:
        """Return *media* with pixels inline where the worker does not see our shared memory."""
        description = worker.description
        slots = [item.slot.name for item in media if item.slot is not None]
        if not slots or (description is not None and description.shm_namespace in self._namespaces):
            return media
        try:
            return await asyncio.to_thread(lambda: tuple(_inlined(item) for item in media))
        except shared_memory.SlotError as error:
            raise InternalError(
                "A picture was lost on its way to the worker; the request can be sent again."
            ) from error
        finally:
            self._fleet.release(slots)


def _inlined(item: M) -> M:
    if item.slot is None:
        return item
    return msgspec.structs.replace(item, slot=None, inline=shared_memory.read_slot(item.slot))
