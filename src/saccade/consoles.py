"""Makes consoles for commands and for LLM. Only a terminal gets colours and bars, never a pipe or a notebook."""

import sys

from rich.console import Console


def new_console(
    *, stderr: bool = False, markup: bool = False, soft_wrap: bool = False, style: str | None = None
) -> Console:
    """Return a console on stdout, or on stderr if *stderr* is set, whose `is_terminal` is true only for a terminal.

    Rich also takes a pipe for a terminal if FORCE_COLOR is set, as in notebooks and CI. A notebook's own streams claim
    to be terminals, too.
    """
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        stderr=stderr,
        markup=markup,
        soft_wrap=soft_wrap,
        style=style,
        highlight=False,
        force_terminal=stream.isatty() and not is_in_notebook(),
        force_jupyter=False,
    )


def is_in_notebook() -> bool:
    """Return whether a notebook shows what this process displays."""
    return Console().is_jupyter
