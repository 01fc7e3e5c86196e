"""A computation that pauses after each layer, so that other work can run before it goes on.

It is a generator, which holds what the next layer needs. However often it pauses, the same operations run in the same
order, so the result has the same bits.
"""

from collections.abc import Generator

import torch

Layerwise = Generator[None, None, torch.Tensor]
"""Yields after each layer, and returns the result."""


def advance(computation: Layerwise, num_layers: int) -> torch.Tensor | None:
    """Run the next *num_layers* layers. Return the result if the computation has ended, or None if it has paused."""
    for _ in range(num_layers):
        try:
            next(computation)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
    return None


def complete(computation: Layerwise) -> torch.Tensor:
    """Run the rest of the computation, and return its result."""
    while True:
        try:
            next(computation)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
