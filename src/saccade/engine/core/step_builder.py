"""Converts a schedule to the values that executors take: StepInput, and SamplingInput for the draws after it."""

import itertools
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np

from saccade.engine.core.encoder_cache import EncoderCache
from saccade.engine.core.grammar_matcher import add_ids, no_words
from saccade.engine.core.images import EncoderKey
from saccade.engine.core.kv.state_checkpoints import Moves, Saves, StateCheckpoints
from saccade.engine.core.schedule import NO_COPIES, KvCopies, Schedule
from saccade.engine.core.seeds import uniforms
from saccade.engine.core.sequence import WINDOW, Sequence, row_of
from saccade.engine.core.speculation import NO_PROPOSAL
from saccade.engine.core.step import (
    GREEDY_BELOW,
    Chunk,
    DrawMask,
    EncoderInput,
    KvReceive,
    MediaSlice,
    PromptScores,
    RowCounts,
    RowStart,
    SamplingInput,
    StateMove,
    StateSave,
    StepInput,
    TableChange,
)

Prompts = list[tuple[Sequence, PromptScores]]


class Rows:
    """Rows 0 to max_rows - 1. A sequence takes a row at its first step, and loses it when it ends or is preempted."""

    def __init__(self, max_rows: int) -> None:
        self._free = list(range(max_rows - 1, -1, -1))
        self._ended_rows: list[int] = []
        self._ids = itertools.count(1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def start_row(self, sequence: Sequence) -> RowStart:
        """Assign a row to *sequence*, which has none, and return the RowStart for executors."""
        sequence.row = self._free.pop()
        sequence.has_drawn, sequence.kept_state = False, None
        if sequence.clock.scheduled is None:
            sequence.clock.scheduled = time.perf_counter()
        return RowStart(sequence.row, next(self._ids), sequence.sampling, sequence.positions.delta)

    def end_row(self, sequence: Sequence) -> None:
        """Free the row of *sequence*, if it has one."""
        if sequence.row is None:
            return
        self._ended_rows.append(sequence.row)
        self._free.append(sequence.row)
        sequence.row = None

    def take_ended_rows(self) -> tuple[int, ...]:
        rows, self._ended_rows = tuple(self._ended_rows), []
        return rows


@dataclass(frozen=True)
class PlannedStep:
    """A step to execute, and the sequences that its output's tokens and log probabilities belong to, in order.

    *owners* are the chunks' sequences. A sequence is in *drawing* once for each of its draws.
    """

    step: StepInput
    sampling: SamplingInput
    drawing: tuple[Sequence, ...]
    prompts: tuple[Sequence, ...]
    owners: tuple[Sequence, ...] = ()


@dataclass(eq=False)
class StepBuilder:
    """Builds numbered steps, and adds the changes that executors do not have yet."""

    rows: Rows
    encoder_cache: EncoderCache
    checkpoints: StateCheckpoints | None = None
    vocab_size: int = 0
    _num_steps: int = 0

    def build(self, schedule: Schedule, copies: KvCopies = NO_COPIES) -> PlannedStep:
        """Return *schedule* as a step."""
        self._num_steps += 1
        # Single tokens first: backends compute their attention in one call.
        owners = sorted(schedule.chunks, key=lambda sequence: schedule.chunks[sequence] > 1)
        ended_rows = self.rows.take_ended_rows()
        starting = [owner for owner in owners if owner.row is None]
        row_starts = tuple(self.rows.start_row(owner) for owner in starting)
        states = [KvReceive((), owner.received_state, row_of(owner)) for owner in starting if owner.received_state]
        for owner in starting:
            owner.received_state = b""
        tables = tuple(table_changes(owners))
        restore, saves = self._state_moves(starting, schedule)
        chunks = tuple(self._chunk(owner, schedule, saves.get(owner, ())) for owner in owners)
        draws = [(owner, chunk.num_draws) for owner, chunk in zip(owners, chunks, strict=True) if chunk.draws]
        drawing = tuple(owner for owner, num_draws in draws for _ in range(num_draws))
        counts = tuple(row_counts(owner) for owner, _ in draws if owner.penalised and not owner.has_drawn)
        for owner, num_draws in draws:
            # With proposals, any of the tokens that are drawn may be the last.
            owner.has_drawn = num_draws == 1
        step = StepInput(
            number=self._num_steps,
            drop=self.encoder_cache.take_dropped(),
            ended=ended_rows,
            started=row_starts,
            tables=tables,
            restore=restore,
            rewind=() if self.checkpoints is None else _take_rewinds(owners),
            images=tuple(self._image(key, pixels) for key, pixels in schedule.encode.items()),
            slices=tuple(schedule.slices.values()),
            chunks=chunks,
            receive=(*copies.receive, *states),
            send=copies.send,
            drafts=tuple(draw for draw, owner in enumerate(drawing) if owner.takes_drafts),
        )
        prompts = _prompt_scores(zip(owners, chunks, strict=True))
        masks = tuple(self._masks(draws, schedule))
        sampling = sampling_input(self._num_steps, drawing, tuple(scores for _, scores in prompts), masks, counts)
        return PlannedStep(step, sampling, drawing, tuple(owner for owner, _ in prompts), tuple(owners))

    def _state_moves(self, starting: Iterable[Sequence], schedule: Schedule) -> tuple[Moves, Saves]:
        return ((), {}) if self.checkpoints is None else self.checkpoints.moves(starting, schedule.chunks)

    def _masks(self, draws: Iterable[tuple[Sequence, int]], schedule: Schedule) -> Iterator[DrawMask]:
        """Yield the masks for the step's draws; *draws* has each drawing sequence and its number of draws."""
        draw = 0
        for owner, num_draws in draws:
            if owner.has_mask:
                following = schedule.proposals.get(owner, NO_PROPOSAL).masks
                yield from itertools.starmap(DrawMask, enumerate((self._mask(owner), *following), draw))
            draw += num_draws

    def _mask(self, sequence: Sequence) -> bytes:
        budget = sequence.sampling.thinking_budget
        if budget is None or not sequence.must_end_reasoning:
            return sequence.mask
        return add_ids(no_words(self.vocab_size), [budget.end_id], self.vocab_size).tobytes()

    def _image(self, key: EncoderKey, pixels: bytes) -> EncoderInput:
        return EncoderInput(self.encoder_cache.output_id(key), key.modality, key.grid, key.original_size, pixels)

    def _chunk(self, sequence: Sequence, schedule: Schedule, saves: tuple[StateSave, ...]) -> Chunk:
        start, num_tokens = sequence.num_launched_tokens, schedule.chunks[sequence]
        stop = start + num_tokens
        row, draws = row_of(sequence), stop == sequence.num_expected_tokens
        if proposal := schedule.proposals.get(sequence):
            token_ids = (sequence.token_ids[-1], *proposal.token_ids)
            return Chunk(row, start, num_tokens, token_ids, draws=True, num_proposed=num_tokens - 1, saves=saves)
        if num_tokens == 1 and draws and sequence.has_drawn:
            return Chunk(row, start, 1, None, draws=True, saves=saves)
        positions = b""
        media: tuple[MediaSlice, ...] = ()
        if sequence.runs and start < sequence.runs[-1].start + sequence.runs[-1].length:
            positions = sequence.positions.slice(start, stop).astype(np.int32).tobytes()
            media = tuple(self._media(sequence, start, stop))
        token_ids = tuple(sequence.token_ids[start:stop])
        return Chunk(row, start, num_tokens, token_ids, positions, media, draws, saves=saves)

    def _media(self, sequence: Sequence, start: int, stop: int) -> Iterable[MediaSlice]:
        for run, image in sequence.media_between(start, stop):
            begin, end = max(start, run.start), min(stop, run.start + run.length)
            shift = run.offset - run.start
            output_id = self.encoder_cache.output_id(image.key)
            yield MediaSlice(begin - start, output_id, begin + shift, end + shift)


def table_changes(sequences: Iterable[Sequence]) -> Iterator[TableChange]:
    """Yield what has changed since the last call in the block tables of *sequences*, which must have rows."""
    for sequence in sequences:
        for group, table in enumerate(sequence.tables):
            if table.num_sent == len(table.blocks) and not table.replaced:
                continue
            start = max(min([table.num_sent, *table.replaced]), table.num_passed)
            table.num_sent = len(table.blocks)
            table.replaced.clear()
            if start < len(table.blocks):
                yield TableChange(row_of(sequence), start, tuple(table.blocks[start:]), group == WINDOW)


def _take_rewinds(sequences: Iterable[Sequence]) -> Moves:
    """Return the moves that restore the kept states from which *sequences* go on."""
    moves: list[StateMove] = []
    for sequence in sequences:
        if sequence.kept_state is not None:
            moves.append(StateMove(row_of(sequence), sequence.kept_state))
            sequence.kept_state = None
    return tuple(moves)


def sampling_input(
    number: int,
    drawing: Ordered[Sequence],
    prompt_scores: tuple[PromptScores, ...] = (),
    masks: tuple[DrawMask, ...] = (),
    counts: tuple[RowCounts, ...] = (),
) -> SamplingInput:
    """Return the sampling parameters for the next draws of *drawing*.

    A sequence may occur several times in succession.
    """
    params = [sequence.sampling for sequence in drawing]
    indices: list[int] = []
    if any(param.temperature >= GREEDY_BELOW or param.min_tokens for param in params):
        indices = _answer_indices(drawing)
    numbers: tuple[float, ...] = ()
    if any(param.temperature >= GREEDY_BELOW for param in params):
        numbers = tuple(uniforms([sequence.seed for sequence in drawing], indices).tolist())
    num_top: tuple[int | None, ...] = ()
    if any(param.num_logprobs is not None for param in params):
        num_top = tuple(param.num_logprobs for param in params)
    masked = {mask.draw for mask in masks}
    return SamplingInput(
        number=number,
        uniforms=numbers,
        num_top=num_top,
        # A grammar comes before the minimum length: when it is complete, only an end token may follow.
        too_short=tuple(
            draw
            for draw, param in enumerate(params)
            if param.min_tokens and param.min_tokens > indices[draw] and draw not in masked
        ),
        counts=counts,
        prompt_scores=prompt_scores,
        masks=masks,
    )


def _answer_indices(drawing: Ordered[Sequence]) -> list[int]:
    """Return each draw's position in its answer."""
    indices = [sequence.num_expected_answer_tokens for sequence in drawing]
    for draw in range(1, len(drawing)):
        if drawing[draw] is drawing[draw - 1]:
            indices[draw] = indices[draw - 1] + 1
    return indices


def row_counts(sequence: Sequence) -> RowCounts:
    """Return how often each id occurs in the answer.

    With a repetition penalty, the prompt's other ids are included with a count of 0.
    """
    prompt, answer = sequence.token_ids[: sequence.num_prompt_tokens], sequence.token_ids[sequence.num_prompt_tokens :]
    counts = Counter(dict.fromkeys(prompt if sequence.sampling.repetition_penalty != 1 else (), 0))
    counts.update(answer)
    return RowCounts(row_of(sequence), array("q", counts).tobytes(), array("q", counts.values()).tobytes())


def _prompt_scores(chunks: Iterable[tuple[Sequence, Chunk]]) -> Prompts:
    """Return the prompt scores that this step is the first to compute.

    A preempted sequence computes its prompt again, but keeps the log probabilities that it has.
    """
    prompts: Prompts = []
    for sequence, chunk in chunks:
        if sequence.prompt_logprobs is None:
            continue
        # The hidden state of token p predicts token p + 1.
        first = len(sequence.prompt_logprobs)
        last = min(chunk.start + chunk.num_tokens, sequence.num_prompt_tokens - 1)
        if first < last:
            targets = tuple(sequence.token_ids[first + 1 : last + 1])
            num_top = sequence.sampling.num_prompt_logprobs or 0
            prompts.append((sequence, PromptScores(chunk.row, first - chunk.start, targets, num_top)))
    return prompts
