"""Stand-ins for the capture of CUDA graphs."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from saccade.engine.executor.graphs import Captured, Compute


class Again:
    """Captures by keeping the call. A replay calls it again, into the result of the capture."""

    def __init__(self) -> None:
        self.num_captures = 0
        self.replayed: list[int] = []

    def __call__(self, compute: Compute) -> Captured:
        self.num_captures += 1
        output = compute()

        def replay() -> None:
            self.replayed.append(len(output))
            output.copy_(compute())

        return Captured(output, replay)


class PlayedCuda:
    """torch.cuda's part in a capture, on a CPU: *pools* are those that graphs were captured in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pools: list[Any] = []
        self.num_streams = 0
        self._num_handles = 0
        self._current = SimpleNamespace(wait_stream=lambda _: None)
        for name, value in {
            "Stream": self._stream,
            "current_stream": lambda: self._current,
            "stream": lambda _: nullcontext(),
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
            "graph": self._graph,
            "graph_pool_handle": self._handle,
        }.items():
            monkeypatch.setattr(f"torch.cuda.{name}", value)

    def _stream(self) -> Any:
        self.num_streams += 1
        return SimpleNamespace(wait_stream=lambda _: None)

    def _handle(self) -> tuple[int, int]:
        self._num_handles += 1
        return 0, self._num_handles

    @contextmanager
    def _graph(self, graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self.pools.append(pool)
        try:
            yield
        except Exception as error:
            # As torch does: the end of a failed capture fails too.
            raise RuntimeError("operation failed due to a previous error during capture") from error
