"""What changes logits before a token is chosen: biases, a minimum length, penalties.

Everything is sparse: an entry is an index into the flattened logits, row * V + token id. The host's arrays are float64,
exact for such indices, so that they can go to the device in one transfer with the other parameters of the step.
Shapes: R rows, V vocabulary, C..E entries of each kind.
"""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Ordered

import numpy as np
import numpy.typing as npt
import torch

from saccade.engine.sequence import Sequence

Floats = npt.NDArray[np.float64]


class _Entries:
    """Token ids of some rows, on their way to become entries."""

    def __init__(self) -> None:
        self._ids = array("q")
        self._rows: list[int] = []
        self._lengths: list[int] = []

    def add(self, row: int, token_ids: Iterable[int]) -> None:
        """Add ids of a row."""
        before = len(self._ids)
        self._ids.extend(token_ids)
        self._rows.append(row)
        self._lengths.append(len(self._ids) - before)

    def rows(self) -> Floats:
        """Return the rows that have been added."""
        return np.array(self._rows, dtype=np.float64)

    def flat(self, vocab_size: int) -> Floats:
        """Return the entries."""
        lengths = np.array(self._lengths, dtype=np.int64)
        flat: Floats = np.repeat(self.rows(), lengths) * vocab_size + np.array(self._ids)
        return flat


def host_arrays(sequences: Ordered[Sequence], vocab_size: int) -> list[Floats]:
    """Return what `process` needs of each row's sequence, as float64 arrays.

    They are: biased entries [C], their biases [C]; stop ids of answers under their minimum [D]; seen tokens [E], their
    counts in the answer [E]; repetition, frequency and presence penalty of each row [3, R].
    """
    biased, stops, seen = (_Entries() for _ in range(3))
    biases, counts = array("d"), array("q")
    penalties = np.array([(1.0, 0.0, 0.0)] * len(sequences)).T
    for row, sequence in enumerate(sequences):
        if not sequence.shaped:
            continue
        params = sequence.sampling
        if params.logit_bias:
            biased.add(row, params.logit_bias)
            biases.extend(params.logit_bias.values())
        if sequence.num_generated_tokens < params.min_tokens:
            # A stop id outside the vocabulary, which some configurations hold, is never drawn anyway.
            stops.add(row, [token_id for token_id in params.stop_token_ids if 0 <= token_id < vocab_size])
        if sequence.penalised:
            penalties[:, row] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
            tokens = sequence.token_counts
            seen.add(row, tokens.ids)
            counts.extend(tokens.counts)
    flat = [entries.flat(vocab_size) for entries in (biased, stops, seen)]
    values = (np.array(biases, dtype=np.float64), np.array(counts, dtype=np.float64))
    return [flat[0], values[0], flat[1], flat[2], values[1], penalties]


def process(logits_RV: torch.Tensor, arrays: Ordered[torch.Tensor]) -> None:
    """Change float32 logits in place by the *arrays* of `host_arrays`, now on the device.

    The order is that of vLLM's V1 sampler (vllm/v1/sample/sampler.py): minimum length and bias, then penalties. The
    penalties are those of its apply_penalties: the logit of a token of prompt or answer is divided by the repetition
    penalty where it is positive and multiplied where not (Keskar et al. 2019, section 4.1); then the frequency penalty
    times the token's count in the answer is subtracted, and for a count over 0 the presence penalty.
    """
    biased_C, stops_D, seen_E = (arrays[index].long() for index in (0, 2, 3))
    biases_C, counts_E, penalties_3R = (arrays[index].float() for index in (1, 4, 5))
    flat = logits_RV.view(-1)
    if len(biased_C):
        flat.index_add_(0, biased_C, biases_C)
    if len(stops_D):
        flat.index_fill_(0, stops_D, float("-inf"))
    if len(seen_E):
        repetition_E, frequency_E, presence_E = penalties_3R[:, seen_E // logits_RV.shape[1]]
        value_E = flat[seen_E]
        value_E = torch.where(value_E > 0, value_E / repetition_E, value_E * repetition_E)
        flat[seen_E] = value_E - frequency_E * counts_E - presence_E * (counts_E > 0)
