"""The console for progress: a bar is drawn on a terminal only, never into a pipe or a notebook."""

import sys

from rich.console import Console


def progress_console() -> Console:
    """Return a console on stderr whose *is_terminal* is true only for a terminal.

    Rich also takes a pipe for one if FORCE_COLOR is set, as in notebooks and CI; a notebook says itself that it is one.
    """
    console = Console(stderr=True, highlight=False, markup=False)
    is_terminal = sys.stderr.isatty() and not console.is_jupyter
    return Console(stderr=True, highlight=False, markup=False, force_terminal=is_terminal, force_jupyter=False)
