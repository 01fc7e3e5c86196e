"""Choose token ids from logits, for the whole batch at once.

A draw depends only on the sample's seed, the token's index in the answer, and that token's logits. The uniform number
is a hash of (seed, index), computed on the host; the cumulative distribution in vocabulary order maps it to a token.
The batching of requests therefore changes no draw (beyond the last bits of logits).

The order of processing is that of vLLM's V1 sampler (vllm/v1/sample/sampler.py): log probabilities are taken from the
unprocessed logits (executor.logprobs); then allowed ids, grammars, minimum length and biases
(executor.logits_processors), and penalties (executor.penalties) apply; greedy rows take the largest logit; the others
are divided by their temperature and cut by min_p, top_k and top_p, in this order. Ids of media placeholders are removed
before everything else. Shapes: R rows, V vocabulary, K the largest top_k of the batch.
"""

from collections import Counter
from collections.abc import Sequence as Ordered

import numpy as np
import torch

from saccade.engine.core.step import GREEDY_BELOW, SamplingInput
from saccade.engine.executor import logits_processors
from saccade.engine.executor.logits_processors import RowChanges
from saccade.engine.executor.penalties import Penalties
from saccade.nn.transfer import to_device
from saccade.protocol.request import SamplingParams


class Sampler:
    """Greedy and random sampling. *forbidden* ids, the media placeholders, are never sampled.

    *changes* are those that the rows' requests ask for.
    """

    def __init__(
        self, forbidden: Ordered[int], changes: RowChanges, penalties: Penalties, device: torch.device
    ) -> None:
        self._forbidden = torch.tensor(forbidden, dtype=torch.int64, device=device)
        self._changes = changes
        self._penalties = penalties
        self._grammar_masks = logits_processors.GrammarMasks(device)

    def __call__(
        self,
        logits_RV: torch.Tensor,
        rows: Ordered[int],
        params: Ordered[SamplingParams],
        sampling: SamplingInput,
        next_ids_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a token id for each of *rows*, int64 [R], drawn with *params*. Changes the logits in place.

        The tokens count for the penalties of the rows' next ones. If a row draws several tokens, *next_ids_R* has the
        proposal after each draw but its last, which counts for its later draws.
        """
        logits_RV.index_fill_(1, self._forbidden, float("-inf"))
        if self._changes.allowed_ids:
            logits_processors.keep_allowed(logits_RV, rows, self._changes.allowed_ids)
        if sampling.masks:
            self._grammar_masks.apply(logits_RV, sampling.masks)
        if self._changes.biases:
            logits_processors.add_biases(logits_RV, rows, self._changes.biases)
        if sampling.too_short:
            logits_processors.forbid_stops(logits_RV, rows, sampling.too_short, self._changes.stop_ids)
        if sampling.counts:
            self._penalties.start(sampling.counts)
        places = [place for place, param in enumerate(params) if param.penalises]
        penalised = None
        for place_of_rows in _parts(rows, places):
            if penalised is not None and next_ids_R is not None:
                self._penalties.note(penalised, next_ids_R)
            penalised = self._penalties.apply(logits_RV, rows, params, place_of_rows)
        # Returns the same index as argmax, the first of equal values, in a third of the time on a CPU.
        ids_R = logits_RV.max(dim=-1).indices
        if sampling.uniforms:
            ids_R = _draw(logits_RV, ids_R, params, sampling.uniforms)
        if penalised is not None:
            self._penalties.note(penalised, ids_R)
        return ids_R


def _parts(rows: Ordered[int], places: Ordered[int]) -> list[list[int]]:
    """Divide *places* so that no row has two in a part. The last part has the last place of each row, and so on."""
    parts: list[list[int]] = []
    num_seen = Counter[int]()
    for place in reversed(places):
        num_seen[rows[place]] += 1
        if num_seen[rows[place]] > len(parts):
            parts.append([])
        parts[num_seen[rows[place]] - 1].append(place)
    return parts[::-1]


def _draw(
    logits_RV: torch.Tensor, greedy_R: torch.Tensor, params: Ordered[SamplingParams], uniforms: Ordered[float]
) -> torch.Tensor:
    """Return a token id for each row, drawn by its uniform number; that of *greedy_R* for a row without temperature."""
    vocab_size = logits_RV.shape[1]
    # Without top_k, the limit is the whole vocabulary. Logits are ranked only if a row is cut by top_k or top_p.
    limits = [min(param.top_k, vocab_size) or vocab_size for param in params]
    restricted = [limit for limit, p in zip(limits, params, strict=True) if limit < vocab_size or p.top_p < 1]
    array_5R = np.empty((5, len(params)))
    array_5R[0] = [param.temperature for param in params]
    array_5R[1] = [param.top_p for param in params]
    array_5R[2] = limits
    array_5R[3] = [param.min_p for param in params]
    array_5R[4] = uniforms
    temperature_R, top_p_R, limit_R, min_p_R, uniform_R = to_device(array_5R, logits_RV.device)
    random_R = temperature_R >= GREEDY_BELOW
    # Greedy rows are computed with the others and replaced at the end.
    scaled_RV = logits_RV / torch.where(random_R, temperature_R, 1.0).float().unsqueeze(1)
    if array_5R[3].any():
        # The minimum is a probability of min_p times the largest, expressed as a difference of logits.
        least_R1 = scaled_RV.amax(dim=-1, keepdim=True) + min_p_R.log().float().unsqueeze(1)
        scaled_RV.masked_fill_(scaled_RV < least_R1, float("-inf"))
    if restricted:
        scaled_RV = _cut(scaled_RV, limit_R.long(), top_p_R.float(), max(restricted))
    cumulative_RV = scaled_RV.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target_R1 = (uniform_R * cumulative_RV[:, -1]).unsqueeze(1)
    drawn_R = torch.searchsorted(cumulative_RV, target_R1, right=True).squeeze(1).clamp_(max=vocab_size - 1)
    return torch.where(random_R, drawn_R, greedy_R)


def _cut(scaled_RV: torch.Tensor, limit_R: torch.Tensor, top_p_R: torch.Tensor, width: int) -> torch.Tensor:
    """Set logits outside top_k, then outside top_p of the rest, to -inf. Equal logits are kept or removed together."""
    ranked_RK = scaled_RV.topk(width, dim=-1).values
    last_R1 = ranked_RK.gather(1, (limit_R.clamp(max=width) - 1).unsqueeze(1))
    limited_R1 = (limit_R <= width).unsqueeze(1)
    kept_RV = scaled_RV.masked_fill((scaled_RV < last_R1) & limited_R1, float("-inf"))
    total_R1 = kept_RV.logsumexp(dim=-1, keepdim=True)
    shares_RK = (ranked_RK - total_R1).exp()
    # A logit is needed while the sum before it is below top_p; the smallest needed logit is the threshold.
    needed_RK = shares_RK.cumsum(dim=-1) - shares_RK < top_p_R.unsqueeze(1)
    threshold_R1 = ranked_RK.masked_fill(~needed_RK, float("inf")).amin(dim=-1, keepdim=True)
    nucleus_R1 = (top_p_R < 1).unsqueeze(1)
    return kept_RV.masked_fill((kept_RV < threshold_R1) & nucleus_R1, float("-inf"))
