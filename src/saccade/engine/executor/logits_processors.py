"""Change logits before a token is chosen: allowed ids, masks of grammars, biases and a minimum length.

All change the logits in place. A request's values are converted once, when its row starts. Otherwise a step of 256 rows
with a thousand biases each would read a quarter of a million dict entries. Shapes: R rows, V vocabulary, P rows with
biases, C biases.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from saccade.engine.core.step import DrawMask
from saccade.nn.transfer import to_device
from saccade.protocol.request import SamplingParams

Ints = npt.NDArray[np.int64]


class Bias(NamedTuple):
    """A row's addends, float32 [C], and the ids of the logits that they change, int64 [C], on the device."""

    ids_C: torch.Tensor
    values_C: torch.Tensor


class RowChanges:
    """The changes that requests make to their rows' logits; rows without a change have no entry.

    *allowed_ids*, int64 [C] on the device, are the only ids that a row may draw. *stop_ids*, [C] on the host, are for
    answers that have a minimum length.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.allowed_ids: dict[int, torch.Tensor] = {}
        self.biases: dict[int, Bias] = {}
        self.stop_ids: dict[int, Ints] = {}

    def start_row(self, row: int, params: SamplingParams) -> None:
        """Prepare what a row with *params* needs in each step."""
        if params.allowed_token_ids:
            self.allowed_ids[row] = to_device(np.array(params.allowed_token_ids, np.int64), self._device)
        if params.logit_bias:
            ids, values = np.array(list(params.logit_bias.items()), np.float64).T
            self.biases[row] = Bias(
                to_device(ids.astype(np.int64), self._device), to_device(values.astype(np.float32), self._device)
            )
        if params.min_tokens:
            self.stop_ids[row] = np.array(params.stop_token_ids, np.int64)

    def end_row(self, row: int) -> None:
        """Forget a row."""
        for changes in (self.allowed_ids, self.biases, self.stop_ids):
            changes.pop(row, None)


def keep_allowed(logits_RV: torch.Tensor, rows: Ordered[int], allowed_ids: Mapping[int, torch.Tensor]) -> None:
    """Set all logits but those of a row's *allowed_ids*, if it has any, to -inf. Row i of the logits is for rows[i]."""
    for index, row in enumerate(rows):
        if row in allowed_ids:
            values = logits_RV[index].index_select(0, allowed_ids[row])
            logits_RV[index].fill_(float("-inf")).index_copy_(0, allowed_ids[row], values)


class GrammarMasks:
    """Applies grammar masks. One byte of a mask selects a row of eight addends: 0 where a bit is set, else -inf."""

    def __init__(self, device: torch.device) -> None:
        bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        self._addends = to_device(np.where(bits == 1, 0.0, -np.inf).astype(np.float32), device)

    def apply(self, logits_RV: torch.Tensor, masks: Ordered[DrawMask]) -> None:
        """Set the logits outside the masks to -inf. Row i of the logits is for draw i."""
        packed = to_device(np.stack([np.frombuffer(mask.bits, np.uint8) for mask in masks]), logits_RV.device)
        for mask, bytes_B in zip(masks, packed, strict=True):
            addends_V = self._addends.index_select(0, bytes_B.int()).view(-1)[: logits_RV.shape[1]]
            logits_RV[mask.draw].add_(addends_V)


def add_biases(logits_RV: torch.Tensor, rows: Ordered[int], biases: Mapping[int, Bias]) -> None:
    """Add the *biases* of rows that have any. Row i of the logits is for rows[i]."""
    starts, vocab_size = range(0, logits_RV.numel(), logits_RV.shape[1]), logits_RV.shape[1]
    biased = [(start, biases[row]) for start, row in zip(starts, rows, strict=True) if row in biases]
    if not biased or not vocab_size:
        return
    lengths = [len(bias.ids_C) for _, bias in biased]
    starts_P, lengths_P = to_device(np.array([[start for start, _ in biased], lengths], np.int64), logits_RV.device)
    entries_C = starts_P.repeat_interleave(lengths_P, output_size=sum(lengths))
    entries_C += torch.cat([bias.ids_C for _, bias in biased])
    logits_RV.view(-1).index_add_(0, entries_C, torch.cat([bias.values_C for _, bias in biased]))


def forbid_stops(
    logits_RV: torch.Tensor, rows: Ordered[int], too_short: Ordered[int], stop_ids: Mapping[int, Ints]
) -> None:
    """Set the logits of the rows' *stop_ids* to -inf for the draws *too_short*. Row i of the logits is for rows[i]."""
    vocab_size = logits_RV.shape[1]
    entries = [np.empty(0, np.int64)]
    for draw in too_short:
        ids = stop_ids.get(rows[draw], entries[0])
        # Some configurations have stop ids outside the vocabulary; they are never drawn.
        entries.append(draw * vocab_size + ids[(ids >= 0) & (ids < vocab_size)])
    logits_RV.view(-1).index_fill_(0, to_device(np.concatenate(entries), logits_RV.device), float("-inf"))
