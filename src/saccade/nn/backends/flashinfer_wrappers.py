"""FlashInfer's wrappers. Each plans a step, and its kernels then run for all layers of one kind."""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

Kind = TypeVar("Kind")
Step = TypeVar("Step")

NUM_TURNS = 2
"""Steps whose plans are kept: one may be in flight."""


class _Planned(NamedTuple, Generic[Step]):
    """A wrapper, and the step that it was planned for last."""

    wrapper: Any
    step: Step


class Wrappers(Generic[Kind, Step]):
    """Wrappers by kind of layer. *make* returns one for steps like its argument; *plan* plans one for a step.

    A wrapper's plan travels through host memory, which its next plan overwrites, and the copy may wait for the step
    before. So each kind has two wrappers, which take turns, however many plans a step has.
    """

    def __init__(self, make: Callable[[Step], Any], plan: Callable[[Any, Kind, Step], None]) -> None:
        self._make, self._plan = make, plan
        self._copied: torch.cuda.Event | None = None
        self.planned: dict[Kind, tuple[_Planned[Step], ...]] = {}

    def of(self, kind: Kind, step: Step) -> Any:
        """Return a wrapper for *kind* that is planned for *step*, but not the one of the last step."""
        planned = self.planned.get(kind, ())
        for wrapper, own in planned:
            if own is step:
                return wrapper
        wrapper = planned[0].wrapper if len(planned) == NUM_TURNS else self._make(step)
        self._plan(wrapper, kind, step)
        self.planned[kind] = (*planned[1 - NUM_TURNS :], _Planned(wrapper, step))
        return wrapper

    def replan(self, step: Step, device: torch.device) -> None:
        """Plan every wrapper for *step*, before a CUDA graph that was captured with another step is replayed.

        The host waits until the last plan of these wrappers has been copied. By then the step before that plan has
        ended, and its tokens have been collected. The host waits for no other plan.
        """
        if self._copied is not None:
            self._copied.synchronize()
        for kind, planned in self.planned.items():
            for wrapper, _ in planned:
                self._plan(wrapper, kind, step)
        if self.planned and device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()


def graph_buffers(device: torch.device, **sizes: int) -> dict[str, Any]:
    """Return a wrapper's arguments for CUDA graphs. The wrapper then copies its plans into these int32 buffers."""
    buffers = {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
    return {"use_cuda_graph": True, **buffers}


def borders(lengths: "np.ndarray[Any, np.dtype[Any]]") -> torch.Tensor:
    """Return the borders int32 [S + 1] of S sequences of *lengths*, on the host."""
    return torch.from_numpy(np.concatenate(([0], lengths.cumsum()))).int()
