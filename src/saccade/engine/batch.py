"""Sequences to tensors: one step's flat batch, copied to the device in one transfer.

Shapes: N tokens, S sequences, M blocks of the longest table, R rows to sample from, U tokens of pictures.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from saccade.engine.encoder_cache import EncoderKey
from saccade.engine.sequence import Sequence
from saccade.nn.context import PagedLayout

Ints = npt.NDArray[np.int64]


class MediaSlice(NamedTuple):
    """Item tokens [start, stop) of an encoding; they stand in for consecutive placeholder rows of the batch."""

    key: EncoderKey
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. *sample_rows* int64 [R] are the last tokens of *sampled*; *media_rows* int64 [U] those of *media*.

    *sequences* stand one behind the other, layout.query_lengths[i] rows each.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    layout: PagedLayout
    sequences: list[Sequence]
    sample_rows: torch.Tensor
    sampled: list[Sequence]
    media_rows: torch.Tensor | None
    media: list[MediaSlice]


def build_batch(chunks: Mapping[Sequence, int], block_size: int, device: torch.device) -> Batch:
    """Lay out *chunks* (tokens to compute of each sequence) flat, single tokens first."""
    decodes = [sequence for sequence, num_tokens in chunks.items() if num_tokens == 1]
    prefills = [sequence for sequence, num_tokens in chunks.items() if num_tokens > 1]
    ordered = decodes + prefills
    lengths = tuple(chunks[sequence] for sequence in ordered)
    contexts = tuple(sequence.num_computed_tokens + chunks[sequence] for sequence in ordered)
    tables = _block_tables(ordered)
    input_ids, positions, slots = _tokens(ordered, len(decodes), contexts, sum(lengths), tables, block_size)
    ends = np.cumsum(lengths, dtype=np.int64)
    sampling = [row for row, (s, context) in enumerate(zip(ordered, contexts, strict=True)) if context == s.num_tokens]
    media_rows, media = _media(ordered, ends - lengths, contexts)
    host: tuple[Ints, ...] = (
        input_ids, positions, slots, tables, np.array(contexts), ends[sampling] - 1, media_rows,
    )  # fmt: skip
    on_device = transfer(host, device)
    layout = PagedLayout(
        slot_mapping=on_device[2],
        block_tables=on_device[3],
        context_lengths=on_device[4],
        query_lengths=lengths,
        host_context_lengths=contexts,
        num_decodes=len(decodes),
        block_size=block_size,
    )
    return Batch(
        input_ids=on_device[0],
        positions=on_device[1],
        layout=layout,
        sequences=ordered,
        sample_rows=on_device[5],
        sampled=[ordered[row] for row in sampling],
        media_rows=on_device[6] if media else None,
        media=media,
    )


def transfer(arrays: Ordered[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Return *arrays*, all of one dtype, as views of one tensor on *device*."""
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    if device.type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    parts = flat.split_with_sizes([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _block_tables(ordered: list[Sequence]) -> Ints:
    # Padding with block 0 is only ever gathered behind a row's end, where backends repeat the row's own last slot.
    tables = np.zeros((len(ordered), max(len(sequence.block_table) for sequence in ordered)), dtype=np.int64)
    for row, sequence in enumerate(ordered):
        tables[row, : len(sequence.block_table)] = np.frombuffer(sequence.block_table, dtype=np.int64)
    return tables


def _tokens(
    ordered: list[Sequence], num_decodes: int, contexts: tuple[int, ...], total: int, tables: Ints, block_size: int
) -> tuple[Ints, Ints, Ints]:
    """Return input_ids [N], positions [3, N] and slots [N]."""
    input_ids, positions, slots = np.empty(total, np.int64), np.empty((3, total), np.int64), np.empty(total, np.int64)
    place = np.array(contexts[:num_decodes], dtype=np.int64) - 1
    decodes = ordered[:num_decodes]
    input_ids[:num_decodes] = [s.token_ids[s.num_computed_tokens] for s in decodes]
    slots[:num_decodes] = tables[np.arange(num_decodes), place // block_size] * block_size + place % block_size
    positions[:, :num_decodes] = place + np.array([s.positions.delta for s in decodes], dtype=np.int64)
    for row, sequence in enumerate(decodes):
        # A single token may also be the end of a prefill, inside a picture or before one.
        if sequence.runs and contexts[row] <= sequence.num_prompt_tokens:
            positions[:, row : row + 1] = sequence.positions.slice(contexts[row] - 1, contexts[row])
    cursor = num_decodes
    for row in range(num_decodes, len(ordered)):
        sequence, stop = ordered[row], contexts[row]
        start = sequence.num_computed_tokens
        span = slice(cursor, cursor + stop - start)
        index = np.arange(start, stop)
        input_ids[span] = sequence.token_ids[start:stop]
        positions[:, span] = sequence.positions.slice(start, stop)
        slots[span] = tables[row, index // block_size] * block_size + index % block_size
        cursor = span.stop
    return input_ids, positions, slots


def _media(ordered: list[Sequence], starts: Ints, contexts: tuple[int, ...]) -> tuple[Ints, list[MediaSlice]]:
    """Return the rows that pictures fill, and with what."""
    rows: list[Ints] = [np.empty(0, np.int64)]
    media: list[MediaSlice] = []
    for sequence, row, stop in zip(ordered, starts, contexts, strict=True):
        first = sequence.num_computed_tokens
        if not sequence.runs or first >= sequence.num_prompt_tokens:
            continue
        for run, source in sequence.media_between(first, stop):
            begin, end = max(first, run.start), min(stop, run.start + run.length)
            shift = run.offset - run.start
            media.append(MediaSlice(source.key, begin + shift, end + shift))
            rows.append(np.arange(begin, end) + (row - first))
    return np.concatenate(rows), media
