"""Change logits before a token is chosen: biases, a minimum length, penalties.

Everything is sparse: an entry is an index into the flattened logits, row * V + token id. The host's arrays are float64,
which represents such indices exactly, so that they go to the device in one transfer with the other parameters of the
step. Shapes: R rows, V vocabulary, C..E entries of each kind.
"""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Ordered

import numpy as np
import numpy.typing as npt
import torch

from saccade.engine.core.step import SamplingInput
from saccade.protocol.request import SamplingParams

Floats = npt.NDArray[np.float64]


class _Entries:
    """Token ids of some rows, collected to be converted to entries."""

    def __init__(self) -> None:
        self._ids = array("q")
        self._rows: list[int] = []
        self._lengths: list[int] = []

    def add(self, row: int, token_ids: Iterable[int]) -> None:
        before = len(self._ids)
        self._ids.extend(token_ids)
        self._rows.append(row)
        self._lengths.append(len(self._ids) - before)

    def rows(self) -> Floats:
        return np.array(self._rows, dtype=np.float64)

    def flat(self, vocab_size: int) -> Floats:
        """Return the entries: row * vocab_size + token id."""
        lengths = np.array(self._lengths, dtype=np.int64)
        flat: Floats = np.repeat(self.rows(), lengths) * vocab_size + np.array(self._ids)
        return flat


def host_arrays(
    rows: Ordered[int], params: Ordered[SamplingParams], sampling: SamplingInput, vocab_size: int
) -> list[Floats]:
    """Return the input of `process` for each of *rows* with parameters *params*, as float64 arrays.

    The arrays are: biased entries [C], their biases [C]; stop ids of answers below their minimum length [D]; seen
    tokens [E], their counts in the answer [E]; repetition, frequency and presence penalty of each row [3, R].
    """
    biased, stops, counted = (_Entries() for _ in range(3))
    biases, counts = array("d"), array("q")
    penalties = np.array([(1.0, 0.0, 0.0)] * len(rows)).T
    counts_of = {entry.row: entry for entry in sampling.counts}
    too_short = frozenset(sampling.too_short)
    for index, (row, param) in enumerate(zip(rows, params, strict=True)):
        if param.logit_bias:
            biased.add(index, param.logit_bias)
            biases.extend(param.logit_bias.values())
        if row in too_short:
            # Some configurations have stop ids outside the vocabulary; they are never drawn.
            stops.add(index, [token_id for token_id in param.stop_token_ids if 0 <= token_id < vocab_size])
        if row in counts_of:
            penalties[:, index] = param.repetition_penalty, param.frequency_penalty, param.presence_penalty
            counted.add(index, array("q", counts_of[row].ids))
            counts.frombytes(counts_of[row].counts)
    flat = [entries.flat(vocab_size) for entries in (biased, stops, counted)]
    values = (np.array(biases, dtype=np.float64), np.array(counts, dtype=np.float64))
    return [flat[0], values[0], flat[1], flat[2], values[1], penalties]


def process(logits_RV: torch.Tensor, arrays: Ordered[torch.Tensor]) -> None:
    """Change float32 logits in place by the *arrays* of `host_arrays`, which must be on the device.

    The order is that of vLLM's V1 sampler (vllm/v1/sample/sampler.py): minimum length and bias, then penalties. The
    penalties follow its apply_penalties. The logit of a token of prompt or answer is divided by the repetition penalty
    if it is positive, and multiplied otherwise (Keskar et al. 2019, section 4.1). Then the frequency penalty times the
    token's count in the answer is subtracted, and for a count over 0 the presence penalty.
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
