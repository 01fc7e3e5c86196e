"""The settings for reading documents, each with its flag, its default and its help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from saccade.config import FLAT, Count, Seconds

UNSET = Parameter(show_default=False)


@FLAT
@dataclass(frozen=True)
class ReadSettings:
    """Which pages are read, how, and which files have the result."""

    pages: Annotated[str | None, UNSET] = None
    "The pages of each file, from 1: 3-9, 1,4-6 or 10-; by default all."
    form: Annotated[str | None, UNSET] = None
    "What the model is asked, and how its answers are read; by default found in its name. docs/read.md lists the forms."
    out: Annotated[Path | None, UNSET] = None
    "A folder for a file of text for each document, and for the figures, cut out of their pages."
    answers: Annotated[Path | None, UNSET] = None
    "The file that keeps the answers (JSONL). The same command goes on from there."
    concurrency: Count = 8
    "Pages that wait for their answers at a time."
    max_tokens: Annotated[Count | None, UNSET] = None
    "The most tokens of an answer; by default as many as the server allows."
    timeout: Seconds = 3600.0
    "Seconds after which a page has failed."
