"""Turns a model's answer about a page into Markdown, blocks and figures."""

import re
from typing import NamedTuple

from saccade.documents.html_blocks import FIGURES, LEFT_OUT, read_blocks
from saccade.documents.page_text import Block, Box, Figure
from saccade.models.family import PageForm

_FENCE = re.compile(r"\s*```(?:markdown|md|html)?\n(.*?)\n?(?:```\s*)?", re.DOTALL)
_FRONT_MATTER = re.compile(r"\s*---\n.*?\n---(?:\n|$)", re.DOTALL)
_PLACED_FIGURE = re.compile(r"!\[(.*?)\]\(page_(\d{1,9})_(\d{1,9})_(\d{1,9})_(\d{1,9})\.png\)")
"""Left, top, width and height, in pixels of the image."""


class Reading(NamedTuple):
    """A page's text, with its blocks and figures."""

    markdown: str
    blocks: list[Block]
    figures: list[Figure]


class Sheet(NamedTuple):
    """The page that was read: its size in pixels, and the prefix of its figures' names."""

    width: int
    height: int
    name: str

    def clip(self, left: float, top: float, right: float, bottom: float) -> Box:
        """Return the box within the page, in whole pixels; nothing of it is left if it lies outside."""
        x0, x1 = sorted(round(min(max(0, x), self.width)) for x in (left, right))
        y0, y1 = sorted(round(min(max(0, y), self.height)) for y in (top, bottom))
        return x0, y0, x1, y1


def read_answer(answer: str, form: PageForm, sheet: Sheet) -> Reading:
    """Read *answer*, which is about *sheet* and in the markup of *form*."""
    if fence := _FENCE.fullmatch(answer):
        answer = fence[1]
    match form.markup:
        case "front_matter":
            return _read_figures(_FRONT_MATTER.sub("", answer, count=1).strip(), sheet)
        case "html_blocks":
            return _read_html(answer, form.box_scale, sheet)
    return Reading(answer.strip(), [], [])


def _read_figures(markdown: str, sheet: Sheet) -> Reading:
    """Return *markdown* with a file for each figure whose place it names."""
    blocks: list[Block] = []
    figures: list[Figure] = []

    def named(match: re.Match[str]) -> str:
        left, top, width, height = map(int, match.groups()[1:])
        box = sheet.clip(left, top, left + width, top + height)
        if _is_empty(box):
            return match[1]
        figure = _figure(sheet, box, figures)
        blocks.append(Block("Figure", figure.box, _figure_markdown(match[1], figure)))
        return blocks[-1].markdown

    return Reading(_PLACED_FIGURE.sub(named, markdown), blocks, figures)


def _read_html(answer: str, scale: int | None, sheet: Sheet) -> Reading:
    across, down = (1.0, 1.0) if scale is None else (sheet.width / scale, sheet.height / scale)
    blocks: list[Block] = []
    figures: list[Figure] = []
    texts: list[str] = []
    for label, place, markdown, description in read_blocks(answer):
        box = None
        if len(place) == 4:
            left, top, right, bottom = place
            box = sheet.clip(left * across, top * down, right * across, bottom * down)
        if label in FIGURES:
            if box is not None and not _is_empty(box):
                description = _figure_markdown(description, _figure(sheet, box, figures))
            markdown = "\n\n".join(filter(None, (description, markdown)))
        blocks.append(Block(label, box, markdown))
        if label not in LEFT_OUT:
            texts.append(markdown)
    return Reading("\n\n".join(filter(None, texts)), blocks, figures)


def _is_empty(box: Box) -> bool:
    left, top, right, bottom = box
    return left == right or top == bottom


def _figure(sheet: Sheet, box: Box, figures: list[Figure]) -> Figure:
    """Return the next figure, which is added to *figures*."""
    figures.append(Figure(f"{sheet.name}-{len(figures) + 1}.png", box))
    return figures[-1]


def _figure_markdown(description: str, figure: Figure) -> str:
    words = " ".join(description.replace("[", "(").replace("]", ")").split())
    return f"![{words}]({figure.name})"
