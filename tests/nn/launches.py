"""Kernels that a GPU would start, counted on a CPU: those of torch's operations, of Triton and of libraries."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

SEVERAL: Mapping[str, int] = MappingProxyType({"_grouped_mm.default": 2, "sort.stable": 2, "topk.default": 2})
"""Kernels of the operations of torch that start more than one, at least: a grouped product first makes its problems."""


class Launches(TorchDispatchMode):
    """The names of all kernels, in their order. Views and new memory without values start none.

    Triton's kernels count as one each, whatever its interpreter computes, and so does torch's norm. Enter it without
    gradients, but not in inference mode, which has no names for what a compound operation computes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._interpret, self._norm = InterpretedFunction.run, torch.rms_norm

    def __enter__(self) -> Self:
        interpret = self._interpret

        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            return self.apart([kernel.__name__], interpret, kernel, *args, **kwargs)

        InterpretedFunction.run = run
        torch.rms_norm = self.as_one("rms_norm", self._norm)
        return super().__enter__()

    def __exit__(self, *raised: object) -> None:
        InterpretedFunction.run, torch.rms_norm = self._interpret, self._norm
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.__name__ and func.__name__ != "_unsafe_view.default":
            self.names += [func.__name__] * SEVERAL.get(func.__name__, 1)
        return result

    def apart(self, names: list[str], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what *function* returns, which starts the kernels *names*."""
        with _disable_current_modes():
            result = function(*args, **kwargs)
        self.names += names
        return result

    def as_one(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return *function*, which counts as one kernel."""
        return lambda *args, **kwargs: self.apart([name], function, *args, **kwargs)
