"""Logits to ids, for the whole batch at once.

A draw depends on the request's seed, the index of the answer's token and that token's logits, on nothing else: the
uniform number is a hash of (seed, index), made on the host, and it is turned into a token through the cumulative
distribution in vocabulary order. How requests are batched therefore changes no draw (beyond the last bits of logits).
Shapes: R rows, V vocabulary, K the largest top_k of the batch.
"""

from collections.abc import Sequence as Ordered

import numpy as np
import numpy.typing as npt
import torch

from saccade.engine.sequence import Sequence

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would overflow."""


def uniforms(seeds: Ordered[int], indices: Ordered[int]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, index): splitmix64 (Steele, Lea & Flood 2014) of their mix."""
    # Two rounds, so that neighbouring seeds and neighbouring indices do not meet in the same state.
    mixed = _splitmix64(_splitmix64(np.array(seeds, dtype=np.uint64)) ^ np.array(indices, dtype=np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


class Sampler:
    """Greedy and random sampling. *forbidden* ids, the media placeholders, are never sampled."""

    def __init__(self, forbidden: Ordered[int], device: torch.device) -> None:
        self._forbidden = torch.tensor(forbidden, dtype=torch.int64, device=device)

    def __call__(self, logits_RV: torch.Tensor, sequences: Ordered[Sequence]) -> list[int]:
        """Return one token id per row; row i belongs to sequences[i]. Changes the logits in place."""
        logits_RV.index_fill_(1, self._forbidden, float("-inf"))
        greedy_R = logits_RV.argmax(dim=-1)
        if all(sequence.sampling.temperature < GREEDY_BELOW for sequence in sequences):
            return greedy_R.tolist()
        return self._draw(logits_RV, greedy_R, sequences).tolist()

    def _draw(self, logits_RV: torch.Tensor, greedy_R: torch.Tensor, sequences: Ordered[Sequence]) -> torch.Tensor:
        device, params = logits_RV.device, [sequence.sampling for sequence in sequences]
        host = np.empty((3, len(sequences)))
        host[0] = [param.temperature for param in params]
        host[1] = [param.top_p for param in params]
        host[2] = uniforms([s.seed for s in sequences], [s.num_generated_tokens for s in sequences])
        temperature_R, top_p_R, uniform_R = torch.from_numpy(host).to(device)
        random_R = temperature_R >= GREEDY_BELOW
        vocab_size = logits_RV.shape[1]
        limits = [min(param.top_k, vocab_size) or vocab_size for param in params]
        # Greedy rows are computed along with the others and replaced at the end.
        scaled_RV = logits_RV / torch.where(random_R, temperature_R, 1.0).float().unsqueeze(1)
        restricted = [limit for limit, p in zip(limits, params, strict=True) if limit < vocab_size or p.top_p < 1]
        if restricted:
            scaled_RV = _cut(scaled_RV, torch.tensor(limits, device=device), top_p_R.float(), max(restricted))
        cumulative_RV = scaled_RV.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
        target_R1 = (uniform_R * cumulative_RV[:, -1]).unsqueeze(1)
        drawn_R = torch.searchsorted(cumulative_RV, target_R1, right=True).squeeze(1).clamp_(max=vocab_size - 1)
        return torch.where(random_R, drawn_R, greedy_R)


def _cut(scaled_RV: torch.Tensor, limit_R: torch.Tensor, top_p_R: torch.Tensor, width: int) -> torch.Tensor:
    """Set logits outside top_k, then outside top_p of what is left, to -inf. Equal logits stay or go together."""
    ranked_RK = scaled_RV.topk(width, dim=-1).values
    last_R1 = ranked_RK.gather(1, (limit_R.clamp(max=width) - 1).unsqueeze(1))
    limited_R1 = (limit_R <= width).unsqueeze(1)
    kept_RV = scaled_RV.masked_fill((scaled_RV < last_R1) & limited_R1, float("-inf"))
    total_R1 = kept_RV.logsumexp(dim=-1, keepdim=True)
    shares_RK = (ranked_RK - total_R1).exp()
    # A logit is needed while those before it have not reached top_p; the smallest needed one is the threshold.
    needed_RK = shares_RK.cumsum(dim=-1) - shares_RK < top_p_R.unsqueeze(1)
    threshold_R1 = ranked_RK.masked_fill(~needed_RK, float("inf")).amin(dim=-1, keepdim=True)
    nucleus_R1 = (top_p_R < 1).unsqueeze(1)
    return kept_RV.masked_fill((kept_RV < threshold_R1) & nucleus_R1, float("-inf"))
