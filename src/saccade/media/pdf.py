"""Renders PDF pages from memory alone. Runs in decode processes, with PDFium's C functions and one thread.

This build of PDFium runs no JavaScript, and fetches and opens nothing. A page shows its form fields as a viewer draws
them (ISO 32000-1, 12.7), but no action of the document or of a field runs. No FORM_Do function is called, and the
form's environment has no callbacks. PDFium gets no font folder. Text whose font is not in the file is drawn with
PDFium's own fonts or those of saccade.media.pdf_fonts. So a page looks the same on every machine.
"""

import ctypes
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pypdfium2_raw as pdfium

from saccade.errors import ImageTooLarge, InvalidImage
from saccade.media import rgbx
from saccade.media.pdf_fields import (
    Value,
    appearances,
    complete_fields,
    complete_states,
    keep_values,
    lost_letters,
    values_drawn_anew,
)
from saccade.media.pdf_fonts import Font
from saccade.media.pdf_pages import PdfLimits, PdfPage
from saccade.media.pdf_substitutes import PageFonts, Substitutes, needed_letters, plain_name
from saccade.media.pdf_survey import survey_font
from saccade.media.pdf_text import PageText, read_text, remove_unseen

POINTS_PER_INCH = 72
WHITE = 0xFFFFFFFF
ADVICE = (
    "Send a copy with all fonts and flattened fields, or ask the operator of this server for fonts: the extra `fonts` "
    "or --pdf-font-folder."
)
MADE_BY_PDFIUM = "Chrom"
"""The names of PDFium's own fonts, which it gives to those of values, begin so."""

MAX_SHOWN_LETTERS = 3
NO_TEXT = PageText({}, has_flat_text=False)
LARGEST_SIDE = 1 << 24
"""Pixels; a side above it is over every limit."""


class Renderer:
    """Runs PDFium, with *fonts* for text whose own font is not in the file. A process can have only one Renderer."""

    def __init__(self, fonts: Sequence[Font] = ()) -> None:
        no_folders = (ctypes.POINTER(ctypes.c_char) * 1)()
        config = pdfium.FPDF_LIBRARY_CONFIG(version=2, m_pUserFontPaths=no_folders)
        pdfium.FPDF_InitLibraryWithConfig(config)
        self._substitutes = Substitutes(fonts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop PDFium."""
        pdfium.FPDF_DestroyLibrary()

    def read_pages(self, encoded: bytes, limits: PdfLimits) -> list[PdfPage]:
        """Return the pages of an encoded PDF without drawing them.

        Raises InvalidImage, ImageTooLarge and TooManyImages.
        """
        limits.check_bytes(len(encoded))
        with _opened(encoded) as document:
            if pdfium.FPDF_GetFormType(document) == pdfium.FORMTYPE_XFA_FULL:
                raise InvalidImage(
                    "The PDF is a dynamic XFA form: a viewer makes its pages, which are not in the file. Print it to a "
                    "new PDF, and send that."
                )
            num_pages = pdfium.FPDF_GetPageCount(document)
            limits.check_count(num_pages)
            pages = [PdfPage(number, *_size(document, number, limits.dots_per_inch)) for number in range(num_pages)]
        limits.check_pages(pages)
        return pages

    def render(self, encoded: bytes, page: PdfPage, *, allows_gaps: bool = False) -> "Drawing":
        """Return *page* on white, with its annotations and fields. Raises InvalidImage and ImageTooLarge.

        If some of the page's letters are in no font, the page is refused. If the operator *allows_gaps*, it is drawn
        without them.
        """
        image, text, lost = self._draw(encoded, page, PageFonts())
        survey = NO_TEXT
        if text.has_flat_text:
            survey = self._draw(encoded, PdfPage(page.number, 1, 1), PageFonts([survey_font()], is_survey=True))[1]
        reason, needed = self._gap(text, survey, lost)
        if reason and self._substitutes.fonts:
            image, text, lost = self._draw(encoded, page, PageFonts(self._substitutes.fonts, needed))
            reason, _ = self._gap(text, survey, lost)
        if reason and not allows_gaps:
            raise InvalidImage(f"Page {page.number + 1} of the PDF cannot be drawn: {reason}")
        return Drawing(image[..., : rgbx.CHANNELS], is_whole=not reason)

    def _draw(
        self, encoded: bytes, page: PdfPage, fonts: PageFonts
    ) -> tuple[npt.NDArray[np.uint8], PageText, Set[int]]:
        """Return the page's pixels, its text, and the letters of field values that it lacks."""
        self._substitutes.page = fonts
        with _opened(encoded) as document, _form(document) as form:
            with _loaded(document, page.number) as loaded:
                before = appearances(loaded)
                complete_fields(loaded, form)
                pdfium.FORM_OnAfterLoadPage(loaded, form)
                complete_states(loaded, form)
                image = _drawn(loaded, form, page)
                values = values_drawn_anew(loaded, form, before)
                pdfium.FORM_OnBeforeClosePage(loaded, form)
                if not fonts.num_requests and not values:
                    return image, NO_TEXT, frozenset()
                remove_unseen(loaded)
                pdfium.FPDFPage_Flatten(loaded, pdfium.FLAT_NORMALDISPLAY)
            with _loaded(document, page.number) as loaded:
                text = read_text(loaded, self._substitutes.every)
        return image, text, _lost(encoded, page.number, values) if values else frozenset()

    def _gap(self, text: PageText, survey: PageText, lost: Set[int]) -> tuple[str, Mapping[str, Set[int]]]:
        """Return a sentence on what a page lacks, or "" if nothing, and the letters that each font must have."""
        by_font = text.completed(survey).by_font if text.has_flat_text else text.by_font
        reason = (
            f"the fonts of this server do not draw {_some(lost)} in a field or a free text. {ADVICE}" if lost else ""
        )
        for name, letters in by_font.items():
            if letters.is_unnamed:
                reason = f"{self._font(name)} is not in the file, nor what its letters are. {ADVICE}"
            elif letters.missing:
                missing = f"no font of this server draws {_some(letters.missing)}"
                reason = f"{self._font(name)} is not in the file, and {missing}. {ADVICE}"
        return reason, needed_letters(by_font, lost)

    def _font(self, name: str) -> str:
        of_values = {plain_name(font.family) for font in self._substitutes.fonts}
        if name.startswith(MADE_BY_PDFIUM) or plain_name(name) in of_values:
            return "the font of a field's value"
        return f"the font {''.join(one if one.isprintable() else '?' for one in name) or 'without a name'}"


class Drawing(NamedTuple):
    """A page as RGB, uint8 [height, width, 3]. It *is_whole* unless it lacks letters that are in no font."""

    image: npt.NDArray[np.uint8]
    is_whole: bool


def _some(letters: Set[int]) -> str:
    first = ", ".join(f"U+{letter:04X}" for letter in sorted(letters)[:MAX_SHOWN_LETTERS])
    sample = f"({first}{', ...' if len(letters) > MAX_SHOWN_LETTERS else ''})"
    return f"{len(letters)} letter{'s' if len(letters) > 1 else ''} {sample}"


def _lost(encoded: bytes, number: int, values: Sequence[Value]) -> Set[int]:
    """Return the letters of *values* on page *number* that PDFium does not write, even if they would not be visible."""
    with _opened(encoded) as document, _form(document) as form:
        with _loaded(document, number) as loaded:
            first = pdfium.FPDFPage_CountObjects(loaded)
            complete_fields(loaded, form)
            keep_values(loaded, values)
            pdfium.FORM_OnAfterLoadPage(loaded, form)
            pdfium.FORM_OnBeforeClosePage(loaded, form)
            pdfium.FPDFPage_Flatten(loaded, pdfium.FLAT_NORMALDISPLAY)
        with _loaded(document, number) as loaded:
            return lost_letters(values, loaded, first)


def _drawn(loaded: pdfium.FPDF_PAGE, form: pdfium.FPDF_FORMHANDLE, page: PdfPage) -> npt.NDArray[np.uint8]:
    memory = rgbx.empty(page.height, page.width)
    bitmap = pdfium.FPDFBitmap_CreateEx(
        page.width, page.height, pdfium.FPDFBitmap_BGRx, memory.ctypes.data, memory.strides[0]
    )
    if not bitmap:
        raise ImageTooLarge(f"Page {page.number + 1} of the PDF takes more memory than one may use.")
    pdfium.FPDFBitmap_FillRect(bitmap, 0, 0, page.width, page.height, WHITE)
    flags = pdfium.FPDF_ANNOT | pdfium.FPDF_REVERSE_BYTE_ORDER
    # Fields that lack an appearance have got one when the page was loaded; here all get a new one if the form asks.
    pdfium.FPDF_RenderPageBitmap(bitmap, loaded, 0, 0, page.width, page.height, 0, flags)
    pdfium.FPDF_FFLDraw(form, bitmap, loaded, 0, 0, page.width, page.height, 0, flags)
    pdfium.FPDFBitmap_Destroy(bitmap)
    return memory


@contextmanager
def _opened(encoded: bytes) -> Iterator[pdfium.FPDF_DOCUMENT]:
    document = pdfium.FPDF_LoadMemDocument64(encoded, len(encoded), None)
    if not document:
        if pdfium.FPDF_GetLastError() in (pdfium.FPDF_ERR_PASSWORD, pdfium.FPDF_ERR_SECURITY):
            raise InvalidImage("The PDF is encrypted; send a copy without a password.")
        raise InvalidImage("The PDF is damaged or truncated: it could not be read.")
    try:
        yield document
    finally:
        pdfium.FPDF_CloseDocument(document)


@contextmanager
def _form(document: pdfium.FPDF_DOCUMENT) -> Iterator[pdfium.FPDF_FORMHANDLE]:
    # PDFium keeps a pointer to it, so it lives as long as the form. It has no callbacks.
    callbacks = pdfium.FPDF_FORMFILLINFO(version=2)
    form = pdfium.FPDFDOC_InitFormFillEnvironment(document, callbacks)
    if not form:
        raise InvalidImage("The form of the PDF is damaged.")
    try:
        yield form
    finally:
        pdfium.FPDFDOC_ExitFormFillEnvironment(form)
        del callbacks


@contextmanager
def _loaded(document: pdfium.FPDF_DOCUMENT, number: int) -> Iterator[pdfium.FPDF_PAGE]:
    page = pdfium.FPDF_LoadPage(document, number)
    if not page:
        raise InvalidImage(f"Page {number + 1} of the PDF is damaged.")
    try:
        yield page
    finally:
        pdfium.FPDF_ClosePage(page)


def _size(document: pdfium.FPDF_DOCUMENT, number: int, dots_per_inch: int) -> tuple[int, int]:
    """Return the width and height of a page in pixels after its rotation; 0 for a damaged page."""
    size = pdfium.FS_SIZEF()
    if not pdfium.FPDF_GetPageSizeByIndexF(document, number, size):
        return 0, 0
    scale = dots_per_inch / POINTS_PER_INCH
    return _pixels(size.width * scale), _pixels(size.height * scale)


def _pixels(length: float) -> int:
    return max(1, round(min(length, LARGEST_SIDE))) if length > 0 else 0
