"""Imports kernels, and turns whatever GPU libraries raise into reasons that people can read."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from saccade.errors import cause

OTHER_TORCH = "undefined symbol"
"""The words of the loader about a library that was compiled for another release of torch."""


class Unavailable(Exception):
    """A kernel cannot compute something. The *reason* completes a sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@contextmanager
def attempt() -> Iterator[None]:
    """Raise Unavailable, with the cause, for any exception in the block."""
    try:
        yield
    except Unavailable:
        raise
    except Exception as error:
        if OTHER_TORCH in str(error):
            raise Unavailable(f"it was compiled for another torch than {torch.__version__} ({cause(error)})") from error
        if isinstance(error, ImportError):
            raise Unavailable(f"it is not installed ({error})") from error
        raise Unavailable(f"its library fails ({cause(error)})") from error


def kernel(operation: str, formats: set[str], kernels: Mapping[tuple[str, str], str]) -> Callable[..., Any]:
    """Return the function *operation* for weights in *formats* from its module in *kernels*.

    Raises Unavailable if there is no such function, or if there is not exactly one format.
    """
    if len(formats) != 1:
        raise Unavailable(f"its parts have several formats: {', '.join(sorted(formats))}")
    (form,) = formats
    if (operation, form) not in kernels:
        raise Unavailable(f"no kernel takes {form}")
    with attempt():
        return getattr(importlib.import_module(kernels[operation, form]), operation)  # type: ignore[no-any-return]
