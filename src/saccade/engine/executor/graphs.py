"""Capture calls as CUDA graphs, one for each of a few sizes, over input that never moves.

A graph repeats the kernels of one call with the same addresses and sizes. So a call's input is copied into the graph's
buffers, and padding fills them up to the graph's size. CUDA has never captured these graphs: tests replace `Capture`
with a function that repeats the call.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ordered
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from saccade.errors import StartupError
from saccade.nn.libraries import Unavailable, attempt

Compute = Callable[[], torch.Tensor]
Buffers = TypeVar("Buffers")


class Captured(NamedTuple):
    """A call that `replay` repeats. *output* then has its result."""

    output: torch.Tensor
    replay: Callable[[], None]


Capture = Callable[[Compute], Captured]


class CudaCapture:
    """Captures calls in CUDA graphs that share one pool of memory.

    Replaying another of the graphs overwrites a call's output, so read or copy the output first. Capture the call that
    needs the most memory first: the pool then does not grow.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        # One for all captures: cuBLAS keeps a workspace for each stream.
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, compute: Compute) -> Captured:
        """Capture a call. A first call compiles and allocates, so that the captured one does not.

        Raises whatever the call raises.
        """
        if self._stream is None:
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph, failure = torch.cuda.CUDAGraph(), None
        try:
            # Another thread, NCCL's watch, may call CUDA during a capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                try:
                    output = compute()
                except Exception as error:
                    failure = error
                    raise
        except Exception as error:
            # The end of a failed capture raises an error of its own, which hides the cause.
            raise (failure or error) from None
        return Captured(output, graph.replay)


class Graphs(Generic[Buffers]):
    """Captured calls by size. `make(size)` returns the buffers of a size's input, and the call that reads them.

    *sizes* ascend. If CUDA cannot capture a call, the error names *flag*, which turns graphs off.
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

    def capture_graphs(self) -> Iterable[tuple[int, int]]:
        """Capture all graphs, the largest first; yield how many are done, and how many there are.

        Raises StartupError if a call cannot be captured, whatever the GPU library raised.
        """
        for number, size in enumerate(reversed(self.sizes)):
            yield number, len(self.sizes)
            try:
                with attempt():
                    self.graph_of_size(size)
            except Unavailable as error:
                raise StartupError(
                    f"A call of size {size} cannot be captured as a CUDA graph: {error.reason}. "
                    f"Start with {self._flag}."
                ) from error

    @torch.inference_mode()
    def graph_of_size(self, size: int) -> tuple[Buffers, Captured]:
        """Return the buffers and the graph for input of *size*, at most the largest. Capture the graph if need be."""
        size = next(one for one in self.sizes if one >= size)
        if size not in self._captured:
            buffers, compute = self._make(size)
            self._captured[size] = buffers, self._capture(compute)
        return self._captured[size]
