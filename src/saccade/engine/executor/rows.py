"""Keep the state of each row between steps: block table, sampling parameters, last token."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from saccade.engine.core.step import RowStart, TableChange
from saccade.protocol.request import SamplingParams

Ints = npt.NDArray[np.int64]


class RowBuffers:
    """Buffers for *max_rows* rows. *tables* int64 [max_rows, entries] grows; *position_deltas* is int64 [max_rows].

    *last_token_ids* int64 [max_rows] is on the device: the last sampled token of each row.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
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
        for change in changes:
            stop = change.start + len(change.blocks)
            if stop > self.tables.shape[1]:
                # Padding with block 0 is only gathered past a row's end, where backends repeat the row's own last slot.
                wider = np.zeros((len(self.tables), max(stop, 2 * self.tables.shape[1])), np.int64)
                wider[:, : self.tables.shape[1]] = self.tables
                self.tables = wider
            self.tables[change.row, change.start : stop] = change.blocks
            self.num_blocks[change.row] = stop

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
