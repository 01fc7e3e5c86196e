"""Requests that two workers serve: a prefill worker computes the prompt, a decode worker the answer.

Both legs are sent at once. The decode worker reserves room, then gets the prompt's KV state from the prefill worker
directly; the gateway gives both a key for it. All tokens come from the decode worker. Pixels go to the prefill worker
alone; the decode worker may ask for them later, if it has to compute the prompt again.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec

from saccade.errors import PeerFailed, WorkerFailed, WorkerUnavailable
from saccade.gateway.workers.worker import Worker
from saccade.protocol.description import Description
from saccade.protocol.kv_transfer import ReceiveKv, SendKv
from saccade.protocol.output import TokenDelta
from saccade.protocol.request import EngineRequest
from saccade.routing.router import Booking
from saccade.transport.client import Supply, slots_of
from saccade.transport.kv_transfer.channel import new_key

SEED_BITS = 63


class Leg:
    """A worker's part in a request, which is booked until end(); then *on_end* is called."""

    def __init__(self, worker: Worker, booking: Booking, on_end: Callable[[], object]) -> None:
        self.worker = worker
        self._booking = booking
        self._on_end = on_end
        self._has_ended = False

    def first_token(self) -> None:
        """Note that the prompt is computed."""
        if not self._has_ended and self.worker.description is not None:
            self._booking.first_token(self.worker.description.block_size)

    def end(self) -> None:
        """Take the work off the worker, once."""
        if not self._has_ended:
            self._has_ended = True
            self._booking.close(time.monotonic())
            self._on_end()


def first_workers(workers: Sequence[Worker]) -> Sequence[Worker]:
    """Return the workers among which a request's first is chosen: those that serve alone, and prefill workers.

    Where there is none, the decode workers: a worker of any role can serve alone.
    """
    return [worker for worker in workers if _role(worker) != "decode"] or workers


def partners(first: Worker, workers: Sequence[Worker], max_tokens: int, num_samples: int) -> list[Worker]:
    """Return the decode workers that could go on where *first* ends.

    The list is empty for a worker that serves alone, and for a request of one token, which needs no decode worker.
    """
    ours = first.description
    if ours is None or ours.kv_transfer_address is None or _role(first) != "prefill" or max_tokens == 1:
        return []
    return [
        worker
        for worker in workers
        if (theirs := worker.description) is not None
        and theirs.role == "decode"
        and num_samples <= theirs.max_num_seqs
        and _form(theirs) == _form(ours)
    ]


def _role(worker: Worker) -> str:
    return worker.description.role if worker.description is not None else "both"


def _form(said: Description) -> tuple[object, ...]:
    """Return what must be equal for KV state to go from one worker to another."""
    return said.fingerprint, said.block_size, said.dtype, said.kv_cache_dtype


class Pair:
    """A request's two workers. *release* gives back slots that were not sent."""

    def __init__(self, prefill: Leg, decode: Leg, release: Callable[[Sequence[str]], None]) -> None:
        self._suffix = f"-{secrets.token_hex(4)}"
        self.prefill = prefill
        self.decode = decode
        self.failed_worker = decode.worker
        self._release = release

    @property
    def workers(self) -> tuple[Worker, Worker]:
        """The prefill worker and the decode worker."""
        return self.prefill.worker, self.decode.worker

    @property
    def url(self) -> str:
        """Both urls, for the log."""
        return " + ".join(worker.url for worker in self.workers)

    def abort_sample(self, request_id: str, index: int) -> None:
        """Stop the decode worker's work on one sample."""
        self.decode.worker.abort_sample(request_id + self._suffix, index)

    async def generate(
        self, request: EngineRequest, supply: Callable[[Worker], Supply]
    ) -> AsyncGenerator[TokenDelta, None]:
        """Send both legs of *request*, and yield the decode leg's deltas, as Worker.generate() does.

        *supply* returns what brings a worker the pixels that it asks for. Where this raises, *failed_worker* is the one
        that has failed.
        """
        prefill, decode = self.workers
        # If the prefill worker fails, the request may come to the same decode worker again, as another attempt. What
        # that worker still says of this one must not end the next.
        request = msgspec.structs.replace(request, request_id=request.request_id + self._suffix)
        first, second = legs_of(request, (prefill.description and prefill.description.kv_transfer_address) or "")
        prefilling = _Prefill(self.prefill, first, supply(prefill), self._release)
        try:
            async with contextlib.aclosing(decode.generate(second, supply(decode))) as deltas:
                beginning = asyncio.ensure_future(anext(deltas))
                try:
                    yield await prefilling.before(beginning)
                finally:
                    await _cancelled(beginning)
                async for delta in deltas:
                    yield delta
        except (WorkerFailed, WorkerUnavailable) as error:
            self.failed_worker = prefill if prefilling.is_to_blame(error) else decode
            if isinstance(error, PeerFailed):
                raise WorkerFailed(error.message) from error
            raise
        finally:
            await prefilling.close()


class _Prefill:
    """The prefill leg, in a task of its own. Its slots go back even if it never ran."""

    def __init__(
        self, leg: Leg, request: EngineRequest, supply: Supply, release: Callable[[Sequence[str]], None]
    ) -> None:
        self._leg = leg
        self._request = request
        self._supply = supply
        self._release = release
        self._has_run = False
        self._task = asyncio.create_task(self._run(), name=f"prefill leg of {request.request_id}")

    def is_to_blame(self, error: WorkerFailed | WorkerUnavailable) -> bool:
        """Whether the prefill worker made the request fail, of which *error*, of either leg, came first."""
        is_over = self._task.done() and not self._task.cancelled()
        own = self._task.exception() if is_over else None
        if own is error or not isinstance(error, PeerFailed):
            return own is not None and not isinstance(own, PeerFailed)
        return True

    async def before(self, beginning: asyncio.Future[TokenDelta]) -> TokenDelta:
        """Return the result of *beginning*. Raises the error of the prefill leg if that fails before."""
        await asyncio.wait((beginning, self._task), return_when=asyncio.FIRST_COMPLETED)
        if not beginning.done():
            self._task.result()
        return await beginning

    async def close(self) -> None:
        """End the leg."""
        try:
            await _cancelled(self._task)
        finally:
            if not self._has_run:
                self._release(slots_of(self._request))

    async def _run(self) -> None:
        self._has_run = True
        async with contextlib.aclosing(self._leg.worker.generate(self._request, self._supply)) as deltas:
            async for _ in deltas:
                pass
        self._leg.first_token()
        self._leg.end()


async def _cancelled(task: asyncio.Future[Any]) -> None:
    """Cancel *task*, and wait until it has ended; its result is ignored."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def legs_of(request: EngineRequest, source: str) -> tuple[EngineRequest, EngineRequest]:
    """Return the prefill leg and the decode leg of *request*; the state goes from *source*, host:port.

    The prefill leg draws one token. The decode leg has the images' grids, hashes and spans, and no pixels. Both draw
    from one sequence of random numbers.
    """
    key = new_key()
    seed = secrets.randbits(SEED_BITS) if request.sampling.seed is None else request.sampling.seed
    sampling = msgspec.structs.replace(request.sampling, seed=seed)
    short = msgspec.structs.replace(sampling, max_tokens=1, min_tokens=min(1, sampling.min_tokens))
    media = tuple(msgspec.structs.replace(item, slot=None, inline=None) for item in request.media)
    return (
        msgspec.structs.replace(request, sampling=short, kv_transfer=SendKv(key)),
        msgspec.structs.replace(request, sampling=sampling, media=media, kv_transfer=ReceiveKv(key, source)),
    )
