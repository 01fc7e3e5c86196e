"""Records steps to files and replays them: the segment format, a writer, a reader, and the comparison of results.

A segment starts with empty rows and caches, so that it can be replayed on its own. It is a file of length-framed
msgpack: a Header, then a Record for each call of the executor, in order. If the worker died, a segment may end in the
middle of a record.
"""

import math
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import msgspec
import structlog
from blake3 import blake3

from saccade.engine.config import EngineConfig
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.step import EncoderInput, SamplingInput, StepInput, StepOutput, with_pixels
from saccade.engine.executor.protocol import Executor
from saccade.errors import StartupError
from saccade.transport.framing import PREFIX_BYTES, UNREADABLE, framed, length

FORMAT = 6
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

FULL = "the segment is full"
ENDING = "the engine ends"

logger = structlog.get_logger(__name__)


class Machine(msgspec.Struct, frozen=True):
    """The machine's properties that affect the last bits of a step's results. *weights* is the model's fingerprint."""

    weights: bytes
    model_config: bytes
    backend: str
    device: str
    dtype: str
    num_threads: int
    processor: str
    versions: dict[str, str]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """A segment's settings. *config* has the resolved device, dtype, threads and number of blocks."""

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


class StepFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """A call of the executor failed with *error*. This is a segment's last record."""

    error: str


Record = StepLaunched | StepCollected | StepFailed


class Recorder:
    """An executor.protocol.Executor that records the calls to *executor* and their results.

    Between segments nothing is recorded. `begin_if_due` begins a segment if one `is_due` and every sequence can be
    computed again; it empties rows and caches. A separate thread writes the file, and only `close` waits for it.
    """

    def __init__(self, executor: Executor, header: Header) -> None:
        self.executor = executor
        self.rest_seconds, self.max_queued_bytes = REST_SECONDS, MAX_QUEUED_BYTES
        self._header = header
        self._folder = recording_folder(header.config)
        self._max_bytes = header.config.record_steps_bytes // NUM_SEGMENTS
        self._pool = ThreadPoolExecutor(1, "step recorder")
        self._segment: Segment | None = None
        self._num_bytes: dict[Path, int] = {}
        self._began = -math.inf

    @property
    def is_due(self) -> bool:
        """Whether the next segment should start."""
        return self._segment is None and time.monotonic() - self._began >= self.rest_seconds

    def begin_if_due(self, scheduler: Scheduler, collect: Callable[[], None]) -> None:
        """Start a segment if one is due and the scheduler can start over.

        Rows and caches become empty, so running sequences are computed again.

        *collect* ends the steps in flight.
        """
        if self.is_due:
            collect()
            if scheduler.can_start_over and self.begin_segment():
                scheduler.start_over()

    def begin_segment(self) -> bool:
        """Start a segment; return whether its file could be created.

        Before the next step, no row may be in use, and the caches must be empty.
        """
        self._began = time.monotonic()
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        path = self._folder / f"{stamp}-{os.getpid()}-{len(self._num_bytes) + 1:06}{SUFFIX}"
        self._num_bytes[path] = 0
        try:
            self._make_room()
            self._segment = Segment(path)
        except OSError as error:
            logger.error("steps cannot be recorded", file=str(path), reason=error.strerror)
            return False
        logger.info("recording steps", file=str(path))
        self._record(self._header)
        return True

    def close(self) -> None:
        """End the segment, wait until it is written, and close the executor."""
        self.end_segment(ENDING)
        self._pool.shutdown()
        self.executor.close()

    def launch(self, step: StepInput, sampling: SamplingInput) -> None:
        """Record *step*, then compute it. If the step kills the process, the segment has no later record."""
        if self._segment is not None:
            recorded = step if self._header.config.record_pixels else with_pixels(step, digest)
            self._record(StepLaunched(recorded, sampling))
        with self._recording_failure():
            self.executor.launch(step, sampling)

    def collect_output(self) -> StepOutput:
        """Return the output of the oldest step, and record it."""
        with self._recording_failure():
            output = self.executor.collect_output()
        self._record(StepCollected(output))
        return output

    def check_device(self) -> None:
        self.executor.check_device()

    @contextmanager
    def _recording_failure(self) -> Iterator[None]:
        """End the segment if a call raises, because the executor's state after a failed step is undefined."""
        try:
            yield
        except Exception as error:
            self._record(StepFailed(f"{type(error).__name__}: {error}"))
            self.end_segment("a step failed")
            raise

    def _record(self, record: "Header | Record") -> None:
        if (segment := self._segment) is None:
            return
        frame = framed(msgspec.msgpack.encode(record))
        num_bytes = self._num_bytes[segment.path] + len(frame)
        if num_bytes > self._max_bytes:
            self.end_segment(FULL)
        elif segment.error or num_bytes - segment.num_written > self.max_queued_bytes:
            self.end_segment(segment.error or "the disk is too slow")
            self._began = time.monotonic() + DISK_REST_SECONDS
        else:
            self._num_bytes[segment.path] = num_bytes
            if segment.add_frame(frame):
                self._pool.submit(segment.write_frames)

    def end_segment(self, reason: str) -> None:
        """End the segment, if there is one."""
        if (segment := self._segment) is not None:
            log = logger.info if reason in (FULL, ENDING) else logger.warning
            log("closed a segment of recorded steps", file=str(segment.path), reason=reason)
            self._pool.submit(segment.close)
            self._segment = None

    def _make_room(self) -> None:
        """Delete the oldest segments, even those of earlier engines, until there is room for another one."""
        # By name, which begins with the time of the start: the last bytes may be written after the next segment began.
        sizes = {
            path: max(path.stat().st_size, self._num_bytes.get(path, 0))
            for path in sorted(self._folder.glob(f"*{SUFFIX}"))
        }
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total + self._max_bytes <= self._header.config.record_steps_bytes:
                return
            path.unlink()
            total -= size


class Segment:
    """A new file, and the frames to add to it.

    `write_frames` runs on another thread; after an *error* it writes no more. Raises OSError if the file cannot be
    created.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.num_written, self.error = path, 0, ""
        self._frames: list[bytes] = []
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def add_frame(self, frame: bytes) -> bool:
        """Add a frame; return whether `write_frames` must be called for it."""
        self._frames.append(frame)
        return len(self._frames) == 1

    def write_frames(self) -> None:
        """Write the frames that arrive within a short time."""
        time.sleep(GATHER_SECONDS)
        frames, self._frames = self._frames, []
        rest = memoryview(b"".join(frames))
        self.num_written += len(rest)
        try:
            while rest and not self.error:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            self.error = f"writing failed: {error.strerror}"

    def close(self) -> None:
        """Write the rest, and close the file."""
        self.write_frames()
        os.close(self._descriptor)


def digest(image: EncoderInput) -> bytes:
    """Return what a recording keeps in place of an image's pixels: their length, as 8 bytes, and their blake3 hash."""
    return len(image.pixels).to_bytes(8, "big") + blake3(image.pixels).digest()


def recording_folder(config: EngineConfig) -> Path:
    """Return the folder for recordings, created with mode 0700 if it does not exist. Raises StartupError.

    Recordings contain prompts, so the folder must belong to this user, and no other user may be able to write to it.
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


class Recording:
    """The segment on disk at *path*. Raises StartupError if the file is no recording of this FORMAT or unreadable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.header = header = msgspec.msgpack.decode(next(self._payloads(), b""), type=Header)
        except UNREADABLE as error:
            raise StartupError(f"{path} is not a recording of steps, or one of another version of Saccade.") from error
        if header.format != FORMAT:
            raise StartupError(f"{path} has format {header.format} of recordings; this version reads format {FORMAT}.")

    def records(self) -> Iterator[Record]:
        """Yield the complete records after the header. Raises StartupError if one is damaged or cannot be read."""
        for number, payload in enumerate(self._payloads()):
            try:
                if number:
                    yield msgspec.msgpack.decode(payload, type=Record)
            except UNREADABLE as error:
                raise StartupError(f"{self.path} is damaged: record {number} cannot be read.") from error

    def check_images(self) -> None:
        """Read all records. Raises StartupError if a record is damaged, or if an image has no pixels."""
        images = [
            f"step {record.step.number}, encoder output {image.output_id}: grid {'x'.join(map(str, image.grid))}, "
            f"{int.from_bytes(image.pixels[:8], 'big')} bytes, blake3 {image.pixels[8:].hex()}"
            for record in self.records()
            if isinstance(record, StepLaunched)
            for image in record.step.images
        ]
        if images and not self.header.config.record_pixels:
            raise StartupError(
                f"{self.path} was recorded without pixels (--record-pixels), and cannot be replayed without those of "
                f"{len(images)} images:\n" + "\n".join(images)
            )

    def _payloads(self) -> Iterator[bytes]:
        """Yield the payloads of complete frames."""
        try:
            with self.path.open("rb") as file:
                size = self.path.stat().st_size
                while len(prefix := file.read(PREFIX_BYTES)) == PREFIX_BYTES and file.tell() + length(prefix) <= size:
                    yield file.read(length(prefix))
        except OSError as error:
            raise StartupError(f"Cannot read {self.path}: {error.strerror}.") from error


@dataclass(frozen=True)
class Difference:
    """A difference between the *expected* result in the recording and the result that the replay *got*.

    *row* and *sequence_id* are None for a failure, and for the list of results that are not finite.
    """

    number: int
    row: int | None
    sequence_id: int | None
    expected: str
    got: str


@dataclass
class ReplayResult:
    """How many steps and tokens were compared, the compared and differing sequences, and the *first* difference."""

    num_steps: int = 0
    num_tokens: int = 0
    sequence_ids: set[int] = field(default_factory=set)
    different: set[int] = field(default_factory=set)
    first: Difference | None = None


class Replay:
    """Repeats the recorded calls on *executor*, and compares the results.

    It compares token ids, which results are not finite and, with *is_exact*, log probabilities bit for bit. The
    executor's exceptions propagate, including the failure at the end of a recording.
    """

    def __init__(self, executor: Executor, *, is_exact: bool) -> None:
        self._executor = executor
        self._is_exact = is_exact
        self._sequence_ids: dict[int, int] = {}
        self._launched: deque[tuple[StepInput, SamplingInput, dict[int, int]]] = deque()
        self._number = 0
        self._result = ReplayResult()

    def run_records(self, records: Iterable[Record]) -> ReplayResult:
        """Replay *records*, which must start with the first record of a segment."""
        for record in records:
            match record:
                case StepLaunched(step, sampling):
                    self._number = step.number
                    self._sequence_ids.update((start.row, start.sequence_id) for start in step.started)
                    ids = {chunk.row: self._sequence_ids[chunk.row] for chunk in step.chunks}
                    self._launched.append((step, sampling, ids))
                    self._executor.launch(step, sampling)
                case StepCollected(output):
                    self._compare(output, self._executor.collect_output())
                case StepFailed(error):
                    self._note(None, f"the step fails with {error}", "the step does not fail")
        return self._result

    def _compare(self, expected: StepOutput, got: StepOutput) -> None:
        step, sampling, sequence_ids = self._launched.popleft()
        self._number = expected.number
        self._result.num_steps += 1
        self._result.num_tokens += len(expected.token_ids)
        self._result.sequence_ids.update(sequence_ids.values())
        rows = [chunk.row for chunk in step.chunks for _ in range(chunk.num_draws)]
        rows += [score.row for score in sampling.prompt_scores]
        for row, one, other in zip_longest(rows, self._texts(expected), self._texts(got)):
            self._note((row, sequence_ids[row]), one, other)
        self._note(None, str(expected.non_finite), str(got.non_finite))

    def _texts(self, output: StepOutput) -> list[str]:
        """Return the tokens and prompt log probabilities as texts that are equal exactly if the numbers are."""
        logprobs = output.logprobs if self._is_exact else []
        tokens = [
            f"token {one}{f', {logprob}' * (logprob is not None)}"
            for one, logprob in zip_longest(output.token_ids, logprobs)
        ]
        return tokens + [str(scores) for scores in output.prompt_logprobs if self._is_exact]

    def _note(self, whose: tuple[int, int] | None, expected: str | None, got: str | None) -> None:
        """Record a difference if two values for the row and sequence in *whose* are not equal."""
        if expected == got:
            return
        row, sequence_id = whose or (None, None)
        if sequence_id is not None:
            self._result.different.add(sequence_id)
        if self._result.first is None:
            self._result.first = Difference(self._number, row, sequence_id, str(expected), str(got))
