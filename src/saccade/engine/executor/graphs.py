"""Capture calls as CUDA graphs, one for each of a few sizes, over input that never moves.

A graph repeats the kernels of one call with the same addresses and sizes. So a call's input is copied into the graph's
buffers, and padding fills them up to the graph's size. CUDA has never captured these graphs: tests replace `Capture` by
a function that calls again.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ordered
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from saccade.errors import StartupError

Compute = Callable[[], torch.Tensor]
Buffers = TypeVar("Buffers")


class Captured(NamedTuple):
    """A call that `replay` repeats; its result is then in *output*."""

    output: torch.Tensor
    replay: Callable[[], None]


Capture = Callable[[Compute], Captured]


class CudaCapture:
    """Captures calls in CUDA graphs that share one pool of memory.

    Replaying another of the graphs overwrites a call's output, so read or copy it before. Capture the call that needs
    the most memory first: the pool then does not grow.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, compute: Compute) -> Captured:
        """Capture a call. A call before it compiles and allocates, so that the capture does not."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Another thread, NCCL's watch, may call CUDA during a capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = compute()
        return Captured(output, graph.replay)


class Graphs(Generic[Buffers]):
    """Captured calls by size. `make(size)` returns the buffers of a size's input, and the call that reads them.

    *sizes* ascend. *flag* is what to start with if CUDA cannot capture a call.
    """

    def __init__(
        self,
        sizes: Ordered[int],
        make: Callable[[int], tuple[Buffers, Compute]],
        flag: str,
        capture: Capture | None = None,
    ) -> None:
        self.sizes = sizes
        self._make = make
        self._flag = flag
        self._capture = capture or CudaCapture()
        self._captured: dict[int, tuple[Buffers, Captured]] = {}

    def prepare(self) -> Iterable[tuple[int, int]]:
        """Capture all graphs, the largest first; yield how many are done, and how many there are.

        Raises StartupError if CUDA cannot capture a call.
        """
        for number, size in enumerate(reversed(self.sizes)):
            yield number, len(self.sizes)
            try:
                self.of(size)
            except RuntimeError as error:
                raise StartupError(
                    f"A call of size {size} cannot be captured as a CUDA graph: {error}. Start with {self._flag}."
                ) from error

    @torch.inference_mode()
    def of(self, size: int) -> tuple[Buffers, Captured]:
        """Return the buffers and the graph for input of *size*, which must not exceed the largest."""
        size = next(one for one in self.sizes if one >= size)
        if size not in self._captured:
            buffers, compute = self._make(size)
            self._captured[size] = buffers, self._capture(compute)
        return self._captured[size]
