"""The files, tables and bars of commands that ask many things."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from saccade.consoles import new_console
from saccade.errors import StartupError, printable
from saccade.eval.runner import Journal


def check_writable(*files: Path | None) -> None:
    """Raise StartupError if one of *files* cannot be written, so that a long measurement does not end with it."""
    for file in filter(None, files):
        try:
            is_new = not file.exists()
            file.touch()
            if is_new:
                file.unlink()
        except OSError as error:
            raise StartupError(f"Cannot write {file}: {error.strerror}.") from error


@contextlib.contextmanager
def resumable(journal: Journal) -> Iterator[None]:
    """Close *journal* at the end, and say on Ctrl-C how to go on, unless that is said already."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if interrupt.args:
            raise
        raise KeyboardInterrupt(f"Interrupted. {_how_to_go_on(journal)}") from interrupt
    finally:
        journal.close()


def new_bar(what: str) -> Progress:
    """Return a bar that counts *what* on a terminal; a pipe gets none."""
    console = new_console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _how_to_go_on(journal: Journal) -> str:
    num_answers = len(journal.results)
    if not num_answers:
        return "There was no answer yet, so the same command begins again."
    answers = "1 answer is" if num_answers == 1 else f"{num_answers} answers are"
    return f"{answers} kept in {printable(str(journal.path))}; the same command goes on from there."


def aligned(lines: Iterable[Sequence[str]], num_numbers: int) -> list[str]:
    """Return a line for each of *lines*: a name on the left, *num_numbers* cells on the right, and words after them."""
    cells = list(lines)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if 0 < index <= num_numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
