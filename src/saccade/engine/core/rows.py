"""Map running sequences to the executors' rows, and track the executors' state of each row."""

import itertools
import time
from dataclasses import dataclass

from saccade.engine.core.sequence import Sequence
from saccade.engine.core.step import RowStart, TableChange


@dataclass(slots=True)
class _RowState:
    """The executors' state of a row: entries of its block table, and whether they sampled its last token."""

    num_blocks: int = 0
    has_drawn: bool = False


class Rows:
    """Rows 0 to max_rows - 1. A sequence takes a row at its first step, and loses it when it ends or is preempted."""

    def __init__(self, max_rows: int) -> None:
        self._free = list(range(max_rows - 1, -1, -1))
        self._states: dict[int, _RowState] = {}
        self._ended_rows: list[int] = []
        self._ids = itertools.count(1)

    def start(self, sequence: Sequence) -> RowStart:
        """Assign a row to *sequence*, which has none, and return the start for executors."""
        sequence.row = self._free.pop()
        self._states[sequence.row] = _RowState()
        if sequence.clock.scheduled is None:
            sequence.clock.scheduled = time.perf_counter()
        return RowStart(sequence.row, next(self._ids), sequence.sampling, sequence.positions.delta)

    def end(self, sequence: Sequence) -> None:
        """Free the row of *sequence*, if it has one."""
        if sequence.row is None:
            return
        del self._states[sequence.row]
        self._ended_rows.append(sequence.row)
        self._free.append(sequence.row)
        sequence.row = None

    def take_ended_rows(self) -> tuple[int, ...]:
        rows, self._ended_rows = tuple(self._ended_rows), []
        return rows

    def table_change(self, sequence: Sequence) -> TableChange | None:
        """Return the change in the block table of a sequence with a row since the last call; None if there is none."""
        state = self._of(sequence)
        start = min([state.num_blocks, *sequence.replaced_blocks])
        if start == len(sequence.block_table):
            return None
        state.num_blocks = len(sequence.block_table)
        sequence.replaced_blocks.clear()
        return TableChange(self.row_of(sequence), start, tuple(sequence.block_table[start:]))

    def has_drawn(self, sequence: Sequence) -> bool:
        """Whether the last token of *sequence* was sampled in its current row."""
        return self._of(sequence).has_drawn

    def note_draw(self, sequence: Sequence) -> None:
        """Record that a token is sampled for *sequence* in its row."""
        self._of(sequence).has_drawn = True

    @staticmethod
    def row_of(sequence: Sequence) -> int:
        """Return the row of *sequence*. Raises ValueError if it has none."""
        if sequence.row is None:
            raise ValueError(f"the sequence of request {sequence.request_id!r} has no row")
        return sequence.row

    def _of(self, sequence: Sequence) -> _RowState:
        return self._states[self.row_of(sequence)]
