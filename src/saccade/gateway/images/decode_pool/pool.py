"""The gateway's pool of decode processes, which turn encoded images into patches in shared memory.

The pool uses no torch and touches no pixels. Each job waits in a DecodeQueue for a process that works on nothing else.
An image usually takes milliseconds, so it is decoded to the end even if its request is gone, and the process stays. A
video or a PDF may take half a minute. If its request is gone, the pool ends the process and replaces it. It does the
same if an image is not done SLOW_SECONDS after its request is gone.

No header tells which images are slow. If an image has taken SLOW_SECONDS while jobs of other clients wait, the pool
ends its process. The image then starts again as a slow job. If there are several processes, slow jobs leave one free
for other jobs.

A process that takes too long fails only the request that it works on, and is replaced. A process that dies is replaced
as well. The image may not be the cause, so it gets a second process, and is refused if that dies too.
"""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import msgspec
import structlog

from saccade import models
from saccade.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidImage,
    InvalidVideo,
    StartupError,
    from_code,
)
from saccade.gateway.config import MediaSettings
from saccade.gateway.confinement import LEFT_OPEN, SECCOMP
from saccade.gateway.images.decode_pool.job import (
    DrawingJob,
    ImageAnswer,
    InlineJob,
    Job,
    LayoutJob,
    PdfJob,
    PixelJob,
    StageSeconds,
    VideoHeaderJob,
)
from saccade.gateway.images.decode_pool.queue import DecodeQueue, FileTime, ProcessTurn, draining
from saccade.gateway.images.decode_pool.server import DecodeProcess, DecodeServer
from saccade.media.header import read_header
from saccade.media.pdf_pages import BYTES_PER_PIXEL, PdfLimits, PdfPage
from saccade.media.video_header import MAX_FPS, MIN_FPS, VideoLimits, decoded_bytes, demuxer
from saccade.protocol.media import ImageLayout, SlotRef, VideoHeader
from saccade.transport import lasting_task
from saccade.transport.framing import UNREADABLE
from saccade.transport.shared_memory import Slot, SlotError, SlotPool, exists, open_descriptor, sweep

_logger = structlog.get_logger(__name__)
T = TypeVar("T")
J = TypeVar("J", bound=Job)
Work = Callable[[ProcessTurn, J, float], Coroutine[Any, Any, T]]
"""What is done with a job in its turn; it ends the turn."""

HEADER_BYTES = 128 << 20
"""Estimate of the memory that a video's header takes, one frame included, or the list of a PDF's pages."""

SLOW_SECONDS = 1.0
"""An image of ordinary size takes a tenth of it."""

RETRY_SECONDS = 1.0
MAX_ATTEMPTS = 8


class ProcessDied(Exception):
    """A decode process ended while it worked on an image.

    *with_server* means that the fork server had ended, and all decode processes with it, so the image is not the cause.
    """

    with_server = False


class ProcessYielded(Exception):
    """The pool ended a decode process that had worked long on one image while jobs of other clients waited."""


@dataclass(frozen=True)
class PreparedImage:
    """The patches of an image."""

    slot: SlotRef | None
    """None if shared memory is full."""
    inline: bytes | None
    """The patches then."""
    num_bytes: int
    seconds: StageSeconds
    """The stages in the decode process."""
    waited_seconds: float
    """The time in the queue."""


class DecodePool:
    """Turns images into patches in separate processes.

    Call start() before use and close() after it, in one event loop. *queue* holds the jobs that run or wait.
    """

    def __init__(self, config: MediaSettings) -> None:
        self._config, self._image_limits = config, config.image_limits
        self._slots = SlotPool(config.shared_memory_bytes)
        self._server = DecodeServer(config.decode_memory_bytes, config.pdf_fonts.folder)
        self.queue = DecodeQueue(
            config.decode_in_flight_bytes,
            # One process is left to images.
            max(1, config.num_decode_processes - 1),
            self._lose,
            config.video_wait_seconds,
        )
        self._processes: set[DecodeProcess] = set()
        self._yielded: set[DecodeProcess] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_started = self._closing = False
        # Not the event loop's threads, which may be busy.
        self._threads = ThreadPoolExecutor(config.num_decode_processes + 1, "decode-processes")
        self.num_replaced = 0
        self.num_omissions = 0
        self.reclaim: Callable[[int], bool] = lambda _: False
        """Called with the bytes to free if there is no room for a slot; returns whether it freed any."""

    @property
    def num_slots(self) -> int:
        """How many slots hold or will hold an image."""
        return self._slots.num_used

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    async def start(self) -> None:
        """Remove segments whose owners are dead, and start the processes. Raises StartupError."""
        sweep()
        self._is_started = True
        await self._in_thread(self._server.start)
        for _ in range(self._config.num_decode_processes):
            await self._add_process()
        log_confinement(next(iter(self._processes)).measures)

    async def prepare_image(
        self,
        encoded: bytes,
        family: str,
        settings: Mapping[str, Any],
        layout: ImageLayout,
        client: Hashable = None,
        video: VideoHeader | None = None,
        page: PdfPage | None = None,
        file_time: FileTime | None = None,
    ) -> PreparedImage:
        """Return the patches of *encoded*: an image, a video with the header *video*, or a *page* of a PDF.

        *layout* and *settings* come from *family*'s Layout. The job waits for a process in *client*'s turn. Its time
        counts against *file_time*, which all pages of a file share. The caller holds the slot until release(). Raises
        RequestError for a bad image, DeadlineExceeded if it takes too long, and Draining after close(). For a video it
        also raises the errors of video_header().
        """
        limits = self._image_limits
        if video is not None:
            num_bytes = decoded_bytes(video)
        elif page is not None:
            # A page may show images that are larger than itself.
            num_bytes = max(HEADER_BYTES, page.width * page.height * BYTES_PER_PIXEL)
        else:
            header = read_header(encoded)
            limits.check_header(header, len(encoded))
            num_bytes = header.decoded_bytes
        video_limits, allows_gaps = self._config.video_limits, self._config.pdf_fonts.allows_gaps
        job = PixelJob(encoded, family, dict(settings), layout, limits, video_limits, video, page, allows_gaps)
        return await self._tried(job, num_bytes, self._fill, client, file_time)

    def file_time(self) -> FileTime:
        """Return the time that all pages of one PDF may take together; a video may take as long."""
        return FileTime(self._config.video_timeout_seconds)

    async def video_header(self, encoded: bytes, client: Hashable = None) -> VideoHeader:
        """Return an encoded video's header, read in *client*'s turn.

        Raises the same errors as prepare_image(), and QueueFull if too many videos wait or this one waited too long.
        Cancelling the waiting task ends the job.
        """
        self._config.video_limits.check_bytes(len(encoded))
        demuxer(encoded)
        job = VideoHeaderJob(encoded, self._config.video_limits)
        header = (await self._tried(job, HEADER_BYTES, self._answer_inline, client)).video_header
        if header is None:
            raise InternalError("A decode process answered without the video's header.")
        return _checked(header, self._config.video_limits)

    async def pdf_pages(
        self, encoded: bytes, client: Hashable = None, limits: PdfLimits | None = None
    ) -> list[PdfPage]:
        """Return the pages of an encoded PDF, read in *client*'s turn, within *limits*, by default the settings'.

        Raises the same errors as prepare_image().
        """
        limits = limits or self._config.pdf_limits
        limits.check_bytes(len(encoded))
        answer = await self._tried(PdfJob(encoded, limits), HEADER_BYTES, self._answer_inline, client)
        pages = answer.pages or []
        # A compromised process may have invented them.
        limits.check_pages(pages)
        return pages

    async def layout(
        self, family: str, settings: Mapping[str, Any], width: int, height: int, client: Hashable = None
    ) -> ImageLayout:
        """Return the layout of an image of *width* x *height* pixels by *family*'s processor, in *client*'s turn.

        Raises the same errors as prepare_image().
        """
        library = models.families()[family].library
        if self._is_started and library is not None and library not in self._server.libraries:
            await self._in_thread(partial(self._server.load_library, library))
        job = LayoutJob(family, dict(settings), width, height)
        return job.checked((await self._tried(job, HEADER_BYTES, self._answer_inline, client)).layout)

    async def drawing(self, encoded: bytes, page: PdfPage, client: Hashable = None) -> bytes:
        """Return a *page* of an encoded PDF as RGB, uint8 [page.height, page.width, 3], drawn in *client*'s turn.

        Raises the same errors as prepare_image().
        """
        self._config.pdf_limits.check_bytes(len(encoded))
        num_bytes = max(HEADER_BYTES, page.width * page.height * BYTES_PER_PIXEL)
        job = DrawingJob(encoded, page, self._config.pdf_fonts.allows_gaps)
        answer = await self._tried(job, num_bytes, self._answer_inline, client)
        if answer.inline is None:
            raise InternalError("A decode process answered without the page's pixels.")
        if not answer.is_whole:
            self._note_omission()
        return answer.inline

    async def _tried(
        self, job: J, nbytes: int, work: Work[J, T], client: Hashable = None, file_time: FileTime | None = None
    ) -> T:
        """Return the result of *work* on *job*. If its process dies or is ended early, try again in another one."""
        if not self._is_started:
            # The job would wait for ever.
            raise InternalError(f"No process was started to decode the {job.medium}.")
        num_deaths, is_slow = 0, job.medium != "image"
        for _ in range(MAX_ATTEMPTS):
            try:
                return await self._attempt(job, nbytes, work, client, file_time, is_slow)
            except ProcessYielded:
                is_slow = True
            except ProcessDied as death:
                num_deaths += not death.with_server
            if num_deaths == 2:
                raise _ended_twice(job)
        raise InternalError("No decode process lives long enough for the image; the request can be sent again.")

    async def _attempt(
        self, job: J, nbytes: int, work: Work[J, T], client: Hashable, file_time: FileTime | None, is_slow: bool
    ) -> T:
        is_video = job.medium == "video"
        # The loop's own clock counts whole milliseconds.
        arrived = time.perf_counter()
        turn = await self.queue.enter(nbytes, is_video=is_video, is_slow=is_slow, client=client)
        if file_time is not None and file_time.seconds <= 0:
            self.queue.leave(turn, turn.process)
            raise file_time.error()
        begun = time.perf_counter()
        task = self._track(asyncio.create_task(work(replace(turn, file_time=file_time), job, begun - arrived)))
        later = asyncio.get_running_loop().call_later
        watch = None if is_slow else later(SLOW_SECONDS, self._yield_slow, turn.process, task, client)
        is_taken = False
        try:
            result = await asyncio.shield(task)
            is_taken = True
            return result
        finally:
            if watch is not None:
                watch.cancel()
            if file_time is not None:
                file_time.seconds -= time.perf_counter() - begun
            # A task that is done has left its turn, so the process may already work on another job.
            if is_slow and not task.done():
                turn.process.terminate()
            elif not task.done():
                later(SLOW_SECONDS, _end_unfinished, turn.process, task)
            if not is_taken:
                task.add_done_callback(self._discard)

    def _yield_slow(self, process: DecodeProcess, task: asyncio.Task[Any], client: Hashable) -> None:
        """End *process*, which has worked long on the image of *task*, as soon as jobs of other clients wait.

        Only one process ends at a time, since its replacement may be enough for the waiting jobs.
        """
        if task.done():
            return
        if self.queue.keeps_others_waiting(client) and not self._yielded:
            self._yielded.add(process)
            process.terminate()
        else:
            asyncio.get_running_loop().call_later(SLOW_SECONDS, self._yield_slow, process, task, client)

    def retain(self, image: PreparedImage) -> None:
        """Add a reference to the slot of *image*; the reference needs its own release()."""
        if image.slot is not None:
            self._slots.retain(image.slot.name)

    def is_held_by_others(self, image: PreparedImage) -> bool:
        """Return whether *image*, which the caller holds, has no slot or a slot that others hold too."""
        return image.slot is None or self._slots.num_holders(image.slot.name) > 1

    def is_lost(self, image: PreparedImage) -> bool:
        """Return whether another process has removed the slot of *image*."""
        return image.slot is not None and not exists(image.slot.name)

    def release(self, names: Iterable[str], *, reusable: bool = True) -> None:
        """Drop one reference to each slot of *names*; ignore unknown names.

        Without *reusable*, a worker may still read the slot, so the slot is never written again.
        """
        for name in names:
            self._slots.release(name, reusable=reusable)

    async def close(self) -> None:
        """End all processes, fail all jobs with Draining, and unlink every segment. May be called again."""
        if self._closing:
            return
        self._closing = True
        self.queue.close()
        # Before the server, which reaps them. A running job notices that its process ends.
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

    def _track(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _answer_inline(self, turn: ProcessTurn, job: InlineJob, queue_seconds: float) -> ImageAnswer:
        return await self._ask(turn, job, None)

    async def _fill(self, turn: ProcessTurn, job: PixelJob, queue_seconds: float) -> PreparedImage:
        num_bytes = job.layout.num_pixel_bytes
        slot = self._acquire(num_bytes)
        ref = slot.ref if slot else None
        descriptor = _opened(ref)
        filled = False
        try:
            answer = await self._ask(turn, msgspec.structs.replace(job, slot=ref), descriptor)
            filled = answer.inline is None
            if not answer.is_whole:
                self._note_omission()
            return PreparedImage(ref if filled else None, answer.inline, num_bytes, answer.seconds, queue_seconds)
        finally:
            if descriptor is not None:
                os.close(descriptor)
            if ref and not filled:
                self._slots.release(ref.name)

    def _note_omission(self) -> None:
        """Log the first, tenth, hundredth page and so on that lacks letters, without any client's data."""
        self.num_omissions += 1
        if str(self.num_omissions).strip("0") == "1":
            _logger.warning("a PDF's page is drawn without letters that no font has", count=self.num_omissions)

    def _acquire(self, num_bytes: int) -> Slot | None:
        slot = self._slots.acquire(num_bytes)
        if slot is None and self.reclaim(num_bytes):
            slot = self._slots.acquire(num_bytes)
        return slot

    async def _ask(self, turn: ProcessTurn, job: Job, slot: int | None) -> ImageAnswer:
        """Return the answer from the process of *turn*, and end the turn. Raises the job's error."""
        survivor: DecodeProcess | None = None
        try:
            answer = await self._answer(turn, job, slot)
            survivor = turn.process
        finally:
            # One that answered as it was ended is dead, which the queue finds out.
            self._yielded.discard(turn.process)
            self.queue.leave(turn, survivor)
        if answer.failure:
            raise from_code(answer.failure.code, answer.failure.message)
        return answer

    async def _answer(self, turn: ProcessTurn, job: Job, slot: int | None) -> ImageAnswer:
        """Return the answer from the process of *turn*; if this raises, the process has ended."""
        error: BaseException
        process, file_time = turn.process, turn.file_time
        is_video = job.medium == "video"
        limit = self._config.video_timeout_seconds if is_video else self._config.decode_timeout_seconds
        is_last = file_time is not None and file_time.seconds < limit
        limit = limit if file_time is None else min(limit, max(0.0, file_time.seconds))
        try:
            async with asyncio.timeout(limit):
                return await process.exchange(job, slot)
        except TimeoutError:
            error = DeadlineExceeded(f"Decoding the {job.medium} took longer than {limit:g} seconds.")
            if file_time is not None and is_last:
                error = file_time.error()
        except (OSError, *UNREADABLE):
            error = ProcessYielded() if process in self._yielded else ProcessDied()
        except BaseException as unforeseen:
            # Nothing tells how much of the answer is still to come: the next job must not read it.
            error = unforeseen
        # The slot may be used again only when the process can no longer write to it.
        await self._in_thread(process.kill)
        if isinstance(error, ProcessDied):
            error.with_server = process.life != self._server.life
        if self._closing:
            raise draining()
        self._lose(process)
        raise error

    def _lose(self, process: DecodeProcess) -> None:
        self._processes.discard(process)
        self.num_replaced += 1
        self._track(lasting_task.begin(partial(self._replace, process), "replacement of a decode process"))

    async def _replace(self, process: DecodeProcess) -> None:
        await self._in_thread(process.kill)
        while not self._closing:
            try:
                await self._add_process()
                break
            except StartupError:
                self.queue.refuse(InternalError("No decode process could be started; the server's log says why."))
                await asyncio.sleep(RETRY_SECONDS)

    async def _add_process(self) -> None:
        process = await self._in_thread(self._server.fork)
        self._processes.add(process)
        self.queue.add_process(process)

    def _discard(self, task: asyncio.Task[Any]) -> None:
        """Free the slot of an image whose request is gone."""
        if task.cancelled() or task.exception() is not None:
            return
        done = task.result()
        if isinstance(done, PreparedImage) and done.slot is not None:
            self._slots.release(done.slot.name)


def _end_unfinished(process: DecodeProcess, task: asyncio.Task[Any]) -> None:
    """End *process* if it still works on the job of *task*, whose request is gone."""
    if not task.done():
        process.terminate()


def _opened(ref: SlotRef | None) -> int | None:
    """Return the slot's descriptor, or None if there is no slot or it was removed; then the pixels come inline."""
    if ref is None:
        return None
    try:
        return open_descriptor(ref)
    except SlotError:
        return None


def log_confinement(measures: tuple[str, ...]) -> None:
    """Log which *measures* confine the decode processes, and what the missing ones leave open."""
    if not measures:
        _logger.warning("decode processes are confined by limits only; the kernel or container allows no more")
        return
    missing = [measure for measure in LEFT_OPEN if measure not in measures]
    log = _logger.warning if SECCOMP in missing else _logger.info
    left_open = [LEFT_OPEN[measure] for measure in missing]
    log("decode processes are confined", by=list(measures), missing=missing, left_open=left_open)


def _ended_twice(job: Job) -> InvalidImage | InvalidVideo:
    error = InvalidVideo if job.medium == "video" else InvalidImage
    return error(f"Decoding the {job.medium} ended its process twice: the {job.medium} may be damaged.")


def _checked(header: VideoHeader, limits: VideoLimits) -> VideoHeader:
    """Check *header* against the limits and return it, since a compromised process may have invented it."""
    limits.check_size(header.width, header.height)
    limits.check_count(header.num_frames)
    if header.num_frames < 1 or not MIN_FPS <= header.fps <= MAX_FPS:
        raise InvalidVideo("The video's header is damaged.")
    return header
