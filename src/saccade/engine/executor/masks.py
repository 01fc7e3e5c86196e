"""Restrict the tokens that each row may draw.

`allowed_token_ids` are device masks, built when a row starts; masks of grammars come packed with every step.
"""

from collections.abc import Sequence as Ordered

import numpy as np
import torch

from saccade.engine.core.step import DrawMask
from saccade.nn.transfer import transfer


class AllowedTokens:
    """The masks of rows that may draw some ids only. A mask has one byte for each vocabulary entry."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._forbidden_V: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._forbidden_V)

    def start(self, row: int, allowed: Ordered[int]) -> None:
        """Let *row* draw *allowed* ids only."""
        (ids,) = transfer([np.array(allowed, np.int64)], self._device)
        mask_V = torch.ones(self._vocab_size, dtype=torch.bool, device=self._device)
        self._forbidden_V[row] = mask_V.index_fill_(0, ids, False)

    def end(self, row: int) -> None:
        """Remove the mask of a row, if it has one."""
        self._forbidden_V.pop(row, None)

    def apply(self, logits_RV: torch.Tensor, rows: Ordered[int]) -> None:
        """Set the logits of all ids but the allowed ones to -inf, in place; logits i belong to rows[i]."""
        for index, row in enumerate(rows):
            if row in self._forbidden_V:
                logits_RV[index].masked_fill_(self._forbidden_V[row], float("-inf"))


class GrammarMasks:
    """Applies masks of grammars. One byte of a mask selects a row of eight addends: 0 where a bit is set, else -inf."""

    def __init__(self, device: torch.device) -> None:
        bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        (self._addends,) = transfer([np.where(bits == 1, 0.0, -np.inf).astype(np.float32)], device)

    def apply(self, logits_RV: torch.Tensor, masks: Ordered[DrawMask]) -> None:
        """Set the logits outside the masks to -inf, in place; logits i are those of draw i."""
        (packed,) = transfer([np.stack([np.frombuffer(mask.bits, np.uint8) for mask in masks])], logits_RV.device)
        for mask, bytes_B in zip(masks, packed, strict=True):
            addends_V = self._addends.index_select(0, bytes_B.int()).view(-1)[: logits_RV.shape[1]]
            logits_RV[mask.draw].add_(addends_V)
