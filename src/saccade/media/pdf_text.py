"""Finds the letters on a PDF page that PDFium cannot draw, because neither the file nor another font has them."""

import ctypes
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pypdfium2_raw as pdfium

from saccade.media.pdf_fonts import Font
from saccade.media.pdf_survey import survey_font

BLANK_CATEGORIES = frozenset({"Zs", "Zl", "Zp", "Cc", "Cf"})
BLANK_LETTERS = frozenset("\u115f\u1160\u2800\u3164\uffa0")
"""Fillers of Hangul, and the pattern of Braille without dots."""

INVISIBLE = (pdfium.FPDF_TEXTRENDERMODE_INVISIBLE, pdfium.FPDF_TEXTRENDERMODE_CLIP)
MAX_NAME_BYTES = 128
LEAST_EXTENT = 0.01
SMALL_EXTENT = 0.5
"""Points; a letter that is wider and higher is drawn."""

LEAST_PART, LEAST_FONT_SIZE = 1 / 500, 1
"""A letter is drawn if its outline has more of its font's height; PDFium says 1/1000 of the font's size if not. Of
letters in smaller fonts, which a matrix enlarges, it says nothing."""

HIGH_HALVES, LOW_HALVES, FIRST_OF_PAIRS = range(0xD800, 0xDC00), range(0xDC00, 0xE000), 0x10000
"""Of letters beyond 16 bits in UTF-16."""

IN_LIGATURES, MAX_PARTS = frozenset("filst"), 3
MAX_DEPTH = 32
"""Forms within forms that are searched; PDFium draws fewer."""

UNSEEN = pdfium.FPDF_ANNOT_FLAG_HIDDEN | pdfium.FPDF_ANNOT_FLAG_NOVIEW


@dataclass
class Letters:
    """A page's letters, as code points, in one font that is not in the file.

    With *has_unnamed*, there are also codes whose letters are unknown.
    """

    drawn: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)
    has_unnamed: bool = False

    @property
    def is_unnamed(self) -> bool:
        """Whether there are codes, but no known letters. If some letters are known, unknown codes do not matter."""
        return self.has_unnamed and not self.drawn and not self.missing


@dataclass(frozen=True)
class PageText:
    """A page's visible letters whose fonts are not in the file, *by_font*.

    With *has_flat_text*, which is text without extent, letters may be missing from the list.
    """

    by_font: Mapping[str, Letters]
    has_flat_text: bool

    def completed(self, survey: "PageText") -> "PageText":
        """Return this text; add letters that are only in *survey*, as missing ones."""
        by_font = dict(self.by_font)
        for name, every in survey.by_font.items():
            # The fonts that PDFium makes for the values of fields are named after those that it gets.
            if name == survey_font().family:
                continue
            letters = by_font.get(name, Letters())
            missing = letters.missing | (every.drawn - letters.drawn)
            by_font[name] = Letters(letters.drawn, missing, letters.has_unnamed or every.has_unnamed)
        return replace(self, by_font=by_font)


def read_text(page: pdfium.FPDF_PAGE, fonts: Sequence[Font]) -> PageText:
    """Return the text of *page*, whose annotations are flattened. *fonts* are all that PDFium may have been given."""
    families = {font.family: font for font in fonts}
    by_font: dict[str, Letters] = {}
    substitutes: dict[int, tuple[str, Font | None]] = {}
    checked = set[tuple[int, int, bool]]()
    with _text(page) as text:
        reader = _Reader(text)
        for index in range(pdfium.FPDFText_CountChars(text)):
            item = pdfium.FPDFText_GetTextObject(text, index)
            if not item or pdfium.FPDFTextObj_GetTextRenderMode(item) in INVISIBLE:
                continue
            font = pdfium.FPDFTextObj_GetFont(item)
            place = ctypes.addressof(font.contents)
            letter, is_flat = reader.letter(index)
            if (place, letter, is_flat) in checked:
                continue
            checked.add((place, letter, is_flat))
            if pdfium.FPDFFont_GetIsEmbedded(font):
                continue
            if place not in substitutes:
                family = families.get(_name(pdfium.FPDFFont_GetFamilyName, font))
                substitutes[place] = _name(pdfium.FPDFFont_GetBaseFontName, font), family
            name, substitute = substitutes[place]
            letters = by_font.setdefault(name, Letters())
            if is_blank(letter):
                continue
            if pdfium.FPDFText_HasUnicodeMapError(text, index):
                letters.has_unnamed = True
                continue
            # The outline of a letter that a font lacks is often a box, so it says nothing of *substitute*.
            is_known = substitute is None or letter in substitute.letters
            is_drawn = is_known and not _is_lost(font, letter, is_flat)
            (letters.drawn if is_drawn else letters.missing).add(letter)
    num_objects = pdfium.FPDFPage_CountObjects(page)
    has_flat_text = any(_has_flat_text(pdfium.FPDFPage_GetObject(page, index)) for index in range(num_objects))
    return PageText(by_font, has_flat_text)


class _Reader:
    """Reads a page's letters. There may be very many, so all reads share the variables for their outlines."""

    def __init__(self, text: pdfium.FPDF_TEXTPAGE) -> None:
        self._text = text
        self._sides = tuple(ctypes.c_double() for _ in range(4))

    def letter(self, index: int) -> tuple[int, bool]:
        """Return a letter's code point, and whether it is flat, which means that its font does not draw it.

        For a flat part of a ligature, return the ligature.
        """
        letter, (left, right, bottom, top) = self._code(index), self._box(index)
        is_small = right - left < SMALL_EXTENT or top - bottom < SMALL_EXTENT
        if not is_small or is_blank(letter) or not self._is_flat(index, right - left, top - bottom):
            return letter, False
        if chr(letter) not in IN_LIGATURES:
            return letter, True
        # PDFium tells the parts of a ligature, all in its box.
        parts, box = [letter], (left, right, bottom, top)
        for step in (-1, 1):
            near = index + step
            while len(parts) < MAX_PARTS and self._box(near) == box:
                parts.insert(0 if step < 0 else len(parts), self._code(near))
                near += step
        return _ligatures().get("".join(map(chr, parts)), letter), True

    def _is_flat(self, index: int, width: float, height: float) -> bool:
        room = pdfium.FS_RECTF()
        pdfium.FPDFText_GetLooseCharBox(self._text, index, room)
        is_part = width <= (room.right - room.left) * LEAST_PART or height <= (room.top - room.bottom) * LEAST_PART
        return is_part and float(pdfium.FPDFText_GetFontSize(self._text, index)) >= LEAST_FONT_SIZE

    def _code(self, index: int) -> int:
        """Return a letter's code point. PDFium reports halves of surrogate pairs; either half gives the letter."""
        letter: int = pdfium.FPDFText_GetUnicode(self._text, index)
        if letter not in HIGH_HALVES and letter not in LOW_HALVES:
            return min(letter, sys.maxunicode)
        start = index - 1 if letter in LOW_HALVES and index else index
        high, low = (int(pdfium.FPDFText_GetUnicode(self._text, start + step)) for step in (0, 1))
        if high in HIGH_HALVES and low in LOW_HALVES:
            return FIRST_OF_PAIRS + ((high - HIGH_HALVES.start) << 10) + low - LOW_HALVES.start
        return letter

    def _box(self, index: int) -> tuple[float, float, float, float]:
        """Return the left, right, bottom and top of a letter's outline, or zeros if there is no such letter."""
        left, right, bottom, top = self._sides
        if index < 0 or not pdfium.FPDFText_GetCharBox(self._text, index, left, right, bottom, top):
            return 0, 0, 0, 0
        return left.value, right.value, bottom.value, top.value


@cache
def _ligatures() -> Mapping[str, int]:
    return {unicodedata.normalize("NFKC", chr(form)): form for form in range(0xFB00, 0xFB07)}


def _is_lost(font: pdfium.FPDF_FONT, letter: int, is_flat: bool) -> bool:
    """Whether PDFium does not draw *letter*.

    It draws some flat letters in yet another font, but none beyond 16 bits.
    """
    return (is_flat and letter >= FIRST_OF_PAIRS) or not _has_outline(font, letter)


def _has_outline(font: pdfium.FPDF_FONT, letter: int) -> bool:
    return any(pdfium.FPDFFont_GetGlyphPath(font, one, 1.0) for one in (letter, *_forms().get(letter, ())))


@cache
def _forms() -> Mapping[int, Sequence[int]]:
    """Return each letter's ligatures and joined forms. PDFium reports the letters, but finds glyphs by these forms."""
    forms: dict[int, list[int]] = {}
    for form in (*range(0xFB00, 0xFE00), *range(0xFE70, 0xFEFF)):
        for letter in unicodedata.normalize("NFKC", chr(form)):
            forms.setdefault(ord(letter), []).append(form)
    return forms


def _has_flat_text(item: pdfium.FPDF_PAGEOBJECT) -> bool:
    """Whether *item* is or contains visible text without extent in a font that is not in the file."""
    return any(
        _is_flat(text) and not pdfium.FPDFFont_GetIsEmbedded(pdfium.FPDFTextObj_GetFont(text)) for text in _texts(item)
    )


def _is_flat(text: pdfium.FPDF_PAGEOBJECT) -> bool:
    sides = tuple(ctypes.c_float() for _ in range(4))
    pdfium.FPDFPageObj_GetBounds(text, *sides)
    left, bottom, right, top = (side.value for side in sides)
    return right - left < LEAST_EXTENT or top - bottom < LEAST_EXTENT


def _texts(item: pdfium.FPDF_PAGEOBJECT, depth: int = 0) -> Iterator[pdfium.FPDF_PAGEOBJECT]:
    """Yield the visible texts that *item* is or contains."""
    kind = pdfium.FPDFPageObj_GetType(item)
    if kind == pdfium.FPDF_PAGEOBJ_FORM and depth < MAX_DEPTH:
        for index in range(pdfium.FPDFFormObj_CountObjects(item)):
            yield from _texts(pdfium.FPDFFormObj_GetObject(item, index), depth + 1)
    if kind == pdfium.FPDF_PAGEOBJ_TEXT and pdfium.FPDFTextObj_GetTextRenderMode(item) not in INVISIBLE:
        yield item


def letters_from(page: pdfium.FPDF_PAGE, first: int) -> tuple[set[int], set[int]]:
    """Return the code points of letters in *page*'s objects from number *first* on: those drawn, and the flat ones.

    Flat letters have no outline in their font, which may be in the file.
    """
    objects = (pdfium.FPDFPage_GetObject(page, index) for index in range(first, pdfium.FPDFPage_CountObjects(page)))
    texts = {ctypes.addressof(text.contents) for item in objects for text in _texts(item)}
    letters, flat = set[int](), set[int]()
    with _text(page) as text:
        reader = _Reader(text)
        for index in range(pdfium.FPDFText_CountChars(text)):
            item = pdfium.FPDFText_GetTextObject(text, index)
            if item and ctypes.addressof(item.contents) in texts:
                letter, is_flat = reader.letter(index)
                is_lost = is_flat and _is_lost(pdfium.FPDFTextObj_GetFont(item), letter, is_flat)
                (flat if is_lost else letters).add(letter)
    return letters, flat


def remove_unseen(page: pdfium.FPDF_PAGE) -> None:
    """Remove the hidden and no-view annotations on *page*."""
    for index in reversed(range(pdfium.FPDFPage_GetAnnotCount(page))):
        with annotation(page, index) as one:
            is_unseen = bool(pdfium.FPDFAnnot_GetFlags(one) & UNSEEN)
        if is_unseen:
            pdfium.FPDFPage_RemoveAnnot(page, index)


@contextmanager
def annotation(page: pdfium.FPDF_PAGE, index: int) -> Iterator[pdfium.FPDF_ANNOTATION]:
    annotation = pdfium.FPDFPage_GetAnnot(page, index)
    try:
        yield annotation
    finally:
        pdfium.FPDFPage_CloseAnnot(annotation)


def is_blank(letter: int) -> bool:
    return unicodedata.category(chr(letter)) in BLANK_CATEGORIES or chr(letter) in BLANK_LETTERS


@contextmanager
def _text(page: pdfium.FPDF_PAGE) -> Iterator[pdfium.FPDF_TEXTPAGE]:
    text = pdfium.FPDFText_LoadPage(page)
    try:
        yield text
    finally:
        pdfium.FPDFText_ClosePage(text)


def _name(read: Callable[[Any, Any, int], int], font: pdfium.FPDF_FONT) -> str:
    buffer = ctypes.create_string_buffer(MAX_NAME_BYTES)
    length = read(font, buffer, MAX_NAME_BYTES)
    return buffer.value.decode(errors="replace") if length <= MAX_NAME_BYTES else ""
