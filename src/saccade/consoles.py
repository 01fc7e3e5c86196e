"""The consoles of commands and LLM. Colours and bars are only for terminals, never for a pipe or a notebook."""

import sys

from rich.console import Console


def new_console(
    *, stderr: bool = False, markup: bool = False, soft_wrap: bool = False, style: str | None = None
) -> Console:
    """Return a console on stdout, or on *stderr*, whose *is_terminal* is true only for a terminal.

    Rich also takes a pipe for one if FORCE_COLOR is set, as in notebooks and CI; a notebook says itself that it is one.
    """
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        stderr=stderr,
        markup=markup,
        soft_wrap=soft_wrap,
        style=style,
        highlight=False,
        force_terminal=stream.isatty() and not Console().is_jupyter,
        force_jupyter=False,
    )
