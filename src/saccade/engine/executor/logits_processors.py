"""Change logits before a token is chosen: biases and a minimum length.

Everything is sparse: an entry is an index into the flattened logits, row * V + token id. The host's arrays are float64,
which represents such indices exactly, so that they go to the device in one transfer with the other parameters of the
step. Shapes: R rows, V vocabulary, C and D entries of each kind.
"""

from collections.abc import Sequence as Ordered

import numpy as np
import numpy.typing as npt
import torch

from saccade.engine.core.step import SamplingInput
from saccade.protocol.request import SamplingParams

Floats = npt.NDArray[np.float64]


def host_arrays(params: Ordered[SamplingParams], sampling: SamplingInput, vocab_size: int) -> list[Floats]:
    """Return the input of `process` for draws with parameters *params*, as float64 arrays.

    The arrays are: biased entries [C], their biases [C]; stop ids of answers below their minimum length [D].
    """
    starts = range(0, len(params) * vocab_size, vocab_size)
    biased = [start + token_id for start, param in zip(starts, params, strict=True) for token_id in param.logit_bias]
    biases = [bias for param in params for bias in param.logit_bias.values()]
    # Some configurations have stop ids outside the vocabulary; they are never drawn.
    stops = [
        starts[draw] + token_id
        for draw in sampling.too_short
        for token_id in params[draw].stop_token_ids
        if 0 <= token_id < vocab_size
    ]
    return [np.array(values, dtype=np.float64) for values in (biased, biases, stops)]


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
