"""Requests that two workers serve: a prefill worker computes the prompt, a decode worker the answer.

Both legs are sent at once. The decode worker reserves room, then gets the prompt's KV state from the prefill worker
directly; the gateway gives both a key for it. All tokens come from the decode worker. Pixels go to the prefill worker
alone; the decode worker may ask for them later, if it has to compute the prompt again.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import msgspec

from saccade.errors import SaccadeError, WorkerFailed, WorkerUnavailable
from saccade.gateway.fleet.worker import Worker
from saccade.protocol.description import Description
from saccade.protocol.kv_transfer import ReceiveKv, SendKv
from saccade.protocol.output import TokenDelta
from saccade.protocol.request import EngineRequest
from saccade.routing.router import Booking
from saccade.transport.client import Supply, slots_of
from saccade.transport.kv_transfer.channel import new_key

NUM_ATTEMPTS = 2
SEED_BITS = 63

logger = logging.getLogger(__name__)


class Leg:
    """A worker's part in a request, which is booked until end()."""

    def __init__(self, worker: Worker, booking: Booking) -> None:
        self.worker = worker
        self.booking = booking
        self._has_ended = False

    def first_token(self) -> None:
        """Note that the prompt is computed."""
        if not self._has_ended and self.worker.description is not None:
            self.booking.first_token(self.worker.description.block_size)

    def end(self) -> None:
        """Take the work off the worker, once."""
        if not self._has_ended:
            self._has_ended = True
            self.booking.close()


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


def others(workers: Sequence[Worker], avoided: str) -> Sequence[Worker]:
    """Return *workers* without the one at the url *avoided*, or all if it is the only one."""
    return [worker for worker in workers if worker.url != avoided] or workers


def _role(worker: Worker) -> str:
    return worker.description.role if worker.description is not None else "both"


def _form(said: Description) -> tuple[object, ...]:
    """Return what must be equal for KV state to go from one worker to another."""
    return said.fingerprint, said.block_size, said.dtype, said.kv_cache_dtype


class Split:
    """A request at two workers. *choose* books another pair, if possible without the worker of a url.

    *release* gives slots back that were not sent.
    """

    def __init__(
        self,
        prefill: Leg,
        decode: Leg,
        choose: Callable[[str], tuple[Leg, Leg] | None],
        release: Callable[[Sequence[str]], None],
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self._choose = choose
        self._release = release
        self._failed = ""

    @property
    def url(self) -> str:
        """Both urls, for the log."""
        return f"{self.prefill.worker.url} + {self.decode.worker.url}"

    def abort_sample(self, request_id: str, index: int) -> None:
        """Stop the decode worker's work on one sample."""
        self.decode.worker.abort_sample(request_id, index)

    async def stream(
        self,
        request: EngineRequest,
        supply: Supply,
        reachable: Callable[[Worker, EngineRequest], Awaitable[EngineRequest]],
    ) -> AsyncGenerator[TokenDelta, None]:
        """Yield the deltas of *request*; a leg that fails before the first of them is tried once more elsewhere.

        *reachable* puts pixels where a worker can read them. Every slot of *request* goes back. Raises SaccadeError.
        """
        if request.sampling.seed is None:
            # Both workers draw from one sequence of random numbers.
            request = _sampled(request, seed=secrets.randbits(SEED_BITS))
        for attempt in range(1, NUM_ATTEMPTS + 1):
            has_begun = False
            try:
                async with contextlib.aclosing(self._attempt(request, supply, reachable)) as deltas:
                    async for delta in deltas:
                        has_begun = True
                        yield delta
                return
            except (WorkerFailed, WorkerUnavailable) as error:
                if has_begun or attempt == NUM_ATTEMPTS or not self._replace(error):
                    raise
            # The slots went back with the first attempt: the prefill worker asks for what it does not hold.
            request = without_pixels(request)

    def _replace(self, error: SaccadeError) -> bool:
        """Choose another pair; return False if no two workers are ready."""
        self.prefill.end()
        self.decode.end()
        pair = self._choose(self._failed)
        if pair is None:
            return False
        logger.warning("a leg at worker %s failed, trying once more: %s", self._failed, error.message)
        self.prefill, self.decode = pair
        return True

    async def _attempt(
        self,
        request: EngineRequest,
        supply: Supply,
        reachable: Callable[[Worker, EngineRequest], Awaitable[EngineRequest]],
    ) -> AsyncGenerator[TokenDelta, None]:
        """Run both legs once, and yield the decode leg's deltas."""
        prefill, decode = self.prefill, self.decode
        said = prefill.worker.description
        first, second = legs_of(request, (said and said.kv_transfer_address) or "")
        first = await reachable(prefill.worker, first)
        prefilling = _Prefill(prefill, first, supply, self._release)
        try:
            async with contextlib.aclosing(decode.worker.generate(second, supply)) as deltas:
                # The decode leg can only fail by itself or with the prefill leg, so both are watched until it begins.
                beginning = asyncio.ensure_future(anext(deltas))
                try:
                    await prefilling.first_of(beginning)
                    delta = await beginning
                finally:
                    await _cancelled(beginning)
                prefill.first_token()
                decode.first_token()
                yield delta
                async for delta in deltas:
                    yield delta
        except (WorkerFailed, WorkerUnavailable):
            self._failed = (prefill if prefilling.has_failed else decode).worker.url
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

    @property
    def has_failed(self) -> bool:
        """Whether the leg has ended with an error."""
        return self._task.done() and not self._task.cancelled() and self._task.exception() is not None

    async def first_of(self, beginning: asyncio.Future[TokenDelta]) -> None:
        """Wait until *beginning* is done. Raises the error of the prefill leg if that fails before."""
        await asyncio.wait((beginning, self._task), return_when=asyncio.FIRST_COMPLETED)
        if not beginning.done():
            self._task.result()
            await asyncio.wait((beginning,))

    async def close(self) -> None:
        """End the leg."""
        await _cancelled(self._task)
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

    The prefill leg draws one token. The decode leg has the pictures' grids, hashes and spans, and no pixels.
    """
    key = new_key()
    sampling = request.sampling
    first = _sampled(request, max_tokens=1, min_tokens=min(1, sampling.min_tokens))
    return (
        msgspec.structs.replace(first, kv_transfer=SendKv(key)),
        msgspec.structs.replace(without_pixels(request), kv_transfer=ReceiveKv(key, source)),
    )


def without_pixels(request: EngineRequest) -> EngineRequest:
    """Return *request* with its pictures by their hashes alone."""
    media = tuple(msgspec.structs.replace(item, slot=None, inline=None) for item in request.media)
    return msgspec.structs.replace(request, media=media)


def _sampled(request: EngineRequest, **changes: int) -> EngineRequest:
    sampling = msgspec.structs.replace(request.sampling, **changes)
    return msgspec.structs.replace(request, sampling=sampling)
