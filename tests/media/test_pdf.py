"""Pages of PDFs: their sizes, their pixels, and what is refused before any is drawn."""

import numpy as np
import pdfs
import pytest
from drawn_pdfs import LIMITS, drawn, pages
from tables import table

from saccade.errors import InvalidImage, RequestError
from saccade.media.header import ImageLimits
from saccade.media.pdf import Renderer
from saccade.media.pdf_pages import PdfLimits, PdfPage


def test_pages_have_the_size_of_their_box_as_it_is_turned() -> None:
    assert pages(pdfs.pdf(b"", b"")) == [PdfPage(0, 400, 200), PdfPage(1, 400, 200)]
    assert pages(pdfs.pdf(b"", page=b"/Rotate 90")) == [PdfPage(0, 200, 400)]
    cropped = pdfs.pdf(b"", page=b"/CropBox[0 0 50 72.3]")
    assert pages(cropped, PdfLimits(ImageLimits(), dots_per_inch=72)) == [PdfPage(0, 50, 72)]


def test_page_is_drawn_upright_in_red_green_blue_on_white() -> None:
    image = drawn(pdfs.pdf(pdfs.TEXT, pdfs.SQUARE), 1)
    assert (image.shape, image.dtype) == ((200, 400, 3), np.uint8)
    assert (image[60, 60].tolist(), image[60, 300].tolist()) == ([255, 0, 0], [255, 255, 255])
    assert image[190, 60].tolist() == [255, 255, 255]
    turned = drawn(pdfs.pdf(pdfs.SQUARE, page=b"/Rotate 90"))
    assert (turned[60, 60].tolist(), turned[300, 60].tolist()) == ([255, 0, 0], [255, 255, 255])


def test_text_without_a_font_is_drawn() -> None:
    dark = (drawn(pdfs.pdf(pdfs.TEXT)) < 128).any(axis=2)
    assert 500 < dark.sum() < 5000


@table("name", pdfs.HARMLESS)
def test_nothing_else_in_a_pdf_changes_its_page(name: str) -> None:
    assert np.array_equal(drawn(pdfs.HARMLESS[name]), drawn(pdfs.pdf(pdfs.TEXT)))


@table("name", pdfs.BROKEN)
def test_broken_pdf_is_refused_before_a_page_is_drawn(name: str) -> None:
    encoded, beginning = pdfs.BROKEN[name]
    with pytest.raises(RequestError) as caught:
        pages(encoded)
    assert caught.value.message.startswith(beginning)


def test_file_over_the_limit_of_bytes_is_not_read() -> None:
    with pytest.raises(RequestError, match="at most 100 are accepted"):
        pages(pdfs.pdf(pdfs.TEXT), PdfLimits(ImageLimits(max_encoded_bytes=100)))


def test_page_that_is_not_there_is_refused() -> None:
    with Renderer() as renderer, pytest.raises(RequestError, match="Page 8 of the PDF is damaged"):
        renderer.render(pdfs.pdf(pdfs.TEXT), PdfPage(7, 10, 10))


@table("numbers", [(1,), (0, 0), (0, 2)])
def test_pages_that_a_compromised_process_invents_are_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(InvalidImage):
        LIMITS.check_pages([PdfPage(number, 10, 10) for number in numbers])
