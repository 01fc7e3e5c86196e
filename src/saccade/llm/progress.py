"""Bars that show how many answers of a batch are done, on a terminal or in a notebook."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from rich.progress import Progress

from saccade.consoles import is_in_notebook, new_console

UPDATE_SECONDS = 0.2


def answers_bar(total: int) -> AbstractContextManager[Callable[[], None]]:
    """Show a bar during the block. What it yields counts one more of *total* answers, from any thread.

    In a pipe or a file, nothing is output.
    """
    return _notebook_bar(total) if is_in_notebook() else _terminal_bar(total)


@contextmanager
def _terminal_bar(total: int) -> Iterator[Callable[[], None]]:
    console = new_console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("answers", total=total)
        yield lambda: bar.advance(task)


@contextmanager
def _notebook_bar(total: int) -> Iterator[Callable[[], None]]:
    """Show one output of the cell and replace it, so that it stays small in the notebook's file."""
    display: Callable[..., Any] = sys.modules["IPython.display"].display
    output, num_done, updated_at = display(_output(0, total), raw=True, display_id=True), 0, time.monotonic()

    def advance() -> None:
        nonlocal num_done, updated_at
        num_done += 1
        if (now := time.monotonic()) - updated_at > UPDATE_SECONDS:
            updated_at = now
            output.update(_output(num_done, total), raw=True)

    try:
        yield advance
    finally:
        output.update(_output(num_done, total), raw=True)


def _output(num_done: int, total: int) -> dict[str, str]:
    text = f"{num_done} of {total} answers"
    return {"text/html": f'<progress max="{total}" value="{num_done}"></progress> {text}', "text/plain": text}
