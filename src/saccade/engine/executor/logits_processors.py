"""Change logits before a token is chosen: allowed ids, masks of grammars, biases and a minimum length.

All change the logits in place. Shapes: R rows, V vocabulary, C and D entries of each kind.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Ordered

import numpy as np
import torch

from saccade.engine.core.step import DrawMask, SamplingInput
from saccade.nn.transfer import to_device, transfer
from saccade.protocol.request import SamplingParams


def keep_allowed(logits_RV: torch.Tensor, rows: Ordered[int], allowed_ids: Mapping[int, torch.Tensor]) -> None:
    """Set all logits but those of a row's *allowed_ids* to -inf, if it has any; logits i belong to rows[i]."""
    for index, row in enumerate(rows):
        if row in allowed_ids:
            values = logits_RV[index].index_select(0, allowed_ids[row])
            logits_RV[index].fill_(float("-inf")).index_copy_(0, allowed_ids[row], values)


class GrammarMasks:
    """Applies masks of grammars. One byte of a mask selects a row of eight addends: 0 where a bit is set, else -inf."""

    def __init__(self, device: torch.device) -> None:
        bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        self._addends = to_device(np.where(bits == 1, 0.0, -np.inf).astype(np.float32), device)

    def apply(self, logits_RV: torch.Tensor, masks: Ordered[DrawMask]) -> None:
        """Set the logits outside the masks to -inf; logits i are those of draw i."""
        packed = to_device(np.stack([np.frombuffer(mask.bits, np.uint8) for mask in masks]), logits_RV.device)
        for mask, bytes_B in zip(masks, packed, strict=True):
            addends_V = self._addends.index_select(0, bytes_B.int()).view(-1)[: logits_RV.shape[1]]
            logits_RV[mask.draw].add_(addends_V)


def process(logits_RV: torch.Tensor, params: Ordered[SamplingParams], sampling: SamplingInput) -> None:
    """Add biases, and forbid stop ids of answers below their minimum length, for draws with parameters *params*.

    An entry is an index into the flattened logits, row * V + token id. In float64, which represents such indices
    exactly, all go to the device in one transfer.
    """
    vocab_size = logits_RV.shape[1]
    starts = range(0, logits_RV.numel(), vocab_size)
    biased = [start + token_id for start, param in zip(starts, params, strict=True) for token_id in param.logit_bias]
    biases = [bias for param in params for bias in param.logit_bias.values()]
    # Some configurations have stop ids outside the vocabulary; they are never drawn.
    stops = [
        starts[draw] + token_id
        for draw in sampling.too_short
        for token_id in params[draw].stop_token_ids
        if 0 <= token_id < vocab_size
    ]
    arrays = [np.array(values, dtype=np.float64) for values in (biased, biases, stops)]
    biased_C, biases_C, stops_D = transfer(arrays, logits_RV.device)
    flat = logits_RV.view(-1)
    if biased:
        flat.index_add_(0, biased_C.long(), biases_C.float())
    if stops:
        flat.index_fill_(0, stops_D.long(), float("-inf"))
