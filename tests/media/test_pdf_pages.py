"""How a PDF is recognised: by its header among the first bytes, unless an image begins there."""

import images
import pdfs
import pytest
from PIL import Image
from tables import table

from saccade.errors import InvalidImage, RequestError, UnsupportedImageFormat
from saccade.media.pdf_pages import read_image_header

FILE = pdfs.pdf(pdfs.TEXT)
KINDS = ("JPEG", "PNG", "WebP", "GIF", "AVIF", "BMP")


@table("name", pdfs.BEFORE)
def test_bytes_before_the_header_of_a_pdf_do_not_matter(name: str) -> None:  # F22
    assert read_image_header(pdfs.BEFORE[name] + FILE, "data:application/octet-stream;base64,") is None


@table("before", [bytes(1020), bytes(1024), bytes(5000), b"%PDX-" + bytes(1024)])
def test_a_header_after_the_first_1024_bytes_does_not_count(before: bytes) -> None:
    with pytest.raises(UnsupportedImageFormat, match="not an image in a known format"):
        read_image_header(before + FILE, "data:image/png;base64,")


@table("kind", KINDS)
def test_an_image_that_contains_the_header_of_a_pdf_stays_an_image(kind: str) -> None:
    encoded = images.encode(Image.new("RGB", (20, 14)), kind.upper()) + FILE
    assert encoded.index(b"%PDF-") < 1000
    header = read_image_header(encoded, "data:application/pdf;base64,")
    assert header is not None
    assert (header.format, header.upright) == (kind, (20, 14))


@table(
    ("content", "name"),
    [
        (b"II*\0\x08\0\0\0%PDF-1.7", "TIFF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0%PDF-1.7", "HEIC"), (b"<svg xmlns='http://www.w3.org/2000/svg'>%PDF-", "SVG"),
        (b"<!doctype html><p>%PDF-", "HTML"),
    ],
)  # fmt: skip
def test_another_format_that_contains_the_header_of_a_pdf_is_refused_by_its_name(content: bytes, name: str) -> None:
    with pytest.raises(UnsupportedImageFormat, match=f"looks like {name}"):
        read_image_header(content, "https://example.com/a.png")


SOURCES = (
    "data:application/pdf;base64,", "DATA:Application/PDF,", "data:application/x-pdf;base64,",
    "https://example.com/a.pdf", "https://example.com/A.PDF?size=2#page=3", "file:///a.pdf", "report.pdf",
)  # fmt: skip


@table("source", SOURCES)
@table(
    ("content", "message"),
    [
        (b"", "The PDF has no bytes."),
        (b"A text", "The file was sent as a PDF, but `%PDF-` is not among its first 1024 bytes; send a PDF, or JPEG"),
        (bytes(1024) + FILE, "The file was sent as a PDF, but `%PDF-` is not among its first 1024 bytes"),
        (b"<html>Not found", "The file was sent as a PDF, but it looks like HTML; send a PDF"),
        (b"PK\3\4", "The file was sent as a PDF, but it looks like ZIP; send a PDF"),
    ],
)
def test_the_error_of_what_was_sent_as_a_pdf_speaks_of_pdfs(source: str, content: bytes, message: str) -> None:
    with pytest.raises(InvalidImage) as caught:
        read_image_header(content, source)
    assert caught.value.message.startswith(message)


@table("source", ["data:image/png;base64,pdf", "https://example.com/pdf", "https://pdf/?a.pdf", "a.pdf.png", ""])
@table("content", [b"", b"A text"])
def test_the_error_of_what_was_sent_as_an_image_speaks_of_images(source: str, content: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        read_image_header(content, source)
    assert "PDF" not in caught.value.message
    assert "image" in caught.value.message
