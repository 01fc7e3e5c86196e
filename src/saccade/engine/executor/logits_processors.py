"""Change logits before a token is chosen: biases and a minimum length.

Everything is sparse: an entry is an index into the flattened logits, row * V + token id. The host's arrays are float64,
which represents such indices exactly, so that they go to the device in one transfer with the other parameters of the
step. Shapes: R rows, V vocabulary, C and D entries of each kind.
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


def host_arrays(params: Ordered[SamplingParams], sampling: SamplingInput, vocab_size: int) -> list[Floats]:
    """Return the input of `process` for draws with parameters *params*, as float64 arrays.

    The arrays are: biased entries [C], their biases [C]; stop ids of answers below their minimum length [D].
    """
    biased, stops = _Entries(), _Entries()
    biases = array("d")
    too_short = frozenset(sampling.too_short)
    for index, param in enumerate(params):
        if param.logit_bias:
            biased.add(index, param.logit_bias)
            biases.extend(param.logit_bias.values())
        if index in too_short:
            # Some configurations have stop ids outside the vocabulary; they are never drawn.
            stops.add(index, [token_id for token_id in param.stop_token_ids if 0 <= token_id < vocab_size])
    return [biased.flat(vocab_size), np.array(biases, dtype=np.float64), stops.flat(vocab_size)]


def process(logits_RV: torch.Tensor, arrays: Ordered[torch.Tensor]) -> None:
    """Change float32 logits in place by the *arrays* of `host_arrays`, which must be on the device.

    The order is that of vLLM's V1 sampler (vllm/v1/sample/sampler.py): minimum length and bias, then penalties.
    """
    biased_C, biases_C, stops_D = arrays[0].long(), arrays[1].float(), arrays[2].long()
    flat = logits_RV.view(-1)
    if len(biased_C):
        flat.index_add_(0, biased_C, biases_C)
    if len(stops_D):
        flat.index_fill_(0, stops_D, float("-inf"))
