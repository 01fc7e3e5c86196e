"""Convert a step's chunks to tensors: one flat batch, copied to the device in one transfer.

Shapes: N tokens, S chunks, M blocks of the longest table, R rows to sample from, U tokens of media, L decodes.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np
import torch

from saccade.engine.core.step import Chunk, MediaSlice
from saccade.engine.executor.rows import Ints, RowBuffers
from saccade.nn.context import PagedLayout
from saccade.nn.transfer import transfer


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. *sample_rows* int64 [R] are the last tokens of the chunks that draw, *drawing* their rows.

    *media_rows* int64 [U] are the tokens that *media* replace. *starts* [S] is the start of each chunk.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    layout: PagedLayout
    starts: Ints
    sample_rows: torch.Tensor
    drawing: tuple[int, ...]
    drawing_on_device: torch.Tensor
    media_rows: torch.Tensor | None
    media: tuple[MediaSlice, ...]


def build_batch(chunks: Ordered[Chunk], rows: RowBuffers, block_size: int, device: torch.device) -> Batch:
    """Lay out *chunks* flat, single tokens first. The rows' tables must be up to date for the step."""
    row_of = np.array([chunk.row for chunk in chunks], np.int64)
    lengths = tuple(chunk.num_tokens for chunk in chunks)
    contexts = tuple(chunk.start + chunk.num_tokens for chunk in chunks)
    num_decodes = next((index for index, length in enumerate(lengths) if length > 1), len(lengths))
    tables = rows.block_tables(row_of)
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths
    input_ids, positions, slots = _tokens(chunks, rows, num_decodes, tables, block_size)
    sampled = [index for index, chunk in enumerate(chunks) if chunk.draws]
    latest = [index for index, chunk in enumerate(chunks[:num_decodes]) if chunk.token_ids is None]
    media_rows = [np.empty(0, np.int64)]
    for chunk, start in zip(chunks, starts, strict=True):
        media_rows += [start + piece.offset + np.arange(piece.stop - piece.start) for piece in chunk.media]
    host: tuple[Ints, ...] = (
        input_ids, positions, slots, np.array(contexts, np.int64), ends[sampled] - 1, np.concatenate(media_rows),
        row_of[sampled], np.array(latest, np.int64), row_of[latest], row_of,
    )  # fmt: skip
    on_device = transfer(host if rows.copies_tables else (*host, tables), device)
    if latest:
        on_device[0].index_copy_(0, on_device[7], rows.last_token_ids.index_select(0, on_device[8]))
    has_tables = len(on_device) > len(host)
    tables_on_device = on_device[-1] if has_tables else rows.copied_tables(on_device[9], tables.shape[1])
    media = tuple(piece for chunk in chunks for piece in chunk.media)
    return Batch(
        input_ids=on_device[0],
        positions=on_device[1],
        layout=PagedLayout(
            slot_mapping=on_device[2],
            block_tables=tables_on_device,
            context_lengths=on_device[3],
            query_lengths=lengths,
            host_context_lengths=contexts,
            num_decodes=num_decodes,
            block_size=block_size,
            rows=on_device[9],
        ),
        starts=starts,
        sample_rows=on_device[4],
        drawing=tuple(chunks[index].row for index in sampled),
        drawing_on_device=on_device[6],
        media_rows=on_device[5] if media else None,
        media=media,
    )


def _tokens(
    chunks: Ordered[Chunk], rows: RowBuffers, num_decodes: int, tables: Ints, block_size: int
) -> tuple[Ints, Ints, Ints]:
    """Return input_ids [N], positions [3, N] and slots [N]; tokens that were sampled last have id 0."""
    total = sum(chunk.num_tokens for chunk in chunks)
    input_ids, positions, slots = np.zeros(total, np.int64), np.empty((3, total), np.int64), np.empty(total, np.int64)
    index_L = np.array([chunk.start for chunk in chunks[:num_decodes]], np.int64)
    slots[:num_decodes] = tables[np.arange(num_decodes), index_L // block_size] * block_size + index_L % block_size
    positions[:, :num_decodes] = index_L + rows.position_deltas[[chunk.row for chunk in chunks[:num_decodes]]]
    cursor = 0
    for number, chunk in enumerate(chunks):
        span = slice(cursor, cursor + chunk.num_tokens)
        if chunk.token_ids is not None:
            input_ids[span] = chunk.token_ids
        if number >= num_decodes:
            index = np.arange(chunk.start, chunk.start + chunk.num_tokens)
            slots[span] = tables[number, index // block_size] * block_size + index % block_size
            if not chunk.positions:
                positions[:, span] = index + rows.position_deltas[chunk.row]
        if chunk.positions:
            positions[:, span] = np.frombuffer(chunk.positions, np.int32).reshape(3, -1)
        cursor = span.stop
    return input_ids, positions, slots
