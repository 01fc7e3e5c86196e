"""A page as text, which is what readers of documents yield."""

from collections.abc import Sequence

import msgspec

Box = tuple[int, int, int, int]
"""Left, top, right and bottom, in pixels of the page."""


class Block(msgspec.Struct, frozen=True):
    """A part of a page, as the model names it: *label* such as "Table", its place, and its text as Markdown."""

    label: str
    box: Box | None
    markdown: str


class Figure(msgspec.Struct, frozen=True):
    """A figure: its place on the page, and the name of the file that the page's *markdown* shows for it."""

    name: str
    box: Box


class PageText(msgspec.Struct, frozen=True):
    """The text of page *page*, from 1, of *file*; 0 stands for a file that cannot be opened.

    *width* and *height* are the size, in pixels, of the page that the model got. *fault* says what is wrong. In that
    case, *markdown* is empty or has only a part of the page.
    """

    file: str
    page: int
    width: int = 0
    height: int = 0
    markdown: str = ""
    blocks: Sequence[Block] = ()
    figures: Sequence[Figure] = ()
    fault: str = ""

    def _repr_markdown_(self) -> str:
        """Return what a notebook shows."""
        return f"**{self.file}, page {self.page}: {self.fault}**\n\n{self.markdown}" if self.fault else self.markdown
