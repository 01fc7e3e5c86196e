"""Log probabilities of tokens and of the likeliest ones beside them, computed on the device.

They are those of the model itself: of its logits before any sampling parameter, media placeholders included.
Shapes: R rows, V vocabulary, K likeliest tokens.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from saccade.engine.sequence import Sequence
from saccade.protocol.output import TokenLogprob

PIECE_LOGITS = 1 << 24
"""Logits of prompt tokens that are computed at a time: 64 MiB."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows [start, stop) of a step's hidden states, before tokens whose log probabilities are wanted: *target_ids*."""

    sequence: Sequence
    start: int
    stop: int
    target_ids: list[int]

    @property
    def num_top(self) -> int:
        """How many of the likeliest tokens are wanted beside each."""
        return self.sequence.sampling.num_prompt_logprobs or 0

    def pieces(self, vocab_size: int) -> list[slice]:
        """Return slices of these rows that are small enough to compute logits for."""
        size = max(1, PIECE_LOGITS // vocab_size)
        return [slice(start, start + size) for start in range(0, self.stop - self.start, size)]


def prompt_rows(sequences: Ordered[Sequence], lengths: Ordered[int]) -> list[PromptRows]:
    """Return the rows of a step that prompt log probabilities need and no step before has given.

    sequences[i] has lengths[i] rows, one behind the other. A retracted sequence computes its prompt again, but what was
    known before stays.
    """
    found, row = [], 0
    for sequence, length in zip(sequences, lengths, strict=True):
        if sequence.prompt_logprobs is not None:
            computed = sequence.num_computed_tokens
            # The hidden state of token p tells of token p + 1.
            first, last = len(sequence.prompt_logprobs), min(computed + length, sequence.num_prompt_tokens - 1)
            if first < last:
                shift = row - computed
                found.append(
                    PromptRows(sequence, first + shift, last + shift, sequence.token_ids[first + 1 : last + 1])
                )
        row += length
    return found


def score(logits_RV: torch.Tensor, ids_R: torch.Tensor, num_top: int) -> torch.Tensor:
    """Return float64 [R, 2 + 2K]: of ids_R the log probability and the rank; the K likeliest ids; theirs."""
    total_R1 = logits_RV.logsumexp(dim=-1, keepdim=True)
    chosen_R1 = logits_RV.gather(1, ids_R.unsqueeze(1))
    rank_R1 = (logits_RV > chosen_R1).sum(dim=-1, keepdim=True) + 1
    top_RK, top_ids_RK = logits_RV.topk(min(num_top, logits_RV.shape[1]), dim=-1)
    parts = (chosen_R1 - total_R1, rank_R1, top_ids_RK, top_RK - total_R1)
    return torch.cat([part.double() for part in parts], dim=1)


def fetch(tensors: Ordered[torch.Tensor]) -> list[npt.NDArray[np.float64]]:
    """Return float64 *tensors* on the host, in one transfer."""
    host = torch.cat([tensor.flatten() for tensor in tensors]).cpu().numpy()
    ends = np.cumsum([tensor.numel() for tensor in tensors])
    parts = np.split(host, ends[:-1])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def unpack(scores: npt.NDArray[np.float64], num_tops: Ordered[int]) -> list[TokenLogprob]:
    """Return the rows of what `score` gave, row i with its num_tops[i] likeliest tokens."""
    width = (scores.shape[1] - 2) // 2
    ranks, top_ids = scores[:, 1].astype(np.int64).tolist(), scores[:, 2 : 2 + width].astype(np.int64).tolist()
    logprobs, tops = scores[:, 0].tolist(), scores[:, 2 + width :].tolist()
    return [
        TokenLogprob(logprob, rank, ids[:num_top], values[:num_top])
        for logprob, rank, ids, values, num_top in zip(logprobs, ranks, top_ids, tops, num_tops, strict=True)
    ]
