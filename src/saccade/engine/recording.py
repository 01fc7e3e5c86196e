"""Record steps to files for `saccade replay`: the format of segments, a writer and a reader.

A segment starts with empty rows and caches, so that it can be replayed alone. It is a file of length-framed msgpack: a
Header, then a Record for each call of the executor, in order. If the worker died, a segment ends in the middle of a
record.
"""

import math
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog
from blake3 import blake3

from saccade.engine.config import EngineConfig
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.step import EncoderInput, JobDone, SamplingInput, StepInput, StepOutput, with_pixels
from saccade.engine.executor.protocol import Executor
from saccade.errors import StartupError
from saccade.transport.framing import PREFIX_BYTES, UNREADABLE, framed, length

FORMAT = 2
SUFFIX = ".steps"

NUM_SEGMENTS = 8
"""The number of segments that share the limit in bytes."""

REST_SECONDS = 10.0
"""The minimum time between the starts of two segments: at each start the running sequences are computed again."""

DISK_REST_SECONDS = 600.0
"""The wait for the next segment after the disk was too slow or writing failed."""

MAX_QUEUED_BYTES = 64 << 20
"""The maximum number of queued bytes."""

GATHER_SECONDS = 0.05
"""The time for which the writing thread collects records: each time it wakes, it takes the interpreter from the step's
thread.
"""

CLOSE_SECONDS = 5.0

FULL = "the segment is full"
ENDING = "the engine ends"

logger = structlog.get_logger(__name__)


class Machine(msgspec.Struct, frozen=True):
    """The properties that affect the last bits of a step's results. *weights* is the model's fingerprint."""

    weights: bytes
    model_config: bytes
    backend: str
    device: str
    dtype: str
    num_threads: int
    processor: str
    versions: dict[str, str]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a recorded segment. *config* has the resolved device, dtype, threads and number of blocks."""

    format: int = FORMAT
    machine: Machine
    config: EngineConfig


class StepLaunched(msgspec.Struct, frozen=True, array_like=True, tag="launch"):
    """A launched step. Without `record_pixels`, `digest` stands in for the pixels of its images."""

    step: StepInput
    sampling: SamplingInput


class StepCollected(msgspec.Struct, frozen=True, array_like=True, tag="collect"):
    """The output of the oldest launched step."""

    output: StepOutput


class JobsTaken(msgspec.Struct, frozen=True, array_like=True, tag="jobs"):
    """Background jobs that were reported as ended at this point."""

    jobs: tuple[JobDone, ...]


class StepFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The failure of the previous call, with *error*. It is the last record."""

    error: str


Record = StepLaunched | StepCollected | JobsTaken | StepFailed


class RecordingSegment:
    """A new file with a writing thread. Raises OSError if it cannot be created."""

    def __init__(self, path: Path, max_bytes: int, max_queued_bytes: int) -> None:
        self.path = path
        self.num_bytes = 0
        self._num_written_bytes = 0
        self._max_bytes = max_bytes
        self._max_queued_bytes = max_queued_bytes
        self._error: str | None = None
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._thread = threading.Thread(target=self._run, name="step recorder", daemon=True)
        self._thread.start()

    def write(self, payload: bytes) -> str | None:
        """Queue a record without waiting; return the reason if the segment must end without it, else None."""
        frame = framed(payload)
        if self._error is not None:
            return self._error
        if self.num_bytes + len(frame) > self._max_bytes:
            return FULL
        if self.num_bytes - self._num_written_bytes + len(frame) > self._max_queued_bytes:
            return "the disk is too slow"
        self.num_bytes += len(frame)
        self._queue.put(frame)
        return None

    def close(self) -> None:
        """End the file after the queued records, without waiting."""
        self._queue.put(None)

    @property
    def is_writing(self) -> bool:
        """Whether the file may still grow."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait until everything is written, at most CLOSE_SECONDS."""
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        with open(self._descriptor, "wb", buffering=0) as file:
            while (frame := self._queue.get()) is not None:
                frames = [frame]
                time.sleep(GATHER_SECONDS)
                for _ in range(self._queue.qsize()):
                    if (frame := self._queue.get()) is None:
                        self.close()
                    else:
                        frames.append(frame)
                self._put(file.fileno(), b"".join(frames))

    def _put(self, descriptor: int, content: bytes) -> None:
        rest = memoryview(content)
        try:
            while rest and self._error is None:
                rest = rest[os.write(descriptor, rest) :]
        except OSError as error:
            self._error = f"writing failed: {error.strerror}"
        self._num_written_bytes += len(content)


class Recorder:
    """An executor.protocol.Executor that records the calls to *executor* and their results.

    Between segments nothing is recorded. If `is_due`, the engine empties rows and caches and calls `begin`.
    """

    def __init__(
        self,
        executor: Executor,
        header: Header,
        *,
        rest_seconds: float = REST_SECONDS,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        self.executor = executor
        self._header = header
        self._folder = recording_folder(header.config)
        self._max_bytes = header.config.record_steps_bytes
        self.rest_seconds = rest_seconds
        self._max_queued_bytes = max_queued_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._segment: RecordingSegment | None = None
        self._unwritten: list[RecordingSegment] = []
        self._num_segments = 0
        self._began = -math.inf

    @property
    def is_due(self) -> bool:
        """Whether the next segment should start."""
        return self._segment is None and time.monotonic() - self._began >= self.rest_seconds

    def begin_if_due(self, scheduler: Scheduler, collect: Callable[[], None]) -> None:
        """Start a segment if one is due, with empty rows and caches; the running sequences are computed again.

        Background jobs end first. Until then, no further job begins. *collect* ends the steps in flight.
        """
        if self.is_due:
            collect()
        encoder_scheduler = scheduler.encoder_scheduler
        encoder_scheduler.begins_no_jobs = self.is_due and scheduler.can_start_over
        if encoder_scheduler.begins_no_jobs and not encoder_scheduler.jobs and self.begin():
            scheduler.start_over()

    def begin(self) -> bool:
        """Start a segment; return whether its file could be created.

        Before the next step, no row may be in use, the caches must be empty, and no job may be running.
        """
        self._began = time.monotonic()
        self._num_segments += 1
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        path = self._folder / f"{stamp}-{os.getpid()}-{self._num_segments:06}{SUFFIX}"
        max_bytes = self._max_bytes // NUM_SEGMENTS
        try:
            self._make_room(max_bytes)
            self._segment = RecordingSegment(path, max_bytes, self._max_queued_bytes)
        except OSError as error:
            logger.error("steps cannot be recorded", file=str(path), reason=error.strerror)
            return False
        self._unwritten.append(self._segment)
        logger.info("recording steps", file=str(path))
        self._write(self._encoder.encode(self._header))
        return True

    def close(self) -> None:
        """End the segment, wait until it is written, and close the executor."""
        if self._segment is not None:
            self._end(ENDING)
        for segment in self._unwritten:
            segment.join()
        self.executor.close()

    def launch(self, step: StepInput, sampling: SamplingInput) -> None:
        """Record *step* before it is computed: if the step ends the process, it is the last record of its segment."""
        if self._segment is not None:
            recorded = step if self._header.config.record_pixels else with_pixels(step, digest)
            self._record(StepLaunched(recorded, sampling))
        with self._recording_failure():
            self.executor.launch(step, sampling)

    def collect(self) -> StepOutput:
        """Record the output of the oldest step."""
        with self._recording_failure():
            output = self.executor.collect()
        self._record(StepCollected(output))
        return output

    def finished_jobs(self, timeout_seconds: float = 0.0) -> list[JobDone]:
        """Record the jobs that ended."""
        jobs = self.executor.finished_jobs(timeout_seconds)
        if jobs:
            self._record(JobsTaken(tuple(jobs)))
        return jobs

    def check_device(self) -> None:
        self.executor.check_device()

    @contextmanager
    def _recording_failure(self) -> Iterator[None]:
        """End the segment if a call raises: the state of executors after a failed step is undefined."""
        try:
            yield
        except Exception as error:
            self._record(StepFailed(f"{type(error).__name__}: {error}"))
            if self._segment is not None:
                self._end("a step failed")
            raise

    def _record(self, record: Record) -> None:
        if self._segment is not None:
            self._write(self._encoder.encode(record))

    def _write(self, payload: bytes) -> None:
        if self._segment is not None and (reason := self._segment.write(payload)) is not None:
            self._end(reason)
            if reason != FULL:
                self._began = time.monotonic() + DISK_REST_SECONDS

    def _end(self, reason: str) -> None:
        if self._segment is not None:
            log = logger.info if reason in (FULL, ENDING) else logger.warning
            log("closed a segment of recorded steps", file=str(self._segment.path), reason=reason)
            self._segment.close()
            self._segment = None

    def _make_room(self, num_bytes: int) -> None:
        """Delete the oldest segments, even of earlier engines, until there is room for another *num_bytes*."""
        # By name, which begins with the time of the start: the last bytes may be written after the next segment began.
        sizes = {path: path.stat().st_size for path in sorted(self._folder.glob(f"*{SUFFIX}"))}
        self._unwritten = [segment for segment in self._unwritten if segment.is_writing]
        sizes.update((segment.path, segment.num_bytes) for segment in self._unwritten if segment.path in sizes)
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total + num_bytes <= self._max_bytes:
                return
            path.unlink()
            total -= size


def digest(image: EncoderInput) -> bytes:
    """Return what stands in a recording for the pixels of *image*: their length, as 8 bytes, and their blake3."""
    return len(image.pixels).to_bytes(8, "big") + blake3(image.pixels).digest()


def recording_folder(config: EngineConfig) -> Path:
    """Return the folder for recordings, created with mode 0700 if it does not exist. Raises StartupError.

    Recordings contain prompts: no other user may be able to put a file there.
    """
    folder = Path(config.record_steps or "")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise StartupError(f"--record-steps: the folder {folder} cannot be made: {error.strerror}.") from error
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StartupError(
            f"--record-steps: {folder} must belong to the user that runs the worker, and no other user may be able to "
            f"write to it. Name another folder, or run: chmod go-w {folder}"
        )
    return folder


@dataclass(frozen=True)
class Recording:
    """A segment on disk."""

    path: Path
    header: Header

    def records(self) -> Iterator[Record]:
        """Yield the complete records. Raises StartupError if one is damaged."""
        decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)
        for number, payload in enumerate(_payloads(self.path)):
            if number == 0:
                continue
            try:
                yield decoder.decode(payload)
            except UNREADABLE as error:
                raise StartupError(f"{self.path} is damaged: record {number} cannot be read.") from error


def open_recording(path: Path) -> Recording:
    """Return the recording at *path*. Raises StartupError if the file is not a recording."""
    payload = next(_payloads(path), b"")
    try:
        header = msgspec.msgpack.decode(payload, type=Header)
    except UNREADABLE as error:
        raise StartupError(f"{path} is not a recording of steps, or one of another version of Saccade.") from error
    if header.format != FORMAT:
        raise StartupError(f"{path} has format {header.format} of recordings; this version reads format {FORMAT}.")
    return Recording(path, header)


def _payloads(path: Path) -> Iterator[bytes]:
    """Yield the payloads of complete frames."""
    try:
        with path.open("rb") as file:
            rest = path.stat().st_size
            while len(prefix := file.read(PREFIX_BYTES)) == PREFIX_BYTES:
                rest -= PREFIX_BYTES + length(prefix)
                if rest < 0:
                    return
                yield file.read(length(prefix))
    except OSError as error:
        raise StartupError(f"Cannot read {path}: {error.strerror}.") from error
