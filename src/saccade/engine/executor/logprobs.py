"""Compute log probabilities of tokens, and of the most likely tokens, on the device.

They are the model's own, from its logits before any sampling parameter is applied, and include media placeholders.
Shapes: R rows, V vocabulary, K most likely tokens.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from saccade.protocol.output import TokenLogprob

PIECE_LOGITS = 1 << 24
"""The largest number of logits of prompt tokens to compute at once: 64 MiB."""


def pieces(num_rows: int, vocab_size: int) -> list[slice]:
    """Return slices of *num_rows* rows, each of one row or of at most PIECE_LOGITS logits."""
    size = max(1, PIECE_LOGITS // vocab_size)
    return [slice(start, start + size) for start in range(0, num_rows, size)]


def score(logits_RV: torch.Tensor, ids_R: torch.Tensor, num_top: int) -> torch.Tensor:
    """Return float64 [R, 2 + 2K]: log probability and rank of ids_R; the K most likely ids; their log probabilities."""
    total_R1 = logits_RV.logsumexp(dim=-1, keepdim=True)
    chosen_R1 = logits_RV.gather(1, ids_R.unsqueeze(1))
    rank_R1 = (logits_RV > chosen_R1).sum(dim=-1, keepdim=True) + 1
    top_RK, top_ids_RK = logits_RV.topk(min(num_top, logits_RV.shape[1]), dim=-1)
    parts = (chosen_R1 - total_R1, rank_R1, top_ids_RK, top_RK - total_R1)
    return torch.cat([part.double() for part in parts], dim=1)


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Tensors of *shapes*, *joined* in one, that are copied to the host; *event* is None for tensors on a CPU."""

    joined: torch.Tensor
    shapes: tuple[torch.Size, ...]
    event: torch.cuda.Event | None

    def wait(self) -> list[npt.NDArray[np.float64]]:
        """Wait for the copy, and return the tensors."""
        if self.event is not None:
            self.event.synchronize()
        ends = np.cumsum([shape.numel() for shape in self.shapes])
        parts = np.split(self.joined.numpy(), ends[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]


def begin_copy(tensors: Ordered[torch.Tensor]) -> HostCopy:
    """Start copying float64 *tensors* to the host, in one transfer."""
    joined = torch.cat([tensor.flatten() for tensor in tensors])
    shapes = tuple(tensor.shape for tensor in tensors)
    if joined.device.type != "cuda":
        return HostCopy(joined, shapes, None)
    host = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True).copy_(joined, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return HostCopy(host, shapes, event)


def unpack(scores: npt.NDArray[np.float64], num_tops: Ordered[int | None]) -> list[TokenLogprob]:
    """Convert the output of `score`; row i keeps its num_tops[i] most likely tokens."""
    width = (scores.shape[1] - 2) // 2
    ranks, top_ids = scores[:, 1].astype(np.int64).tolist(), scores[:, 2 : 2 + width].astype(np.int64).tolist()
    logprobs, tops = scores[:, 0].tolist(), scores[:, 2 + width :].tolist()
    return [
        TokenLogprob(logprob, rank, ids[: num_top or 0], values[: num_top or 0])
        for logprob, rank, ids, values, num_top in zip(logprobs, ranks, top_ids, tops, num_tops, strict=True)
    ]
