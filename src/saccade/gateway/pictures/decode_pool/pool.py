"""The gateway's pool of decode processes: encoded bytes in, a filled slot out. No torch, no pixels.

A job takes one process for itself. Jobs wait in order of arrival for a process and for room in the budget of decoded
bytes. Once begun, a job runs to its end even if its request is gone: a job takes milliseconds, and the process is kept.
A process that takes too long fails the one request it worked on, and is replaced. So is a process that dies; the
picture may not be the cause, so it gets a second process, and is refused when that one dies, too.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import structlog

from saccade.errors import (
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidImage,
    SaccadeError,
    StartupError,
    from_code,
)
from saccade.gateway.confinement.sandbox import MEASURES
from saccade.gateway.pictures.decode_pool.job import PictureAnswer, PictureJob, StageSeconds
from saccade.gateway.pictures.decode_pool.server import DecodeProcess, DecodeServer
from saccade.media.header import PictureLimits, read_header
from saccade.protocol.media import PictureLayout, SlotRef
from saccade.transport.framing import UNREADABLE
from saccade.transport.shared_memory import Slot, SlotError, SlotPool, exists, open_descriptor, sweep

_logger = structlog.get_logger(__name__)
T = TypeVar("T")

RETRY_SECONDS = 1.0
MAX_ATTEMPTS = 8


class ProcessDied(Exception):
    """A decode process ended while it worked on a picture.

    *with_server*: the fork server had ended, and all decode processes with it, so the picture is not the cause.
    """

    with_server = False


def _default_processes() -> int:
    return min(4, len(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class DecodePoolConfig:
    """How much pictures may cost. *memory_bytes* is a decode process's limit beyond its imports."""

    num_processes: int = field(default_factory=_default_processes)
    time_limit_seconds: float = 10.0
    memory_bytes: int = 1 << 30
    in_flight_bytes: int = 1 << 30
    slot_bytes: int = 1 << 30
    limits: PictureLimits = field(default_factory=PictureLimits)


@dataclass(frozen=True)
class PreparedPicture:
    """Patches in *slot*, or in *inline* where shared memory is full. *waited_seconds* is the time in the queue."""

    slot: SlotRef | None
    inline: bytes | None
    num_bytes: int
    seconds: StageSeconds
    waited_seconds: float


class DecodeQueue:
    """Assigns jobs, in order of arrival, to idle processes while the budget of decoded bytes has room.

    *lost* is called with a process that died while it was idle.
    """

    def __init__(self, budget_bytes: int, lost: Callable[[DecodeProcess], None]) -> None:
        self.budget_bytes = budget_bytes
        self.in_flight_bytes = 0
        self.num_running = 0
        self._lost = lost
        self._idle: deque[DecodeProcess] = deque()
        self._waiting: deque[tuple[int, asyncio.Future[DecodeProcess]]] = deque()

    @property
    def num_waiting(self) -> int:
        """Jobs that have no process yet."""
        return sum(not turn.done() for _, turn in self._waiting)

    async def enter(self, nbytes: int) -> DecodeProcess:
        """Wait for a process and for *nbytes* of the budget; a job over the whole budget runs alone."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, turn))
        self._advance()
        try:
            process: DecodeProcess = await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.leave(nbytes, turn.result())
            raise
        return process

    def leave(self, nbytes: int, process: DecodeProcess | None) -> None:
        """Give back what enter() gave; *process* is None where it has ended, and its replacement comes by add()."""
        self.in_flight_bytes -= nbytes
        self.num_running -= 1
        self.add(process)

    def add(self, process: DecodeProcess | None) -> None:
        """Take in an idle process, and let the next jobs begin."""
        if process is not None:
            self._idle.append(process)
        self._advance()

    def refuse(self, error: SaccadeError) -> None:
        """Fail all waiting jobs with *error*."""
        while self._waiting:
            _, turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(error)

    def _advance(self) -> None:
        while self._waiting and self._idle:
            nbytes, turn = self._waiting[0]
            if turn.done():
                self._waiting.popleft()
                continue
            if self.in_flight_bytes and self.in_flight_bytes + nbytes > self.budget_bytes:
                return
            process = self._idle.popleft()
            if not process.alive:
                self._lost(process)
                continue
            self._waiting.popleft()
            self.in_flight_bytes += nbytes
            self.num_running += 1
            turn.set_result(process)


class DecodePool:
    """Pictures to patches, in processes of their own. start() before use, close() after; one event loop."""

    def __init__(self, config: DecodePoolConfig) -> None:
        self._config = config
        self._slots = SlotPool(config.slot_bytes)
        self._server = DecodeServer(config.memory_bytes)
        self._queue = DecodeQueue(config.in_flight_bytes, self._lose)
        self._processes: set[DecodeProcess] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False
        # Not the event loop's threads, which may be busy.
        self._threads = ThreadPoolExecutor(config.num_processes + 1, "decode-processes")
        self.num_replaced = 0
        self.reclaim: Callable[[int], bool] = lambda _: False
        """Called to free so many bytes of slots when there is no room; returns whether it freed any."""

    @property
    def num_running(self) -> int:
        """Pictures that a process works on."""
        return self._queue.num_running

    @property
    def num_waiting(self) -> int:
        """Pictures that wait for a process or for the budget."""
        return self._queue.num_waiting

    @property
    def in_flight_bytes(self) -> int:
        """Decoded bytes that running jobs may take, as estimated from the headers."""
        return self._queue.in_flight_bytes

    @property
    def num_slots(self) -> int:
        """Slots that hold a picture, or will, and were not released."""
        return self._slots.num_used

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    async def start(self) -> None:
        """Remove segments of dead owners and start the processes. Raises StartupError."""
        sweep()
        await self._in_thread(self._server.start)
        for _ in range(self._config.num_processes):
            await self._add_process()
        for process in self._processes:
            log_confinement(process.measures)
            break

    async def picture(
        self, encoded: bytes, family: str, settings: Mapping[str, Any], layout: PictureLayout
    ) -> PreparedPicture:
        """Return the patches of *encoded*, for which *family*'s Layout made *layout* and resolved *settings*.

        Raises RequestError for a bad picture, DeadlineExceeded for one that takes too long, Draining after close().
        The slot is the caller's until release().
        """
        header = read_header(encoded)
        self._config.limits.check(header, len(encoded))
        num_deaths = 0
        job = PictureJob(encoded, family, dict(settings), layout, self._config.limits)
        for _ in range(MAX_ATTEMPTS):
            try:
                return await self._attempt(job, header.decoded_bytes)
            except ProcessDied as death:
                num_deaths += not death.with_server
            if num_deaths == 2:
                raise InvalidImage("Decoding the picture ended its process twice: the picture may be damaged.")
        raise InternalError("No decode process lives long enough for the picture; the request can be sent again.")

    async def _attempt(self, job: PictureJob, nbytes: int) -> PreparedPicture:
        # There is no await between this line and the queue: close() refuses all jobs that wait in the queue.
        if self._closing:
            raise _draining()
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        process = await self._queue.enter(nbytes)
        waited = loop.time() - arrived
        task = self._spawn(self._run(process, nbytes, job, waited))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._discard)
            raise

    def retain(self, picture: PreparedPicture) -> None:
        """Add a reference to the slot of *picture*, to be dropped by a release() of its own."""
        if picture.slot is not None:
            self._slots.retain(picture.slot.name)

    def is_held_by_others(self, picture: PreparedPicture) -> bool:
        """Whether *picture*, to which the caller holds a reference, has no slot or one that others hold, too."""
        return picture.slot is None or self._slots.num_holders(picture.slot.name) > 1

    def is_lost(self, picture: PreparedPicture) -> bool:
        """Whether another process has removed the slot of *picture*."""
        return picture.slot is not None and not exists(picture.slot.name)

    def release(self, names: Iterable[str], *, reusable: bool = True) -> None:
        """Drop one reference to each slot of *names*; unknown names are no error.

        Without *reusable* a worker may still read the slot, so the slot is never written again.
        """
        for name in names:
            self._slots.release(name, reusable=reusable)

    async def close(self) -> None:
        """End all processes, fail all jobs with Draining, and unlink every segment. May be called again."""
        if self._closing:
            return
        self._closing = True
        self._queue.refuse(_draining())
        # Before the server, which reaps them. A job that waits for its process sees the process end.
        for process in self._processes:
            process.terminate()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._in_thread(process.kill) for process in self._processes))
        self._processes.clear()
        await self._in_thread(self._server.stop)
        self._threads.shutdown(wait=False)
        self._slots.close()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, process: DecodeProcess, nbytes: int, job: PictureJob, waited: float) -> PreparedPicture:
        slot = self._acquire(job.layout.num_pixel_bytes)
        ref = slot.ref if slot else None
        descriptor = _opened(ref)
        survivor: DecodeProcess | None = None
        filled = False
        try:
            answer = await self._ask(process, msgspec.structs.replace(job, slot=ref), descriptor)
            survivor = process
            if answer.failure:
                raise from_code(answer.failure.code, answer.failure.message)
            filled = answer.inline is None
            num_bytes = job.layout.num_pixel_bytes
            return PreparedPicture(ref if filled else None, answer.inline, num_bytes, answer.seconds, waited)
        finally:
            if descriptor is not None:
                os.close(descriptor)
            if ref and not filled:
                self._slots.release(ref.name)
            self._queue.leave(nbytes, survivor)

    def _acquire(self, num_bytes: int) -> Slot | None:
        slot = self._slots.acquire(num_bytes)
        if slot is None and self.reclaim(num_bytes):
            slot = self._slots.acquire(num_bytes)
        return slot

    async def _ask(self, process: DecodeProcess, job: PictureJob, slot: int | None) -> PictureAnswer:
        """Return the answer of *process*; where this raises, the process has ended."""
        error: SaccadeError | ProcessDied
        limit = self._config.time_limit_seconds
        try:
            async with asyncio.timeout(limit):
                return await process.exchange(job, slot)
        except TimeoutError:
            error = DeadlineExceeded(f"Decoding the picture took longer than {limit:g} seconds.")
        except (OSError, *UNREADABLE):
            error = ProcessDied()
        # The slot may be used again only when the process can no longer write to it.
        await self._in_thread(process.kill)
        if isinstance(error, ProcessDied):
            error.with_server = process.life != self._server.life
        if self._closing:
            raise _draining()
        self._lose(process)
        raise error

    def _lose(self, process: DecodeProcess) -> None:
        self._processes.discard(process)
        self._spawn(self._replace(process))

    async def _replace(self, process: DecodeProcess) -> None:
        self.num_replaced += 1
        await self._in_thread(process.kill)
        while not self._closing:
            try:
                await self._add_process()
                break
            except StartupError:
                self._queue.refuse(InternalError("No decode process could be started; the server's log says why."))
                await asyncio.sleep(RETRY_SECONDS)

    async def _add_process(self) -> None:
        process = await self._in_thread(self._server.fork)
        self._processes.add(process)
        self._queue.add(process)

    def _discard(self, task: asyncio.Task[PreparedPicture]) -> None:
        """Free the slot of a picture whose request is gone."""
        if not task.cancelled() and task.exception() is None and (ref := task.result().slot):
            self._slots.release(ref.name)


def _opened(ref: SlotRef | None) -> int | None:
    """Return a descriptor of the slot; None, and the pixels come inline, where there is no slot or it was removed."""
    if ref is None:
        return None
    try:
        return open_descriptor(ref)
    except SlotError:
        return None


def log_confinement(measures: tuple[str, ...]) -> None:
    """Log which *measures* confine the decode processes; where there are none, as a warning."""
    missing = [measure for measure in MEASURES if measure not in measures]
    if measures:
        _logger.info("decode processes are confined", by=list(measures), missing=missing)
    else:
        _logger.warning("decode processes are confined by limits only; the kernel or container allows no more")


def _draining() -> Draining:
    return Draining("The server is shutting down.")
