"""FlashInfer's wrappers: each plans for a step, and its kernels then run for all layers of one kind."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import torch

Kind = TypeVar("Kind")
Step = TypeVar("Step")


class Wrappers(Generic[Kind, Step]):
    """Wrappers by the kind of layer; `make` returns one for steps like its argument, `plan` plans one for a step.

    Kernels read a wrapper's plan while the host plans the next step. So there are two for each kind, in turn.
    """

    def __init__(self, make: Callable[[Step], Any], plan: Callable[[Any, Kind, Step], None]) -> None:
        self._make, self._plan = make, plan
        self.planned: dict[tuple[Kind, int], tuple[Any, Step]] = {}

    def of(self, kind: Kind, turn: int, step: Step) -> Any:
        """Return the wrapper for *kind*, planned for *step*, whose *turn* is 0 or 1."""
        wrapper, planned = self.planned.get((kind, turn), (None, None))
        if planned is not step:
            wrapper = self._make(step) if wrapper is None else wrapper
            self._plan(wrapper, kind, step)
            self.planned[kind, turn] = wrapper, step
        return wrapper

    def replan(self, step: Step) -> None:
        """Plan every wrapper for *step*, before a CUDA graph of another step is replayed."""
        for (kind, _), (wrapper, _) in self.planned.items():
            self._plan(wrapper, kind, step)


def graph_buffers(device: torch.device, **sizes: int) -> dict[str, Any]:
    """Return a wrapper's arguments for CUDA graphs, which copies its plan into these int32 buffers."""
    buffers = {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
    return {"use_cuda_graph": True, **buffers}


def borders(lengths: "np.ndarray[Any, np.dtype[Any]]") -> torch.Tensor:
    """Return the borders int32 [S + 1] of S sequences of *lengths*, on the host."""
    return torch.from_numpy(np.concatenate(([0], lengths.cumsum()))).int()
