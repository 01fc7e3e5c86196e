"""Keep the state of each row between steps: block table, sampling parameters, last token."""

from collections.abc import Iterable
from collections.abc import Sequence as Ordered

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from saccade.engine.core.step import RowStart, TableChange
from saccade.nn.transfer import transfer
from saccade.protocol.request import SamplingParams

Ints = npt.NDArray[np.int64]


class RowBuffers:
    """Buffers for *max_rows* rows. *tables* int64 [max_rows, entries] grows; *position_deltas* is int64 [max_rows].

    *last_token_ids* int64 [max_rows] is on the device: the last sampled token of each row. On a GPU, *copies_tables*,
    the device has a copy of *tables* that gets only the changes: all tables of long contexts are megabytes a step.
    """

    def __init__(self, max_rows: int, device: torch.device, copies_tables: bool | None = None) -> None:
        self.copies_tables = device.type != "cpu" if copies_tables is None else copies_tables
        self._device = device
        self._copy = torch.zeros((max_rows, 64 if self.copies_tables else 0), dtype=torch.int64, device=device)
        self.tables: Ints = np.zeros((max_rows, 64), np.int64)
        self.num_blocks: Ints = np.zeros(max_rows, np.int64)
        self.position_deltas: Ints = np.zeros(max_rows, np.int64)
        self.last_token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._sampling: list[SamplingParams | None] = [None] * max_rows

    def start(self, rows: Iterable[RowStart]) -> None:
        """Start rows with empty block tables."""
        for start in rows:
            self.num_blocks[start.row] = 0
            self.position_deltas[start.row] = start.position_delta
            self._sampling[start.row] = start.sampling

    def change_tables(self, changes: Iterable[TableChange]) -> None:
        """Replace the ends of block tables."""
        changes = tuple(changes)
        for change in changes:
            stop = change.start + len(change.blocks)
            if stop > self.tables.shape[1]:
                # Padding with block 0 is gathered only past a row's end; there, backends repeat the row's last slot.
                wider = np.zeros((len(self.tables), max(stop, 2 * self.tables.shape[1])), np.int64)
                wider[:, : self.tables.shape[1]] = self.tables
                self.tables = wider
            self.tables[change.row, change.start : stop] = change.blocks
            self.num_blocks[change.row] = stop
        if self.copies_tables and changes:
            self._change_copy(changes)

    def _change_copy(self, changes: Ordered[TableChange]) -> None:
        """Make the same changes on the device."""
        width = self.tables.shape[1]
        if width > self._copy.shape[1]:
            self._copy = functional.pad(self._copy, (0, width - self._copy.shape[1]))
        places = [c.row * width + np.arange(c.start, c.start + len(c.blocks)) for c in changes]
        blocks = [np.array(change.blocks, np.int64) for change in changes]
        places_on_device, blocks_on_device = transfer([np.concatenate(places), np.concatenate(blocks)], self._device)
        self._copy.view(-1).index_copy_(0, places_on_device, blocks_on_device)

    def end(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._sampling[row] = None

    def sampling(self, row: int) -> SamplingParams:
        """Return the sampling parameters of a started row. Raises ValueError."""
        params = self._sampling[row]
        if params is None:
            raise ValueError(f"row {row} was not started")
        return params

    def block_tables(self, rows: Ints) -> Ints:
        """Return the tables of *rows*, int64 [rows, longest table]."""
        return self.tables[rows, : int(self.num_blocks[rows].max(initial=1))]

    def copied_tables(self, rows: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """Return the first *num_blocks* entries of the tables of *rows* on the device. Needs *copies_tables*."""
        return self._copy.index_select(0, rows)[:, :num_blocks]
