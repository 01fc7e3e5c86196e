"""From an engine request to its deltas: choose a worker, put the pixels where it can read them, relay its deltas."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

import msgspec

from saccade.errors import InternalError
from saccade.gateway.fleet.prefill_decode import Leg, Split, first_workers, others, partners
from saccade.gateway.fleet.worker import Worker
from saccade.gateway.fleet.workers import Fleet, Model
from saccade.identity.blocks import MediaRun, block_key, block_keys, root_key
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.output import TokenDelta
from saccade.protocol.request import EngineRequest, MediaPixels
from saccade.routing.index import BlockIndex, Partition
from saccade.routing.router import Booking, Option, RoutedPicture, RoutedPrompt, Router
from saccade.transport import shared_memory
from saccade.transport.client import Supply

M = TypeVar("M", MediaItem, MediaPixels)


INDEX_BYTES = 512 << 20
"""Of the index of what workers hold: about 4 million blocks, each counted once for every worker that holds it."""

AFFINITY_TOKENS = 256
"""consistent_hash goes by the first picture; without one, by the prompt's beginning."""


@dataclass(frozen=True)
class Prompt:
    """What the choice of a worker depends on: token ids, pictures in their places, and the tenant's *salt*.

    *reads_cache* is False for a prompt that a worker computes as a whole, whatever it holds. *max_tokens* and
    *num_samples* of the answer tell whether a second worker is needed for it.
    """

    token_ids: Sequence[int]
    runs: tuple[MediaRun, ...] = ()
    salt: bytes = b""
    reads_cache: bool = True
    max_tokens: int = 1
    num_samples: int = 1


@dataclass(frozen=True)
class Placement:
    """Where a request goes; *pixel_dtype* is the form in which that worker takes pixels.

    A *split* request goes to a decode worker too; the pixels of all its pictures may be asked for until its end.
    """

    worker: Worker
    pixel_dtype: str
    booking: Booking | None = None
    split: Split | None = None

    def first_token(self) -> None:
        """Note that the worker has computed the prompt."""
        if self.booking is not None and self.worker.description is not None:
            self.booking.first_token(self.worker.description.block_size)


def _ignore(_: str, __: int, ___: int) -> None:
    pass


class Dispatcher:
    """Sends requests to the workers of *fleet*, each to the one that *router* chooses.

    *on_matched* is called with the model, the tokens of a prompt that its worker is known to hold, and all its tokens.
    """

    def __init__(
        self, fleet: Fleet, router: Router | None = None, on_matched: Callable[[str, int, int], None] = _ignore
    ) -> None:
        self._fleet = fleet
        self._router = router or Router("auto", BlockIndex(INDEX_BYTES), Random())
        self._on_matched = on_matched
        # Workers other than Saccade's do not report which user they run as.
        self._namespaces = (shared_memory.readers(), shared_memory.namespace())

    @property
    def num_requests(self) -> int:
        return sum(work.num_requests for work in self._router.work.values())

    @contextlib.contextmanager
    def place(self, model: str, prompt: Prompt) -> Iterator[Placement]:
        """Choose a worker for a prompt; it counts as that worker's until the block ends.

        Raises ModelNotFound and WorkerUnavailable.
        """
        serving = self._fleet.model(model)
        with contextlib.ExitStack() as booked:
            first = self._book(serving, first_workers(serving.workers), prompt, booked)
            if first.booking.matched_tokens is not None:
                self._on_matched(serving.name, first.booking.matched_tokens, len(prompt.token_ids))
            described = first.worker.description
            split = self._split(serving, first, prompt, booked)
            yield Placement(first.worker, described.pixel_dtype if described else "uint8", first.booking, split)

    def _book(self, serving: Model, workers: Sequence[Worker], prompt: Prompt, booked: contextlib.ExitStack) -> Leg:
        """Choose one of *workers*, of which there is at least one, and book the prompt there until *booked* ends."""
        options = [_option(worker, serving, prompt.salt) for worker in workers]
        booking = self._router.book(options, _routed(prompt, options), time.monotonic())
        leg = Leg(next(worker for worker in workers if worker.url == booking.worker), booking)
        booked.callback(leg.end)
        return leg

    def _split(self, serving: Model, first: Leg, prompt: Prompt, booked: contextlib.ExitStack) -> Split | None:
        """Return the pair of *first* and a decode worker for *prompt*; None if one worker serves it alone."""

        def partner(leg: Leg, workers: Sequence[Worker], avoided: str = "") -> Leg | None:
            found = partners(leg.worker, workers, prompt.max_tokens, prompt.num_samples)
            return self._book(serving, others(found, avoided), prompt, booked) if found else None

        def choose(avoided: str) -> tuple[Leg, Leg] | None:
            workers = self._fleet.model(serving.name).workers
            able = [one for one in workers if partners(one, workers, prompt.max_tokens, prompt.num_samples)]
            if not able:
                return None
            prefill = self._book(serving, others(able, avoided), prompt, booked)
            decode = partner(prefill, workers, avoided)
            return None if decode is None else (prefill, decode)

        decode = partner(first, serving.workers)
        return None if decode is None else Split(first, decode, choose, self._fleet.release)

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
        *on_delta* is called with every delta, unless the request is split.
        *supply* returns the pixels of pictures that the worker does not hold after all. Every slot of *request*, and of
        what was supplied, goes back through the fleet's on_released, also where this raises WorkerUnavailable,
        WorkerFailed or the engine's error.
        """
        on_begin()
        if placement.split is not None and supply is not None:
            split = placement.split.stream(request, supply, self._reachable_request)
            async with contextlib.aclosing(split) as deltas:
                async for delta in deltas:
                    yield delta
            return
        worker = placement.worker
        reachable = msgspec.structs.replace(request, media=await self._reachable(worker, request.media))
        if supply is None:
            generation = worker.generate(reachable)
        else:
            generation = worker.generate(reachable, functools.partial(self._supply, worker, supply))
        async with contextlib.aclosing(generation) as deltas:
            async for delta in deltas:
                placement.first_token()
                on_delta()
                yield delta

    async def _supply(self, worker: Worker, supply: Supply, media: Sequence[int]) -> tuple[MediaPixels, ...]:
        return await self._reachable(worker, await supply(media))

    async def _reachable_request(self, worker: Worker, request: EngineRequest) -> EngineRequest:
        return msgspec.structs.replace(request, media=await self._reachable(worker, request.media))

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


def media_runs(pictures: Iterable[tuple[bytes, Sequence[Span]]]) -> tuple[MediaRun, ...]:
    """Return the runs of a prompt's pictures, each given by its content hash and spans, in prompt order."""
    runs = []
    for content_hash, spans in pictures:
        offset = 0
        for span in spans:
            runs.append(MediaRun(span.start, span.length, content_hash, offset))
            offset += span.length
    return tuple(sorted(runs, key=lambda run: run.start))


def _option(worker: Worker, model: Model, salt: bytes) -> Option:
    said = worker.description or model.description
    return Option(
        name=worker.url,
        partition=Partition(said.fingerprint, said.block_size),
        resumes_at_states=said.resumes_at_states,
        encodes=lambda key: not worker.holds(salt, key[len(salt) :]),
    )


def _routed(prompt: Prompt, options: Sequence[Option]) -> RoutedPrompt:
    """Return what the router looks at. Keys are computed only where there is a choice."""
    num_tokens = len(prompt.token_ids)
    if len(options) == 1:
        return RoutedPrompt(num_tokens)
    keys: dict[int, list[bytes]] = {}
    for _, (fingerprint, block_size), *_ in options:
        if block_size not in keys:
            root = root_key(fingerprint, prompt.salt)
            keys[block_size] = block_keys(root, prompt.token_ids[: num_tokens - 1], prompt.runs, block_size)
    pictures = tuple(
        RoutedPicture(prompt.salt + run.content_hash, run.start + run.length, run.length) for run in prompt.runs
    )
    return RoutedPrompt(num_tokens, keys, pictures, _affinity(prompt), prompt.reads_cache)


def _affinity(prompt: Prompt) -> bytes:
    if prompt.runs:
        return prompt.salt + prompt.runs[0].content_hash
    start = prompt.token_ids[:AFFINITY_TOKENS]
    return block_key(prompt.salt, start, 0, ())


def _inlined(item: M) -> M:
    if item.slot is None:
        return item
    return msgspec.structs.replace(item, slot=None, inline=shared_memory.read_slot(item.slot))
