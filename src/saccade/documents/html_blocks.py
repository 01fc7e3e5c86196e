"""Converts HTML answers, with an element for each block of a page, to Markdown.

Tables stay HTML, since Markdown has no cells that span rows or columns.
"""

import html
import re
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from types import MappingProxyType
from typing import NamedTuple

LEFT_OUT = frozenset({"Page-Header", "Page-Footer"})
FIGURES = frozenset({"Image", "Figure"})
MARKS = MappingProxyType({"b": "**", "strong": "**", "i": "*", "em": "*", "del": "~~"})
INLINE_HTML = frozenset({"sup", "sub", "u", "small", "big"})
"""Elements that Markdown has no mark for; most viewers show them."""

BEGINNINGS: Mapping[str, str] = MappingProxyType(
    {f"h{level}": f"\n\n{'#' * level} " for level in range(1, 7)}
    | {"br": "<br>\n", "hr": "\n\n---\n\n"}
    | {tag: f"<{tag}>" for tag in INLINE_HTML}
    | MARKS
)
"""The Markdown at the start of an element, if it depends on nothing else."""

ENDS: Mapping[str, str] = MappingProxyType({tag: f"</{tag}>" for tag in INLINE_HTML} | MARKS)
"""The Markdown at the end of an element, if it depends on nothing else."""

_NUMBERS = re.compile(r"-?\d+(?:\.\d+)?")


class HtmlBlock(NamedTuple):
    """A block of a page. *box* is in the model's coordinates, or empty. *description* is for figures."""

    label: str
    box: tuple[float, ...]
    markdown: str
    description: str


def read_blocks(answer: str) -> list[HtmlBlock]:
    """Return the blocks of *answer*. If the answer was cut off, so is the last block."""
    parser = _BlockParser()
    # Python's parser raises for a marked section of a kind that it does not know.
    parser.feed(answer.replace("<![", "&lt;!["))
    parser.close()
    return parser.end()


class _BlockParser(HTMLParser):
    """Writes Markdown while it parses. Text outside blocks becomes a block without a box."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._blocks: list[HtmlBlock] = []
        self._label, self._box = "Text", ()  # type: tuple[str, tuple[float, ...]]
        self._pieces: list[str] = []
        self._description = ""
        self._num_divs = self._num_tables = 0
        self._lists: list[int | None] = []
        self._is_math = self._is_code = False
        self._closings: list[str] = []

    def end(self) -> list[HtmlBlock]:
        self._end_block()
        return self._blocks

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        if tag == "div" and not self._num_tables:
            if not self._num_divs:
                self._end_block()
                self._label = attributes.get("data-label", "Text")
                self._box = tuple(map(float, _NUMBERS.findall(attributes.get("data-bbox", ""))))
            self._num_divs += 1
        elif tag == "table" or self._num_tables:
            self._num_tables += tag == "table"
            self._pieces.append(_start_tag(tag, attributes, is_first=self._num_tables == 1 and tag == "table"))
        else:
            self._start(tag, attributes)

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        """Write the beginning of an element that is outside tables."""
        match tag:
            case _ if tag in BEGINNINGS:
                self._pieces.append(BEGINNINGS[tag])
            case "p":
                self._pieces.append("" if self._lists else "\n\n")
            case "ul" | "ol":
                self._lists.append(0 if tag == "ol" else None)
            case "li":
                self._pieces.append(self._bullet())
            case "math":
                self._closings.append("$$" if attributes.get("display") == "block" else "$")
                self._is_math = True
                self._pieces.append(self._closings[-1])
            case "pre":
                self._is_code = True
                self._pieces.append("\n\n```\n")
            case "code":
                self._pieces.append("" if self._is_code else "`")
            case "img":
                self._description = self._description or attributes.get("alt", "")
                if self._label not in FIGURES:
                    self._pieces.append(attributes.get("alt", ""))
            case "input":
                self._pieces.append("[x] " if "checked" in attributes else "[ ] ")

    def _bullet(self) -> str:
        depth = "  " * (len(self._lists) - 1)
        if not self._lists or self._lists[-1] is None:
            return f"\n{depth}- "
        number = self._lists[-1] = self._lists[-1] + 1
        return f"\n{depth}{number}. "

    def handle_endtag(self, tag: str) -> None:
        if self._num_tables:
            self._pieces.append(f"</{tag}>" + ("\n\n" if tag == "table" and self._num_tables == 1 else ""))
            self._num_tables -= tag == "table"
            return
        match tag:
            case "div":
                self._num_divs = max(0, self._num_divs - 1)
                if not self._num_divs:
                    self._end_block()
            case "h1" | "h2" | "h3" | "h4" | "h5" | "h6" | "p":
                self._pieces.append("" if self._lists else "\n\n")
            case "ul" | "ol":
                if self._lists:
                    self._lists.pop()
                self._pieces.append("" if self._lists else "\n\n")
            case "math":
                self._is_math = False
                self._pieces.append(self._closings.pop() if self._closings else "")
            case "pre":
                self._is_code = False
                self._pieces.append("\n```\n\n")
            case "code":
                self._pieces.append("" if self._is_code else "`")
            case _ if tag in ENDS:
                self._pieces.append(ENDS[tag])

    def handle_data(self, data: str) -> None:
        if self._num_tables:
            self._pieces.append(html.escape(data, quote=False))
        elif self._is_code or self._is_math:
            self._pieces.append(data)
        else:
            text = re.sub(r"\s+", " ", data).replace("$", r"\$")
            is_at_start = not self._pieces or self._pieces[-1].endswith(("\n", " "))
            self._pieces.append(text.lstrip() if is_at_start else text)

    def _end_block(self) -> None:
        lines = re.sub(r" +\n", "\n", "".join(self._pieces))
        markdown = re.sub(r"\n{3,}", "\n\n", lines).strip()
        if markdown or self._description or self._label in FIGURES:
            self._blocks.append(HtmlBlock(self._label, self._box, markdown, self._description))
        self._label, self._box, self._pieces, self._description = "Text", (), [], ""
        self._lists, self._num_divs, self._num_tables, self._is_math, self._is_code = [], 0, 0, False, False


def _start_tag(tag: str, attributes: dict[str, str], *, is_first: bool) -> str:
    cells = [(name, attributes.get(name, "")) for name in ("colspan", "rowspan")]
    spans = "".join(f' {name}="{number}"' for name, number in cells if number.isdigit())
    return f"{chr(10) * 2 if is_first else ''}<{tag}{spans}>"
