"""Gives PDFium fonts for text whose font is not in the file: from memory, never from the machine.

At first PDFium gets none, and draws with its own fonts, which have Latin letters and symbols. A page with other letters
is drawn again with fonts that have those.
"""

import ctypes
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import pypdfium2_raw as pdfium

from saccade.media.pdf_fonts import COLLECTION, Font, covering
from saccade.media.pdf_survey import survey_font
from saccade.media.pdf_text import Letters

VALUES = ""
"""The name by which PDFium asks for a font for the value of a field."""

COLLECTION_TAG = int.from_bytes(COLLECTION, "big")
WHOLE_FONT = 0
LATIN_CHARSETS = (pdfium.FXFONT_ANSI_CHARSET, pdfium.FXFONT_DEFAULT_CHARSET)
SUBSET = re.compile(r"^[A-Z]{6}\+")
ALIASES = ((re.compile(r"^(arial|helvetica).*"), "helvetica"), (re.compile(r"^times.*"), "times"))
"""PDFium asks for standard fonts by these names, whatever a file calls them."""

CALLBACKS = dict(pdfium.FPDF_SYSFONTINFO._fields_)


@dataclass
class PageFonts:
    """The fonts that PDFium gets on one page.

    - fonts: none at first; a survey uses one.
    - needed: by a font's plain name, the letters that its substitute must have; none if PDFium's own font has all.
    """

    fonts: Sequence[Font] = ()
    needed: Mapping[str, Set[int]] = field(default_factory=dict)
    is_survey: bool = False
    num_requests: int = 0
    offered: dict[str, Font] = field(default_factory=dict)

    def choose(self, charset: int, family: str) -> Font | None:
        """Return the font for text of *charset* in the font *family*; None for PDFium's own."""
        self.num_requests += 1
        if charset == pdfium.FXFONT_SYMBOL_CHARSET:
            return None
        if self.is_survey:
            return self.fonts[0]
        name = plain_name(family)
        if charset in LATIN_CHARSETS:
            return self.offered.get(name) or self._covering(name)
        fitting = [font for font in self.fonts if charset in font.charsets]
        font = covering([*fitting, *self.fonts], self.needed.get(name, ())) or next(iter(fitting), None)
        if font is not None:
            # For the value of a field PDFium makes a font of this name, and asks for that.
            self.offered[plain_name(font.family)] = font
        return font

    def _covering(self, name: str) -> Font | None:
        every = set[int]().union(*self.needed.values())
        letters = self.needed.get(name, every)
        return (covering(self.fonts, every) or covering(self.fonts, letters)) if letters else None


class Substitutes:
    """Answers PDFium's font requests with the fonts that *page* chooses. It must live as long as PDFium is in use."""

    def __init__(self, fonts: Sequence[Font]) -> None:
        self.fonts = tuple(fonts)
        self.every = (*fonts, survey_font())
        self.page = PageFonts()
        self._info = pdfium.FPDF_SYSFONTINFO(
            version=1,
            MapFont=CALLBACKS["MapFont"](self._map_font),
            GetFontData=CALLBACKS["GetFontData"](self._copy),
            GetFaceName=CALLBACKS["GetFaceName"](self._copy_name),
        )
        pdfium.FPDF_SetSystemFontInfo(self._info)

    def _map_font(
        self, _: object, weight: int, is_italic: int, charset: int, pitch: int, family: object, is_exact: object
    ) -> int | None:
        """Return the number, from 1, of the font that *page* chooses; None for PDFium's own."""
        name = ctypes.string_at(family).decode(errors="replace")  # type: ignore[arg-type]
        font = self.page.choose(charset, name)
        return None if font is None else self.every.index(font) + 1

    def _copy(self, _: object, number: int, table: int, buffer: object, num_bytes: int) -> int:
        """Copy a font to *buffer*, unless that is null. Return the font's length in bytes, or 0 for single tables."""
        font = self.every[number - 1]
        if table not in (COLLECTION_TAG, WHOLE_FONT):
            return 0
        # PDFium takes the difference of both lengths for the place of the face in the collection.
        start = font.offset if table == WHOLE_FONT else 0
        if buffer:
            ctypes.memmove(buffer, font.data[start : start + num_bytes], min(num_bytes, len(font.data) - start))  # type: ignore[arg-type]
        return len(font.data) - start

    def _copy_name(self, _: object, number: int, buffer: object, num_bytes: int) -> int:
        name = self.every[number - 1].family.encode() + b"\0"
        if buffer and len(name) <= num_bytes:
            ctypes.memmove(buffer, name, len(name))  # type: ignore[arg-type]
        return len(name)


def plain_name(name: str) -> str:
    """Return a font's *name* in lower case, without subset mark, style and blanks. Standard fonts get their alias."""
    plain = re.split(r"[,-]", SUBSET.sub("", name).replace(" ", ""), maxsplit=1)[0].lower()
    return next((alias for pattern, alias in ALIASES if pattern.match(plain)), plain)


def needed_letters(by_font: Mapping[str, Letters], lost: Set[int]) -> dict[str, Set[int]]:
    """Return the letters that substitutes must have, by plain name.

    For a font in *by_font* with missing letters, these are all of its letters; for values of fields, the *lost* ones.
    """
    needed: dict[str, Set[int]] = {VALUES: lost}
    for name, letters in by_font.items():
        more = letters.drawn | letters.missing if letters.missing else set[int]()
        needed[plain_name(name)] = needed.get(plain_name(name), set()) | more
    return needed
