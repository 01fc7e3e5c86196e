"""Keep the tokens of rows with penalties on the device, and change their logits.

A step's tokens are counted on the device, so counting them does not wait for the host. The penalties follow
apply_penalties of vLLM's V1 sampler. The logit of each token in the prompt or answer is divided by the repetition
penalty if it is positive, and multiplied by it otherwise (Keskar et al. 2019, section 4.1). Then the frequency penalty
times the token's count in the answer is subtracted and, if the count is over 0, the presence penalty too. Shapes: R
rows, V vocabulary, P rows with penalties, L tokens of the longest of these rows.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from saccade.engine.core.step import RowCounts
from saccade.nn.transfer import transfer
from saccade.protocol.request import SamplingParams


class Penalised(NamedTuple):
    """The penalised rows of a step: their numbers int64 [P], places in the batch int64 [P], and lengths int64 [P]."""

    rows_P: torch.Tensor
    places_P: torch.Tensor
    lengths_P: torch.Tensor
    numbers: list[int]


class Penalties:
    """Keeps counts of the tokens in answers, int32 [max_rows, V], and a list of each row's tokens.

    The counts are created at first use. The list, int64 [max_rows, entries], grows. It may name a token twice, since
    equal entries write equal logits.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = max_rows, vocab_size
        self._device = device
        self._counts: torch.Tensor | None = None
        self._tokens = torch.zeros((max_rows, 0), dtype=torch.int64, device=device)
        self._lengths = np.zeros(max_rows, np.int64)

    def start_row(self, rows: Iterable[RowCounts]) -> None:
        """Replace the tokens of *rows*."""
        for row, encoded_ids, encoded_counts in ((one.row, one.ids, one.counts) for one in rows):
            ids, counts = transfer(
                [np.frombuffer(encoded_ids, np.int64), np.frombuffer(encoded_counts, np.int64)], self._device
            )
            self._reserve(len(ids) + 1)
            self._tokens[row, : len(ids)] = ids
            self._lengths[row] = len(ids)
            self._all_counts()[row].zero_().index_copy_(0, ids, counts.int())

    def apply(
        self, logits_RV: torch.Tensor, rows: Ordered[int], params: Ordered[SamplingParams], places: Ordered[int]
    ) -> Penalised:
        """Change float32 logits at *places* of the batch, and return what `note` needs.

        Row i of the logits is for rows[i].
        """
        numbers = [rows[place] for place in places]
        lengths = self._lengths[numbers]
        values = [
            (params[place].repetition_penalty, params[place].frequency_penalty, params[place].presence_penalty)
            if length
            else (1.0, 0.0, 0.0)
            for place, length in zip(places, lengths, strict=True)
        ]
        on_device = transfer([np.array([numbers, places, lengths], np.float64), np.array(values).T], logits_RV.device)
        rows_P, places_P, lengths_P = on_device[0].long()
        penalised = Penalised(rows_P, places_P, lengths_P, numbers)
        if width := int(lengths.max()):
            self._change(logits_RV.view(-1), penalised, on_device[1].float(), width)
        return penalised

    def note(self, penalised: Penalised, ids_R: torch.Tensor) -> None:
        """Add the drawn tokens *ids_R* of the batch to their rows."""
        self._reserve(int(self._lengths[penalised.numbers].max()) + 1)
        drawn_P = ids_R.index_select(0, penalised.places_P)
        entries_P = penalised.rows_P * self._tokens.shape[1] + penalised.lengths_P
        self._tokens.view(-1).index_copy_(0, entries_P, drawn_P)
        counts = self._all_counts().view(-1)
        counts.index_add_(0, penalised.rows_P * self._shape[1] + drawn_P, torch.ones_like(drawn_P, dtype=torch.int32))
        self._lengths[penalised.numbers] += 1

    def _change(self, flat: torch.Tensor, penalised: Penalised, penalties_3P: torch.Tensor, width: int) -> None:
        """Change the logits of each row's tokens; *flat* are the logits of all rows."""
        repetition_P1, frequency_P1, presence_P1 = penalties_3P.unsqueeze(-1)
        ids_PL = self._tokens.index_select(0, penalised.rows_P)[:, :width]
        is_token_PL = torch.arange(width, device=flat.device) < penalised.lengths_P.unsqueeze(1)
        ids_PL = torch.where(is_token_PL, ids_PL, ids_PL[:, :1])
        entries_PL = penalised.places_P.unsqueeze(1) * self._shape[1] + ids_PL
        counts_PL = self._all_counts().view(-1)[penalised.rows_P.unsqueeze(1) * self._shape[1] + ids_PL].float()
        value_PL = flat[entries_PL]
        value_PL = torch.where(value_PL > 0, value_PL / repetition_P1, value_PL * repetition_P1)
        flat[entries_PL] = value_PL - frequency_P1 * counts_PL - presence_P1 * (counts_PL > 0)

    def _all_counts(self) -> torch.Tensor:
        if self._counts is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        return self._counts

    def _reserve(self, num_entries: int) -> None:
        """Make room for *num_entries* tokens in each row."""
        width = self._tokens.shape[1]
        if num_entries > width:
            self._tokens = functional.pad(self._tokens, (0, max(num_entries, 2 * width) - width))
