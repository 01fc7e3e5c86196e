"""The gateway's side of PDFs, without a renderer: how to recognise a PDF, its limits, and its pages as images.

A PDF can be as hostile as an image, and only a C library reads it. So media.pdf reads it in decode processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

import msgspec

from saccade.errors import (
    ImageTooLarge,
    InvalidImage,
    RequestError,
    SaccadeError,
    TooManyImages,
    UnsupportedImageFormat,
)
from saccade.media.header import ACCEPTED, SIGNATURE_BYTES, ImageHeader, ImageLimits, other_format, read_header

DECODER = f"pypdfium2-{version('pypdfium2')}-forms-2"
"""The renderer's name and version, and what it draws of a page: part of every page's identity."""

BYTES_PER_PIXEL = 16
"""Memory for a pixel of a page: 4 of the page, and up to 12 of the resized data, as for other images."""


def read_image_header(encoded: bytes, source: str) -> ImageHeader | None:
    """Return the header of the image *encoded*, or None if it is a PDF.

    *source* is its URL or filename. Raises InvalidImage and UnsupportedImageFormat. If the bytes are neither, but
    *source* names a PDF, the message says that the file is not one.
    """
    if other_format(encoded) == "PDF":
        return None
    try:
        return read_header(encoded)
    except RequestError as error:
        if _is_called_pdf(source) and (isinstance(error, UnsupportedImageFormat) or not encoded):
            raise _not_a_pdf(encoded) from None
        raise


def _is_called_pdf(source: str) -> bool:
    if source[:5].lower() == "data:":
        return source[5:22].lower().startswith(("application/pdf", "application/x-pdf"))
    path = source.partition("#")[0].partition("?")[0]
    return path[-4:].lower() == ".pdf"


def _not_a_pdf(encoded: bytes) -> InvalidImage:
    if not encoded:
        return InvalidImage("The PDF has no bytes.")
    name = other_format(encoded)
    reason = f"it looks like {name}" if name else f"`%PDF-` is not among its first {SIGNATURE_BYTES} bytes"
    return InvalidImage(f"The file was sent as a PDF, but {reason}; send a PDF, or {ACCEPTED}.")


class PdfPage(msgspec.Struct, frozen=True, array_like=True):
    """Page *number* of a PDF, from 0, and its size in pixels."""

    number: int
    width: int
    height: int


@dataclass(frozen=True)
class PdfLimits:
    """A PDF's limits. *image* limits the pixels of each page, drawn at *dots_per_inch*, and the bytes of the file.

    With *takes_any_page*, a page over the limits does not stand for the file, nor a damaged one, whose sides are 0.
    """

    image: ImageLimits
    max_pages: int = 20
    dots_per_inch: int = 144
    takes_any_page: bool = False

    def check_bytes(self, num_bytes: int) -> None:
        """Raise ImageTooLarge if a file of *num_bytes* is over the limit."""
        if num_bytes > self.image.max_encoded_bytes:
            raise ImageTooLarge(f"The PDF has {num_bytes} bytes; at most {self.image.max_encoded_bytes} are accepted.")

    def check_count(self, num_pages: int) -> None:
        """Raise TooManyImages for too many pages, and InvalidImage for none."""
        if num_pages < 1:
            raise InvalidImage("The PDF has no pages.")
        if num_pages > self.max_pages:
            raise TooManyImages(
                f"The PDF has {num_pages} pages; at most {self.max_pages} are served (--max-pdf-pages). Send fewer."
            )

    def check_pages(self, pages: Sequence[PdfPage]) -> None:
        """Raise ImageTooLarge for a page over a limit, InvalidImage for a damaged one, and check_count()'s errors."""
        self.check_count(len(pages))
        for number, page in enumerate(pages):
            is_damaged = min(page.width, page.height) < 1
            if page.number != number or (is_damaged and not self.takes_any_page):
                raise InvalidImage(f"Page {number + 1} of the PDF is damaged: it has no size.")
            if self.takes_any_page:
                continue
            try:
                self.image.check_header(ImageHeader("PDF", page.width, page.height), 0)
            except SaccadeError as error:
                size = f"at {self.dots_per_inch} dots per inch (--pdf-dpi)"
                raise ImageTooLarge(f"Page {number + 1} of the PDF is too large {size}. {error.message}") from None
