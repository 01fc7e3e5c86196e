"""Prompt to stream: choose a worker, bring the pixels where it can read them, relay its deltas."""

import asyncio
import collections
import contextlib
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

import msgspec

from saccade.errors import InternalError
from saccade.gateway.workers import Fleet, Worker
from saccade.protocol.media import MediaItem
from saccade.protocol.output import TokenDelta
from saccade.protocol.request import EngineRequest
from saccade.routing.load import WorkInFlight
from saccade.routing.policy import least_work
from saccade.transport import shared_memory
from saccade.transport.client import slots_of


@dataclass(frozen=True)
class Placement:
    """Where a request goes; *pixel_dtype* is the form in which that worker takes pixels."""

    worker: Worker
    pixel_dtype: str


class Dispatcher:
    """Sends requests to the workers of *fleet*, each to the one with the least work in flight."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._namespace = shared_memory.namespace()
        self._work: dict[str, WorkInFlight] = collections.defaultdict(WorkInFlight)

    @property
    def num_requests(self) -> int:
        """How many requests are in flight."""
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

    async def stream(self, placement: Placement, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        """Yield the deltas of *request*, the last with a finish reason; closing the iterator early aborts the request.

        Every slot of *request* goes back through the fleet's on_released, also where this raises: WorkerUnavailable,
        WorkerFailed, or the error that the engine answers with.
        """
        reachable = await self._reachable(placement.worker, request)
        async with contextlib.aclosing(placement.worker.generate(reachable)) as deltas:
            async for delta in deltas:
                yield delta

    async def _reachable(self, worker: Worker, request: EngineRequest) -> EngineRequest:
        """Return *request* with pixels inline where the worker does not see our shared memory."""
        description = worker.description
        slots = slots_of(request)
        if not slots or (description is not None and description.shm_namespace == self._namespace):
            return request
        try:
            media = await asyncio.to_thread(lambda: tuple(_inlined(item) for item in request.media))
        except shared_memory.SlotError as error:
            raise InternalError(
                "A picture was lost on its way to the worker; the request can be sent again."
            ) from error
        finally:
            self._fleet.release(slots)
        return msgspec.structs.replace(request, media=media)


def _inlined(item: MediaItem) -> MediaItem:
    if item.slot is None:
        return item
    return msgspec.structs.replace(item, slot=None, inline=shared_memory.read_slot(item.slot))
