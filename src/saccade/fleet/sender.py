"""Sends placed requests to their workers, and notes what becomes of them."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from saccade.connectors.sink import Sink, Stream
from saccade.errors import InternalError, WorkerFailed, WorkerUnavailable
from saccade.fleet.decision_metrics import DecisionMetrics
from saccade.fleet.index import image_key
from saccade.fleet.placement import Placement
from saccade.fleet.pool import WorkerPool
from saccade.fleet.router import Router
from saccade.fleet.worker import Worker
from saccade.protocol.chat import ChatPrompt
from saccade.protocol.media import MediaItem
from saccade.protocol.request import EngineRequest, MediaPixels
from saccade.transport import shared_memory

logger = logging.getLogger(__name__)

M = TypeVar("M", MediaItem, MediaPixels)


class Sender:
    """Sends requests to the workers of *worker_pool*. *router* and *metrics* learn whether they answer."""

    def __init__(self, worker_pool: WorkerPool, router: Router, metrics: DecisionMetrics) -> None:
        self._worker_pool = worker_pool
        self._router = router
        self._metrics = metrics
        # Workers other than Saccade's do not report which user they run as.
        self._namespaces = (shared_memory.readers(), shared_memory.namespace())

    def release(self, slots: Sequence[str]) -> None:
        """Release *slots* that were not sent."""
        self._worker_pool.release(slots)

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


def _num_bytes(item: MediaItem) -> int:
    """Return how many bytes of pixels are sent with *item*."""
    return len(item.inline or b"") if item.slot is None else item.slot.nbytes


def _inlined(item: M) -> M:
    if item.slot is None:
        return item
    return msgspec.structs.replace(item, slot=None, inline=shared_memory.read_slot(item.slot))
