"""Packs int8 weights for oneDNN, several times faster than oneDNN does.

oneDNN brings them into its layout value by value: 3 ns for each, most of a model's start. Here, it packs the first
weight of each shape. If the layout is the known one, later weights of that shape get a copy of its memory, and then
their own words. After the words, oneDNN keeps the negated sum of each output's weights, for the activations' zero
point.
"""

from functools import cache
from weakref import WeakValueDictionary

import torch

from saccade.nn.onednn_memory import possible_memory

SUMMED_AT_ONCE = 1 << 18
"""Values that are summed at a time: their copies in float32 fit into the processor's caches."""


def packed_weight(values_OI: torch.Tensor) -> torch.Tensor:
    """Return int8 values in oneDNN's layout for products with unsigned activations."""
    shape = (values_OI.shape[0], values_OI.shape[1])
    like = _known().get(shape)
    if like is not None:
        packed: torch.Tensor = like.clone()
        for own, expected in _parts(packed, values_OI):
            own.copy_(expected)
        return packed
    packed = torch.ops.onednn.qlinear_prepack(values_OI, None)
    parts = _parts(packed, values_OI)
    if parts and all(torch.equal(own, expected) for own, expected in parts):
        _known()[shape] = packed
    return packed


@cache
def _known() -> WeakValueDictionary[tuple[int, int], torch.Tensor]:
    """Return packed weights in the known layout that a network uses, by their shape [O, I]."""
    return WeakValueDictionary()


def _parts(packed: torch.Tensor, values_OI: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the words and the sums in *packed*, each with those of *values_OI*; nothing if the sizes are others."""
    shape = (values_OI.shape[0], values_OI.shape[1])
    memory = next(possible_memory(packed, shape, torch.int8), None)
    if memory is None or (4 * memory.words_BWR.numel(), len(memory.rest)) != (values_OI.numel(), len(values_OI)):
        return []
    words_BRW = values_OI.view(torch.int32).unflatten(0, (-1, memory.words_BWR.shape[2]))
    step = max(1, SUMMED_AT_ONCE // shape[1])
    # Sums of whole numbers below 2^24 are exact in float32, and several times faster than in int32.
    sums = torch.cat([some.float().sum(1) for some in values_OI.split(step)])
    return [(memory.words_BWR, words_BRW.transpose(1, 2)), (memory.rest, sums.neg_().int())]
