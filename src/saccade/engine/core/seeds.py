"""Random numbers for (seed, index), the same on every machine and in every batch. Does not import torch."""

from collections.abc import Sequence as Ordered

import numpy as np
import numpy.typing as npt

SEED_MASK = (1 << 64) - 1


def uniforms(seeds: Ordered[int], indices: Ordered[int]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, index), mixed by splitmix64 (Steele, Lea & Flood 2014)."""
    # Two rounds, so that neighbouring seeds and neighbouring indices do not lead to the same state.
    mixed = _splitmix64(_splitmix64(np.array(seeds, dtype=np.uint64)) ^ np.array(indices, dtype=np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample_seed(seed: int, index: int) -> int:
    """Return the seed for sample *index* of a request with *seed*; sample 0 has the request's own seed."""
    if index == 0:
        return seed & SEED_MASK
    # The complement of an index is never a token's index, so no sample's seed equals one of the request's own draws.
    mixed = _splitmix64(_splitmix64(np.array([seed & SEED_MASK], dtype=np.uint64)) ^ np.uint64(SEED_MASK ^ index))
    return int(mixed[0])


def _splitmix64(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
