"""Replay a recording on a new executor, and compare the results."""

import dataclasses
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec

from saccade.engine.config import EngineConfig
from saccade.engine.core.step import SamplingInput, StepInput, StepOutput
from saccade.engine.executor.execution import prepare
from saccade.engine.executor.fingerprint import model_fingerprint
from saccade.engine.executor.loader import load_model
from saccade.engine.executor.local import LocalExecutor
from saccade.engine.executor.protocol import Executor
from saccade.engine.executor.ranks.peers import Peers, closed_on_failure, ranks_of
from saccade.engine.executor.weight_filler import Progress
from saccade.engine.recording import (
    Header,
    JobsTaken,
    Machine,
    Record,
    Recording,
    StepCollected,
    StepFailed,
    StepLaunched,
)
from saccade.engine.self_description import describe_machine
from saccade.engine.startup import allocate, make_runner
from saccade.errors import StartupError
from saccade.models.files import read_model_files, with_overrides
from saccade.protocol.output import TokenLogprob

JOB_SECONDS = 600.0
"""How long to wait for a background job that ended in the recording."""


@dataclass(frozen=True)
class Difference:
    """A difference between the *expected* result in the recording and the one that the replay *got*.

    *row* and *sequence_id* are None for a job or a failure.
    """

    number: int
    row: int | None
    sequence_id: int | None
    expected: str
    got: str


@dataclass(frozen=True)
class ReplayResult:
    """The result of a replay: the numbers of compared steps, tokens and sequences, and the *first* difference."""

    num_steps: int
    num_tokens: int
    num_sequences: int
    num_different: int
    first: Difference | None


class Replay:
    """Repeats the recorded calls on *executor*. Compares token ids and, with *is_exact*, log probabilities bit for bit.

    Exceptions of the executor propagate, including the failure at the end of a recording.
    """

    def __init__(self, executor: Executor, *, is_exact: bool) -> None:
        self._executor = executor
        self._is_exact = is_exact
        self._sequence_ids: dict[int, int] = {}
        self._launched: deque[tuple[StepInput, dict[int, int], SamplingInput]] = deque()
        self._compared: set[int] = set()
        self._different: set[int] = set()
        self._first: Difference | None = None
        self._number = self._num_steps = self._num_tokens = 0

    def run(self, records: Iterable[Record]) -> ReplayResult:
        """Replay *records*, which must start with the first record of a segment."""
        for record in records:
            self._take(record)
        return ReplayResult(self._num_steps, self._num_tokens, len(self._compared), len(self._different), self._first)

    def _take(self, record: Record) -> None:
        match record:
            case StepLaunched(step, sampling):
                self._launch(step, sampling)
            case StepCollected(output):
                self._compare(output, self._executor.collect())
            case JobsTaken(jobs):
                expected = [(job.job_id, "failed" if job.failed else "done") for job in jobs]
                self._note(None, expected, self._finished_jobs(len(jobs)))
            case StepFailed(error):
                self._note(None, f"the step fails with {error}", "the step does not fail")

    def _launch(self, step: StepInput, sampling: SamplingInput) -> None:
        self._number = step.number
        self._sequence_ids.update((start.row, start.sequence_id) for start in step.started)
        self._launched.append((step, {chunk.row: self._sequence_ids[chunk.row] for chunk in step.chunks}, sampling))
        self._executor.launch(step, sampling)

    def _finished_jobs(self, num_jobs: int) -> list[tuple[int, str]]:
        ends: list[tuple[int, str]] = []
        while len(ends) < num_jobs and (jobs := self._executor.finished_jobs(JOB_SECONDS)):
            ends += [(job.job_id, "failed" if job.failed else "done") for job in jobs]
        return ends

    def _compare(self, expected: StepOutput, got: StepOutput) -> None:
        step, sequence_ids, sampling = self._launched.popleft()
        self._number = expected.number
        self._num_steps += 1
        self._num_tokens += len(expected.token_ids)
        self._compared.update(sequence_ids.values())
        rows = (chunk.row for chunk in step.chunks if chunk.draws)
        expected_tokens, tokens = (zip_longest(output.token_ids, output.logprobs) for output in (expected, got))
        for row, one, other in zip_longest(rows, expected_tokens, tokens):
            whose = (row, sequence_ids[row])
            self._note(whose, *((one, other) if self._is_exact else (one and one[0], other and other[0])))
        scores = zip_longest(sampling.prompt_scores, expected.prompt_logprobs, got.prompt_logprobs)
        for score, one, other in scores if self._is_exact else ():
            self._note((score.row, sequence_ids[score.row]), one, other)

    def _note(self, whose: tuple[int, int] | None, expected: object, got: object) -> None:
        """Record a difference if two values of the row and sequence *whose* are not equal to the last bit."""
        if msgspec.msgpack.encode(expected) == msgspec.msgpack.encode(got):
            return
        row, sequence_id = whose or (None, None)
        if sequence_id is not None:
            self._different.add(sequence_id)
        if self._first is None:
            self._first = Difference(self._number, row, sequence_id, _text(expected), _text(got))


def _text(value: Any) -> str:
    """Return a readable form of a token id, a token with its log probability, or another value."""
    match value:
        case int(token_id) | (int(token_id), None):
            return f"token {token_id}"
        case (int(token_id), TokenLogprob() as logprob):
            return f"token {token_id}, {logprob}"
        case _:
            return str(value)


def fresh_executor(header: Header, changes: dict[str, str], progress: Progress) -> tuple[LocalExecutor, Machine]:
    """Return an executor like that of *header*, with *changes* to its EngineConfig, and a description of its machine.

    The caller closes the executor. Raises StartupError if it cannot be created, or if the model folder holds other
    weights.
    """
    config: EngineConfig = dataclasses.replace(header.config, **changes)  # type: ignore[arg-type]
    config.check()
    folder = Path(config.model_dir)
    if not folder.is_dir():
        raise StartupError(f"The model folder {folder} of the recording does not exist. Name another with --model.")
    # A replay may change settings that the fingerprint depends on.
    recorded = dataclasses.replace(header.config, model_dir=config.model_dir)
    files = with_overrides(read_model_files(folder), config.hf_overrides, config.override_generation_config)
    if model_fingerprint(recorded, files) != header.machine.weights:
        raise StartupError(f"{folder} holds other weights or files than the model of the recording.")
    with closed_on_failure(Peers(ranks_of(config))) as peers:
        peers.start(config)
        model = load_model(config, progress, peers.ranks)
        execution = prepare(config, model)
        peers.join(model.network.device)
        caches = allocate(config, model, config.num_blocks or 0, peers)
        runner = make_runner(config, model, execution, caches)
        return LocalExecutor(runner, peers), describe_machine(model, execution)


def check_images(recording: Recording) -> None:
    """Read *recording* to its end. Raises StartupError if it is damaged or contains images without pixels."""
    images = [
        f"step {record.step.number}, encoder output {image.output_id}: grid {'x'.join(map(str, image.grid))}, "
        f"{int.from_bytes(image.pixels[:8], 'big')} bytes, blake3 {image.pixels[8:].hex()}"
        for record in recording.records()
        if isinstance(record, StepLaunched)
        for job in record.step.jobs
        for image in job.images
    ]
    if images and not recording.header.config.record_pixels:
        raise StartupError(
            f"{recording.path} was recorded without pixels (--record-pixels), and cannot be replayed without those of "
            f"{len(images)} images:\n" + "\n".join(images)
        )
