"""Keep each row's state between steps, and convert a step's chunks to tensors: one flat batch, sent in one transfer.

Shapes: N tokens, S chunks, M blocks of the longest table, R rows to sample from, U media tokens, L decodes.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from saccade.engine.core.step import Chunk, MediaSlice, RowStart, TableChange
from saccade.engine.executor.caches import CacheSizes
from saccade.engine.executor.logits_processors import RowChanges
from saccade.nn.context import PagedLayout, Turn
from saccade.nn.transfer import transfer
from saccade.protocol.request import SamplingParams

Ints = npt.NDArray[np.int64]
A = TypeVar("A")


class RowBuffers:
    """Buffers for *max_rows* rows. *tables*, int64 [max_rows, entries], grows; *position_deltas* is int64 [max_rows].

    *last_token_ids*, int64 [max_rows], is on the device and has each row's last sampled token. The device also has a
    copy of *tables* and receives only the changes, since all tables of long contexts would be megabytes per step.
    *window_tables* is for layers with a window; each step sends the part of it that it reads. *changes* holds the
    changes that requests make to their rows' logits.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._device = device
        self._copy = torch.zeros((max_rows, 64), dtype=torch.int64, device=device)
        self.tables: Ints = np.zeros((max_rows, 64), np.int64)
        self.window_tables: Ints = np.zeros((max_rows, 64), np.int64)
        self.num_blocks: Ints = np.zeros(max_rows, np.int64)
        self.position_deltas: Ints = np.zeros(max_rows, np.int64)
        self.last_token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.changes = RowChanges(device)
        self._sampling: list[SamplingParams | None] = [None] * max_rows

    def start_rows(self, rows: Iterable[RowStart]) -> None:
        """Start rows with empty block tables."""
        for start in rows:
            self.num_blocks[start.row] = 0
            self.position_deltas[start.row] = start.position_delta
            self._sampling[start.row] = start.sampling
            self.changes.start_row(start.row, start.sampling)

    def change_tables(self, changes: Iterable[TableChange]) -> None:
        """Replace the ends of block tables."""
        of_others: list[TableChange] = []
        for change in changes:
            if change.in_window:
                self.window_tables = _changed(self.window_tables, change)
                continue
            self.tables = _changed(self.tables, change)
            self.num_blocks[change.row] = change.start + len(change.blocks)
            of_others.append(change)
        if of_others:
            self._change_copy(of_others)

    def _change_copy(self, changes: Ordered[TableChange]) -> None:
        """Make *changes* in the copy on the device."""
        width = self.tables.shape[1]
        if width > self._copy.shape[1]:
            self._copy = functional.pad(self._copy, (0, width - self._copy.shape[1]))
        places = [c.row * width + np.arange(c.start, c.start + len(c.blocks)) for c in changes]
        blocks = [np.array(change.blocks, np.int64) for change in changes]
        places_on_device, blocks_on_device = transfer([np.concatenate(places), np.concatenate(blocks)], self._device)
        self._copy.view(-1).index_copy_(0, places_on_device, blocks_on_device)

    def end_rows(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._sampling[row] = None
            self.changes.end_row(row)

    def sampling(self, row: int) -> SamplingParams:
        """Return the sampling parameters of a row. Raises ValueError if it was not started."""
        params = self._sampling[row]
        if params is None:
            raise ValueError(f"row {row} was not started")
        return params

    def copied_tables(self, rows: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """Return the first *num_blocks* entries of the *rows*' tables, on the device."""
        return self._copy[:, :num_blocks].index_select(0, rows)


def _changed(tables: Ints, change: TableChange) -> Ints:
    """Apply *change* to *tables*, or to a wider copy if they are too narrow. Return the changed tables."""
    stop, width = change.start + len(change.blocks), tables.shape[1]
    if stop > width:
        # Padding with block 0 is gathered only past a row's end; there, backends repeat the row's last slot.
        wider = np.zeros((len(tables), max(stop, 2 * width)), np.int64)
        wider[:, :width] = tables
        tables = wider
    tables[change.row, change.start : stop] = change.blocks
    return tables


@dataclass(frozen=True, slots=True)
class Batch:
    """One step, as tensors."""

    input_ids: torch.Tensor
    """int64 [N]."""
    positions: torch.Tensor
    layout: PagedLayout
    starts: Mapping[int, int]
    """The start of each row's chunk among the N tokens."""
    sample_rows: torch.Tensor
    """int64 [R]: the tokens after which it draws."""
    drawing: tuple[int, ...]
    """The row of each draw."""
    drawing_on_device: torch.Tensor
    has_proposals: bool
    """Whether a row may draw several times."""
    media_rows: torch.Tensor | None
    """int64 [U]: the tokens that *media* replace."""
    media: tuple[MediaSlice, ...]
    windowed: PagedLayout | None = None
    """The layout for layers with a window."""


class _Step(NamedTuple, Generic[A]):
    """The arrays of a step that every layer needs, on the host or on the device; all int64."""

    input_ids: A
    """[N]."""
    positions: A
    """[3, N]."""
    slots: A
    """[N]: the cache slot of each token."""
    contexts: A
    """[S]: the tokens of each sequence, this step's among them."""
    sampled: A
    """[R]: the tokens after which a row draws."""
    media: A
    """[U]: the tokens that media replace."""
    drawing: A
    """[R]: the row of each draw."""
    latest: A
    """[L or fewer]: the tokens that only the device knows yet, those that the step before draws."""
    latest_rows: A
    """The row of each of *latest*."""
    rows: A
    """[S]: the row of each sequence."""
    horizons: A
    """[N], as in PagedLayout; empty if no token sees further than itself."""


class _Seen(NamedTuple, Generic[A]):
    """What sliding-window layers see: each sequence from the first block that a token of the step sees; all int64."""

    slots: A
    """[N]: the cache slot of each token."""
    tables: A
    """[S, M]: the blocks of each sequence."""
    contexts: A
    """[S]: their tokens."""
    horizons: A
    """[N], as in PagedLayout."""


def build_batch(
    chunks: Ordered[Chunk],
    rows: RowBuffers,
    block_size: int,
    device: torch.device,
    *,
    sizes: CacheSizes | None = None,
    looks_ahead: bool = False,
    window: int | None = None,
) -> Batch:
    """Lay out *chunks* flat. Single tokens must come first, and the rows' tables must be up to date for the step.

    If layers have recurrent states, pass the caches' *sizes*, since the step may keep or save some of the states. If
    the model *looks_ahead*, media tokens have the horizon of their run, which no chunk leaves unfinished. Unless
    *window* is None, some layers have a window of that many tokens.
    """
    row_of, firsts, lengths = np.array([(one.row, one.start, one.num_tokens) for one in chunks], np.int64).T
    contexts = firsts + lengths
    num_decodes = next((number for number, length in enumerate(lengths) if length > 1), len(lengths))
    ends = lengths.cumsum()
    starts = ends - lengths
    row_N = np.repeat(row_of, lengths)
    index_N = np.arange(len(row_N)) + np.repeat(firsts - starts, lengths)
    input_ids, positions = _tokens(chunks, starts, index_N + rows.position_deltas[row_N])
    num_draws = np.array([chunk.num_draws for chunk in chunks], np.int64)
    sampled = np.repeat(ends - np.cumsum(num_draws), num_draws) + np.arange(num_draws.sum())
    drawing = np.repeat(row_of, num_draws)
    latest = [index for index, chunk in enumerate(chunks[:num_decodes]) if chunk.token_ids is None]
    media_rows = [np.empty(0, np.int64)]
    for chunk, start in zip(chunks, starts, strict=True):
        media_rows += [start + piece.offset + np.arange(piece.stop - piece.start) for piece in chunk.media]
    horizons = _horizons(chunks, starts) if looks_ahead and len(media_rows) > 1 else np.empty(0, np.int64)
    step = _Step(
        input_ids=input_ids,
        positions=positions,
        slots=_slots(rows.tables, row_N, index_N, block_size),
        contexts=contexts,
        sampled=sampled,
        media=np.concatenate(media_rows),
        drawing=drawing,
        latest=np.array(latest, np.int64),
        latest_rows=row_of[latest],
        rows=row_of,
        horizons=horizons,
    )
    seen = None
    if window is not None:
        slots = _slots(rows.window_tables, row_N, index_N, block_size)
        seen = _seen(chunks, rows.window_tables, slots, window, block_size, horizons)
    transferred = transfer((*step, *(seen or ())), device)
    on_device = _Step(*transferred[: len(step)])
    if latest:
        drawn = rows.last_token_ids.index_select(0, on_device.latest_rows)
        on_device.input_ids.index_copy_(0, on_device.latest, drawn)
    media = tuple(piece for chunk in chunks for piece in chunk.media)
    layout = PagedLayout(
        slot_mapping=on_device.slots,
        block_tables=rows.copied_tables(on_device.rows, int(rows.num_blocks[row_of].max(initial=1))),
        context_lengths=on_device.contexts,
        query_lengths=tuple(lengths.tolist()),
        host_context_lengths=tuple(contexts.tolist()),
        num_decodes=num_decodes,
        block_size=block_size,
        rows=on_device.rows.int(),
        turns=() if sizes is None else tuple(_turns(chunks, starts, sizes, device)),
        horizons=on_device.horizons if len(horizons) else None,
    )
    return Batch(
        input_ids=on_device.input_ids,
        positions=on_device.positions,
        layout=layout,
        starts=dict(zip(row_of.tolist(), starts.tolist(), strict=True)),
        sample_rows=on_device.sampled,
        drawing=tuple(drawing.tolist()),
        drawing_on_device=on_device.drawing,
        has_proposals=len(set(drawing.tolist())) < len(drawing),
        media_rows=on_device.media if media else None,
        media=media,
        windowed=None if seen is None else _windowed(layout, seen, _Seen(*transferred[len(step) :])),
    )


def _windowed(layout: PagedLayout, seen: _Seen[Ints], on_device: _Seen[torch.Tensor]) -> PagedLayout:
    """Return *layout* as layers with a window see it: *seen*, which is also *on_device*."""
    return replace(
        layout,
        slot_mapping=on_device.slots,
        block_tables=on_device.tables,
        context_lengths=on_device.contexts,
        host_context_lengths=tuple(seen.contexts.tolist()),
        horizons=on_device.horizons if len(seen.horizons) else None,
    )


def as_decodes(chunks: Ordered[Chunk]) -> Ordered[Chunk]:
    """Return *chunks*, with those that have proposals split into single tokens, unless another chunk is long.

    Each of these tokens sees those before it, whose keys and values the step writes before it reads any.
    """
    long = [chunk for chunk in chunks if chunk.num_tokens > 1]
    if not all(chunk.num_proposed for chunk in long):
        return chunks
    tokens = ((chunk, place) for chunk in long for place in enumerate(chunk.token_ids or (), chunk.start))
    singles = [Chunk(chunk.row, index, 1, (token_id,), draws=True) for chunk, (index, token_id) in tokens]
    return [*(chunk for chunk in chunks if chunk.num_tokens == 1), *singles]


class _Part(NamedTuple):
    """Tokens [first, stop) of a chunk, which begins at *start* in the step."""

    chunk: Chunk
    start: int
    first: int
    stop: int


def _turns(chunks: Ordered[Chunk], starts: Ints, sizes: CacheSizes, device: torch.device) -> Iterator[Turn]:
    """Yield the turns in which recurrent states are computed; none if one turn computes all chunks.

    The first turn takes chunks up to their first state to save, the next up to the second, and so on. Chunks with the
    same number of proposals share a further turn.
    """
    others = list[tuple[Chunk, int]]()
    proposed = defaultdict[int, list[tuple[Chunk, int]]](list)
    for chunk, start in zip(chunks, starts.tolist(), strict=True):
        (proposed[chunk.num_tokens] if chunk.num_proposed else others).append((chunk, start))
    ends = [_ends(chunk) for chunk, _ in others]
    num_turns = max(map(len, ends), default=0)
    for number in range(num_turns if proposed or num_turns > 1 else 0):
        parts = [
            _Part(chunk, start, stops[number - 1] if number else 0, stops[number])
            for (chunk, start), stops in zip(others, ends, strict=True)
            if number < len(stops)
        ]
        parts.sort(key=lambda part: part.stop - part.first > 1)
        tokens = np.concatenate([np.arange(part.start + part.first, part.start + part.stop) for part in parts])
        rows = np.array([part.chunk.row for part in parts], np.int64)
        saves = [
            (part.chunk.row, save.checkpoint)
            for part in parts
            for save in part.chunk.saves
            if save.num_tokens == part.stop < part.chunk.num_tokens
        ]
        lengths = tuple(part.stop - part.first for part in parts)
        tokens_there, rows_there, saved_rows, checkpoints = transfer((tokens, rows, *_columns(saves)), device)
        yield Turn(tokens_there, rows_there.int(), lengths, saved_rows, checkpoints)
    for length, own in proposed.items():
        rows, firsts = _columns([(chunk.row, start) for chunk, start in own])
        numbers = np.arange(length)
        trail = sizes.trail_rows(rows[:, None], numbers)
        trail[:, -1] = rows
        saves = [
            (trail[index, save.num_tokens - 1], save.checkpoint)
            for index, (chunk, _) in enumerate(own)
            for save in chunk.saves
            if save.num_tokens < length
        ]
        tokens = (firsts[:, None] + numbers).ravel()
        tokens_there, rows_there, saved_rows, checkpoints, trail_there = transfer(
            (tokens, rows, *_columns(saves), trail), device
        )
        yield Turn(tokens_there, rows_there.int(), (length,) * len(own), saved_rows, checkpoints, trail_there)


def _columns(pairs: list[tuple[int, int]]) -> tuple[Ints, Ints]:
    firsts, seconds = np.array(pairs, np.int64).reshape(-1, 2).T
    return firsts, seconds


def _ends(chunk: Chunk) -> Ordered[int]:
    """Return where the parts of *chunk* end, in tokens: at each state to save before its end, and at its end."""
    return [*(save.num_tokens for save in chunk.saves if save.num_tokens < chunk.num_tokens), chunk.num_tokens]


def _horizons(chunks: Ordered[Chunk], starts: Ints) -> Ints:
    """Return for each token the index after the last one that it sees: itself, or the last of its run of media."""
    horizons = np.concatenate([np.arange(chunk.start, chunk.start + chunk.num_tokens) + 1 for chunk in chunks])
    for chunk, start in zip(chunks, starts, strict=True):
        for piece in chunk.media:
            stop = piece.offset + piece.stop - piece.start
            horizons[start + piece.offset : start + stop] = chunk.start + stop
    return horizons


def _seen(
    chunks: Ordered[Chunk], tables: Ints, slots: Ints, window: int, block_size: int, horizons: Ints
) -> _Seen[Ints]:
    """Return what layers with a *window* see. *slots* are the cache slots of the step's tokens, from *tables*."""
    rows, starts, lengths = np.array([(chunk.row, chunk.start, chunk.num_tokens) for chunk in chunks], np.int64).T
    firsts = np.maximum(starts - window + 1, 0) // block_size
    contexts = starts + lengths - firsts * block_size
    places = firsts[:, None] + np.arange(-(-contexts.max() // block_size))
    seen = tables[rows[:, None], places.clip(max=tables.shape[1] - 1)]
    before = np.repeat(firsts * block_size, lengths) if len(horizons) else 0
    return _Seen(slots, seen, contexts, horizons - before)


def _slots(tables: Ints, row_N: Ints, index_N: Ints, block_size: int) -> Ints:
    """Return the cache slot [N] of each token, which is number *index_N* of its sequence; *tables* has the blocks."""
    return tables[row_N, index_N // block_size] * block_size + index_N % block_size


def _tokens(chunks: Ordered[Chunk], starts: Ints, text_positions_N: Ints) -> tuple[Ints, Ints]:
    """Return input_ids [N] and positions [3, N]; tokens that only the device knows have id 0."""
    input_ids, positions = np.zeros(len(text_positions_N), np.int64), np.tile(text_positions_N, (3, 1))
    for chunk, start in zip(chunks, starts, strict=True):
        span = slice(start, start + chunk.num_tokens)
        if chunk.token_ids is not None:
            input_ids[span] = chunk.token_ids
        if chunk.positions:
            positions[:, span] = np.frombuffer(chunk.positions, np.int32).reshape(3, -1)
    return input_ids, positions
