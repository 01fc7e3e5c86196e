"""Replay a recording on a new executor, and compare the results."""

import dataclasses
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from saccade.engine.config import EngineConfig
from saccade.engine.core.step import SamplingInput, StepInput, StepOutput
from saccade.engine.executor.fingerprint import model_fingerprint
from saccade.engine.executor.protocol import Executor
from saccade.engine.executor.weight_filler import Progress
from saccade.engine.loop import Engine
from saccade.engine.recording import (
    Header,
    Machine,
    Record,
    Recording,
    StepCollected,
    StepFailed,
    StepLaunched,
)
from saccade.engine.self_description import describe_machine
from saccade.engine.startup import start
from saccade.errors import StartupError
from saccade.models.files import read_model_files, with_overrides


@dataclass(frozen=True)
class Difference:
    """A difference between the *expected* result in the recording and the one that the replay *got*.

    *row* and *sequence_id* are None for a failure.
    """

    number: int
    row: int | None
    sequence_id: int | None
    expected: str
    got: str


@dataclass
class ReplayResult:
    """How many steps and tokens were compared, which sequences, which of them differ, and the *first* difference."""

    num_steps: int = 0
    num_tokens: int = 0
    sequence_ids: set[int] = field(default_factory=set)
    different: set[int] = field(default_factory=set)
    first: Difference | None = None


class Replay:
    """Repeats the recorded calls on *executor*. Compares token ids and, with *is_exact*, log probabilities bit for bit.

    Exceptions of the executor propagate, including the failure at the end of a recording.
    """

    def __init__(self, executor: Executor, *, is_exact: bool) -> None:
        self._executor = executor
        self._is_exact = is_exact
        self._sequence_ids: dict[int, int] = {}
        self._launched: deque[tuple[StepInput, SamplingInput, dict[int, int]]] = deque()
        self._number = 0
        self._result = ReplayResult()

    def run(self, records: Iterable[Record]) -> ReplayResult:
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
                    self._compare(output, self._executor.collect())
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

    def _texts(self, output: StepOutput) -> list[str]:
        """Return the tokens and prompt log probabilities; equal numbers, and only these, have equal texts."""
        logprobs = output.logprobs if self._is_exact else []
        tokens = [
            f"token {one}{f', {logprob}' * (logprob is not None)}"
            for one, logprob in zip_longest(output.token_ids, logprobs)
        ]
        return tokens + [str(scores) for scores in output.prompt_logprobs if self._is_exact]

    def _note(self, whose: tuple[int, int] | None, expected: str | None, got: str | None) -> None:
        """Record a difference if two values of the row and sequence *whose* are not equal."""
        if expected == got:
            return
        row, sequence_id = whose or (None, None)
        if sequence_id is not None:
            self._result.different.add(sequence_id)
        if self._result.first is None:
            self._result.first = Difference(self._number, row, sequence_id, str(expected), str(got))


def fresh_engine(header: Header, changes: dict[str, str], progress: Progress) -> tuple[Engine, Machine]:
    """Return an engine whose executor is like that of *header*, with *changes* to its EngineConfig, and its machine.

    Raises StartupError if it cannot be created, or if the model folder holds other weights.
    """
    recorded = dataclasses.replace(header.config, record_steps=None, record_pixels=False)
    config: EngineConfig = dataclasses.replace(recorded, **changes)  # type: ignore[arg-type]
    folder = Path(config.model_dir)
    if not folder.is_dir():
        raise StartupError(f"The model folder {folder} of the recording does not exist. Name another with --model.")
    # A replay may change settings that the fingerprint depends on.
    recorded = dataclasses.replace(recorded, model_dir=config.model_dir)
    files = with_overrides(read_model_files(folder), config.hf_overrides, config.override_generation_config)
    if model_fingerprint(recorded, files) != header.machine.weights:
        raise StartupError(f"{folder} holds other weights or files than the model of the recording.")
    engine = start(config, progress)
    return engine, describe_machine(engine.description, header.machine.num_threads)


def check_images(recording: Recording) -> None:
    """Read *recording* to its end. Raises StartupError if it is damaged or contains images without pixels."""
    images = [
        f"step {record.step.number}, encoder output {image.output_id}: grid {'x'.join(map(str, image.grid))}, "
        f"{int.from_bytes(image.pixels[:8], 'big')} bytes, blake3 {image.pixels[8:].hex()}"
        for record in recording.records()
        if isinstance(record, StepLaunched)
        for image in record.step.images
    ]
    if images and not recording.header.config.record_pixels:
        raise StartupError(
            f"{recording.path} was recorded without pixels (--record-pixels), and cannot be replayed without those of "
            f"{len(images)} images:\n" + "\n".join(images)
        )
