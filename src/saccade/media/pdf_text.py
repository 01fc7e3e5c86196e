"""Letters of a page of a PDF that PDFium cannot draw: their font is not in the file, and no other font has them."""

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
MAX_DEPTH = 32
"""Forms within forms that are searched; PDFium draws fewer."""

UNSEEN = pdfium.FPDF_ANNOT_FLAG_HIDDEN | pdfium.FPDF_ANNOT_FLAG_NOVIEW


@dataclass
class Letters:
    """Letters in one font that is not in the file, by code points; if *has_unnamed*, some have numbers only."""

    drawn: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)
    has_unnamed: bool = False

    @property
    def is_unnamed(self) -> bool:
        """Whether nothing says what the letters are. Codes without a letter in an encoding mean nothing."""
        return self.has_unnamed and not self.drawn and not self.missing


@dataclass(frozen=True)
class PageText:
    """The visible letters of a page *by_font* of the fonts that are not in the file.

    If it *has_flat_text*, without extent, some letters are left out.
    """

    by_font: Mapping[str, Letters]
    has_flat_text: bool

    def completed(self, survey: "PageText") -> "PageText":
        """Return the text with those letters as missing that only the *survey* shows."""
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
    """Return the text of *page*, whose annotations are flattened."""
    families = {font.family: font for font in fonts}
    by_font: dict[str, Letters] = {}
    checked = set[tuple[int, int]]()
    with _text(page) as text:
        for index in range(pdfium.FPDFText_CountChars(text)):
            item = pdfium.FPDFText_GetTextObject(text, index)
            if not item or pdfium.FPDFTextObj_GetTextRenderMode(item) in INVISIBLE:
                continue
            font = pdfium.FPDFTextObj_GetFont(item)
            letter = min(pdfium.FPDFText_GetUnicode(text, index), sys.maxunicode)
            key = ctypes.addressof(font.contents), letter
            if key in checked:
                continue
            checked.add(key)
            if not pdfium.FPDFFont_GetIsEmbedded(font):
                letters = by_font.setdefault(_name(pdfium.FPDFFont_GetBaseFontName, font), Letters())
                if is_blank(letter):
                    continue
                if pdfium.FPDFText_HasUnicodeMapError(text, index):
                    letters.has_unnamed = True
                    continue
                substitute = families.get(_name(pdfium.FPDFFont_GetFamilyName, font))
                # The outline of a letter that a font lacks is often a box, so it says nothing of *substitute*.
                is_drawn = _has_outline(font, letter) and (substitute is None or letter in substitute.letters)
                (letters.drawn if is_drawn else letters.missing).add(letter)
    num_objects = pdfium.FPDFPage_CountObjects(page)
    has_flat_text = any(_has_flat_text(pdfium.FPDFPage_GetObject(page, index)) for index in range(num_objects))
    return PageText(by_font, has_flat_text)


def _has_outline(font: pdfium.FPDF_FONT, letter: int) -> bool:
    return any(pdfium.FPDFFont_GetGlyphPath(font, one, 1.0) for one in (letter, *_forms().get(letter, ())))


@cache
def _forms() -> Mapping[int, Sequence[int]]:
    """Return the ligatures and joined forms of letters: PDFium tells the letters, and finds glyphs by the forms."""
    forms: dict[int, list[int]] = {}
    for form in (*range(0xFB00, 0xFE00), *range(0xFE70, 0xFEFF)):
        for letter in unicodedata.normalize("NFKC", chr(form)):
            forms.setdefault(ord(letter), []).append(form)
    return forms


def _has_flat_text(item: pdfium.FPDF_PAGEOBJECT) -> bool:
    """Whether *item* is or contains a visible text without extent in a font that is not in the file."""
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


def letters_from(page: pdfium.FPDF_PAGE, first: int) -> frozenset[int]:
    """Return the letters, by code points, in the texts of the objects of *page* from number *first* on."""
    objects = (pdfium.FPDFPage_GetObject(page, index) for index in range(first, pdfium.FPDFPage_CountObjects(page)))
    texts = {ctypes.addressof(text.contents) for item in objects for text in _texts(item)}
    letters = set[int]()
    with _text(page) as text:
        for index in range(pdfium.FPDFText_CountChars(text)):
            item = pdfium.FPDFText_GetTextObject(text, index)
            if item and ctypes.addressof(item.contents) in texts:
                letters.add(pdfium.FPDFText_GetUnicode(text, index))
    return frozenset(letters)


def remove_unseen(page: pdfium.FPDF_PAGE) -> None:
    """Remove the annotations of *page* that are not visible."""
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
