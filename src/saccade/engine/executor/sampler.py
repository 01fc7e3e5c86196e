"""Choose token ids from logits, for the whole batch at once.

A draw depends only on the sample's seed, the token's index in the answer, and that token's logits. The uniform number
is a hash of (seed, index), computed on the host; saccade.nn.draws maps it to a token. Batching therefore changes no
draw, except through the last bits of logits.

The order of processing is that of vLLM's V1 sampler (vllm/v1/sample/sampler.py). Log probabilities are taken from the
unprocessed logits (executor.logprobs). Then allowed ids, grammars, biases and minimum length
(executor.logits_processors) apply, and penalties (executor.penalties). Greedy rows take the largest logit. The others
are divided by their temperature and cut by min_p, top_k and top_p, in this order. Ids of media placeholders are removed
before everything else. Shapes: R rows, V vocabulary.
"""

from collections import Counter
from collections.abc import Sequence as Ordered

import numpy as np
import numpy.typing as npt
import torch

from saccade.engine.core.step import GREEDY_BELOW, SamplingInput
from saccade.engine.executor import logits_processors
from saccade.engine.executor.logits_processors import RowChanges
from saccade.engine.executor.penalties import Penalties
from saccade.nn import draws
from saccade.protocol.request import SamplingParams


class Sampler:
    """Samples token ids, greedily or at random. *forbidden* ids, the media placeholders, are never sampled.

    *changes* holds the changes that requests make to their rows' logits.
    """

    def __init__(
        self, forbidden: Ordered[int], changes: RowChanges, penalties: Penalties, device: torch.device
    ) -> None:
        self._forbidden = torch.tensor(forbidden, dtype=torch.int64, device=device)
        self._changes = changes
        self._penalties = penalties
        self._grammar_masks = logits_processors.GrammarMasks(device)
        self._draw = draws.fastest(device)

    def __call__(
        self,
        logits_RV: torch.Tensor,
        rows: Ordered[int],
        params: Ordered[SamplingParams],
        sampling: SamplingInput,
        next_ids_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a token id for each of *rows*, int64 [R], drawn with *params*. Changes the logits in place.

        The drawn tokens count towards the penalties of the rows' next draws. If a row draws several tokens,
        *next_ids_R* has the proposal after each draw but its last; the row's later draws count it.
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
            self._penalties.start_row(sampling.counts)
        places = [place for place, param in enumerate(params) if param.penalises]
        penalised = None
        for place_of_rows in _parts(rows, places):
            if penalised is not None and next_ids_R is not None:
                self._penalties.note(penalised, next_ids_R)
            penalised = self._penalties.apply(logits_RV, rows, params, place_of_rows)
        # Returns the same index as argmax, the first of equal values, in a third of the time on a CPU.
        ids_R = logits_RV.max(dim=-1).indices
        if sampling.uniforms:
            ids_R = self._draw(logits_RV, ids_R, _settings(params, sampling.uniforms, logits_RV.shape[1]))
        if penalised is not None:
            self._penalties.note(penalised, ids_R)
        return ids_R


def _parts(rows: Ordered[int], places: Ordered[int]) -> list[list[int]]:
    """Divide *places* so that no row occurs twice in a part.

    The last part has the last place of each row, the part before it the second-last place, and so on.
    """
    parts: list[list[int]] = []
    num_seen = Counter[int]()
    for place in reversed(places):
        num_seen[rows[place]] += 1
        if num_seen[rows[place]] > len(parts):
            parts.append([])
        parts[num_seen[rows[place]] - 1].append(place)
    return parts[::-1]


def _settings(params: Ordered[SamplingParams], uniforms: Ordered[float], vocab_size: int) -> npt.NDArray[np.float64]:
    """Return the settings [5, R] for `draws.draw`."""
    array_5R = np.empty((5, len(params)))
    array_5R[0] = [param.temperature if param.temperature >= GREEDY_BELOW else 0 for param in params]
    array_5R[1] = [param.top_p for param in params]
    # Without top_k, the limit is the whole vocabulary.
    array_5R[2] = [min(param.top_k, vocab_size) or vocab_size for param in params]
    array_5R[3] = [param.min_p for param in params]
    array_5R[4] = uniforms
    return array_5R
