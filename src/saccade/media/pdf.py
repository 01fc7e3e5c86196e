"""Render pages of PDFs, from memory alone. In decode processes: PDFium by its C functions, with one thread.

This build of PDFium runs no JavaScript, and fetches and opens nothing. A page is drawn with the fields of its form as a
viewer draws them (ISO 32000-1, 12.7), but no action of the document or a field runs: no FORM_Do function is called, and
the form's environment has no callbacks. It gets no folder of fonts either: text whose
font the file lacks is drawn with PDFium's own fonts, so that a page looks the same on every machine.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pypdfium2_raw as pdfium

from saccade.errors import ImageTooLarge, InvalidImage
from saccade.media import rgbx
from saccade.media.pdf_pages import PdfLimits, PdfPage

POINTS_PER_INCH = 72
WHITE = 0xFFFFFFFF
LARGEST_SIDE = 1 << 24
"""Pixels; a side above it is over every limit."""


def start() -> None:
    """Start PDFium, once in a process that forks."""
    no_folders = (ctypes.POINTER(ctypes.c_char) * 1)()
    config = pdfium.FPDF_LIBRARY_CONFIG(version=2, m_pUserFontPaths=no_folders)
    pdfium.FPDF_InitLibraryWithConfig(config)


def read_pages(encoded: bytes, limits: PdfLimits) -> list[PdfPage]:
    """Return the pages of an encoded PDF; none is drawn. Raises InvalidImage, ImageTooLarge and TooManyImages."""
    limits.check_bytes(len(encoded))
    with _opened(encoded) as document:
        if pdfium.FPDF_GetFormType(document) == pdfium.FORMTYPE_XFA_FULL:
            raise InvalidImage(
                "The PDF is a dynamic XFA form: a viewer makes its pages, which are not in the file. Print it to a new "
                "PDF, and send that."
            )
        num_pages = pdfium.FPDF_GetPageCount(document)
        limits.check_count(num_pages)
        pages = [PdfPage(number, *_size(document, number, limits.dots_per_inch)) for number in range(num_pages)]
    limits.check(pages)
    return pages


def render(encoded: bytes, page: PdfPage) -> npt.NDArray[np.uint8]:
    """Return *page* on white, with its annotations and fields, as RGB [height, width, 3], uint8.

    Raises InvalidImage and ImageTooLarge.
    """
    with _opened(encoded) as document, _form(document) as form, _loaded(document, page.number) as loaded:
        # Makes the appearances that fields lack; FPDF_RenderPageBitmap makes all of them again if the form asks for it.
        pdfium.FORM_OnAfterLoadPage(loaded, form)
        memory = rgbx.empty(page.height, page.width)
        bitmap = pdfium.FPDFBitmap_CreateEx(
            page.width, page.height, pdfium.FPDFBitmap_BGRx, memory.ctypes.data, memory.strides[0]
        )
        if not bitmap:
            raise ImageTooLarge(f"Page {page.number + 1} of the PDF takes more memory than one may use.")
        pdfium.FPDFBitmap_FillRect(bitmap, 0, 0, page.width, page.height, WHITE)
        flags = pdfium.FPDF_ANNOT | pdfium.FPDF_REVERSE_BYTE_ORDER
        pdfium.FPDF_RenderPageBitmap(bitmap, loaded, 0, 0, page.width, page.height, 0, flags)
        pdfium.FPDF_FFLDraw(form, bitmap, loaded, 0, 0, page.width, page.height, 0, flags)
        pdfium.FPDFBitmap_Destroy(bitmap)
    return memory[..., : rgbx.CHANNELS]


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
    """Return width and height of a page in pixels, as it is turned; 0 for a damaged one."""
    size = pdfium.FS_SIZEF()
    if not pdfium.FPDF_GetPageSizeByIndexF(document, number, size):
        return 0, 0
    scale = dots_per_inch / POINTS_PER_INCH
    return _pixels(size.width * scale), _pixels(size.height * scale)


def _pixels(length: float) -> int:
    return max(1, round(min(length, LARGEST_SIDE))) if length > 0 else 0
