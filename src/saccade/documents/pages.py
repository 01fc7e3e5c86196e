"""Finds the pages of files, and makes an image of each.

A PDF's page is drawn in a confined decode process, as for a gateway, and only when its turn comes. So a long PDF takes
no more memory than a short one.
"""

import asyncio
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import blake3
import numpy as np
import numpy.typing as npt
from PIL import Image

from saccade.errors import InvalidImage, SaccadeError, StartupError
from saccade.gateway.config import MediaSettings
from saccade.gateway.images.decode_pool.pool import DecodePool
from saccade.media.decode import decode
from saccade.media.header import ImageLimits
from saccade.media.pdf_pages import PdfLimits, PdfPage, read_image_header

ENDINGS = frozenset({".pdf", ".png", ".jpg", ".jpeg", ".webp", ".gif", ".avif", ".bmp"})
REFUSED_ENDINGS = frozenset({".tif", ".tiff", ".heic", ".heif", ".jp2", ".djvu", ".docx", ".pptx", ".odt"})
"""Of documents in a folder that are named as unreadable: nobody shall miss their pages in the result."""

POINTS_PER_INCH = 72
MAX_DOTS_PER_INCH = 300
"""A small page is drawn no finer than printed letters need."""

MAX_PAGES = 100_000
MAX_BYTES = ImageLimits().max_encoded_bytes
PDF_LIMITS = PdfLimits(ImageLimits(), MAX_PAGES, POINTS_PER_INCH, takes_any_page=True)
NUM_PROCESSES = 2
_RANGE = re.compile(r"(\d+)(-(\d*))?")
_URL = re.compile(r"https?:/", re.IGNORECASE)
"""The beginning of a URL as a path, which has one slash."""


@dataclass(frozen=True)
class Page:
    """Page *number*, from 1, of the file at *path*, which has the hash *digest*.

    *width* and *height* are in points if *is_drawn*, as for a page of a PDF, and otherwise in pixels.
    """

    path: Path
    digest: str
    number: int
    width: int
    height: int
    is_drawn: bool


class UnreadableFile(NamedTuple):
    """A file of which no page can be read."""

    path: Path
    reason: str


@dataclass(frozen=True)
class PageRanges:
    """The pages to read, from 1: `3-9`, `1,4-6` or `10-`."""

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, text: str) -> "PageRanges":
        """Return the ranges in *text*. Raises StartupError if it names no pages."""
        ranges = []
        for part in text.split(","):
            match = _RANGE.fullmatch(part.strip())
            first = int(match[1]) if match else 0
            last = first if match is None or match[2] is None else int(match[3] or MAX_PAGES)
            if not 1 <= first <= last:
                raise StartupError(f"--pages {text} must be numbers from 1, such as 3-9, 1,4-6 or 10-.")
            ranges.append((first, last))
        return cls(tuple(ranges))

    def __contains__(self, number: int) -> bool:
        return any(first <= number <= last for first, last in self.ranges)


def find_files(paths: Iterable[Path], out: Path | None = None) -> list[Path]:
    """Return the files at *paths*; those in a folder are sorted by name, without those in the folder *out*.

    Raises StartupError if a path has none.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += _files_in(path, out)
        elif path.is_file():
            files.append(path)
        elif path.exists():
            raise StartupError(f"{path} is no file whose pages can be read again, but a pipe or a device.")
        elif str(path) == "-" or _URL.match(str(path)):
            raise StartupError(f"{path} is no file. Save the document to a file, and read that.")
        else:
            raise StartupError(f"There is no file {path}.")
    return files


def _files_in(folder: Path, out: Path | None) -> list[Path]:
    """Return the documents in *folder*. An earlier run may have written figures to *out*. Raises StartupError."""
    out = out.resolve() if out is not None and out.resolve().is_relative_to(folder.resolve()) else None
    if out == folder.resolve():
        raise StartupError(
            f"--out {folder} has the documents themselves, and the next run would read their figures. "
            "Name another folder."
        )
    files = sorted(
        one
        for one in folder.rglob("*")
        if one.suffix.lower() in ENDINGS | REFUSED_ENDINGS
        and one.is_file()
        and not (out and one.resolve().is_relative_to(out))
    )
    if not files:
        raise StartupError(f"The folder {folder} has no PDF and no image.")
    return files


def new_pool() -> DecodePool:
    """Return a pool that draws pages; its caller starts and closes it."""
    return DecodePool(MediaSettings(num_decode_processes=NUM_PROCESSES, shared_memory_bytes=0))


async def open_file(pool: DecodePool, path: Path, ranges: PageRanges | None) -> Sequence[Page] | UnreadableFile:
    """Return the pages of the file at *path* that are in *ranges*, or all of them if that is None."""
    try:
        if (num_bytes := (await asyncio.to_thread(path.stat)).st_size) > MAX_BYTES:
            return UnreadableFile(path, f"It has {num_bytes} bytes; at most {MAX_BYTES} are read.")
        content = await asyncio.to_thread(path.read_bytes)
    except OSError as error:
        return UnreadableFile(path, f"Cannot read it: {error.strerror}.")
    digest = blake3.blake3(content).hexdigest(length=16)
    try:
        header = read_image_header(content, str(path))
        if header is not None:
            pages = [Page(path, digest, 1, *header.upright, is_drawn=False)]
        else:
            sizes = await pool.pdf_pages(content, limits=PDF_LIMITS)
            pages = [Page(path, digest, one.number + 1, one.width, one.height, is_drawn=True) for one in sizes]
    except SaccadeError as error:
        return UnreadableFile(path, error.message)
    chosen = [page for page in pages if ranges is None or page.number in ranges]
    return chosen or UnreadableFile(
        path, f"It has {len(pages)} page{'s' * (len(pages) > 1)}, none of those in --pages."
    )


def drawn_size(page: Page, longest_side: int) -> tuple[int, int]:
    """Return the width and height, in pixels, at which a model gets *page*."""
    if not page.is_drawn:
        return page.width, page.height
    scale = min(longest_side / max(page.width, page.height), MAX_DOTS_PER_INCH / POINTS_PER_INCH)
    return max(1, round(page.width * scale)), max(1, round(page.height * scale))


async def encode_page(pool: DecodePool, page: Page, longest_side: int) -> bytes:
    """Return *page* as an image file; a page that is an image already stays as it is. Raises SaccadeError."""
    if not page.is_drawn:
        return await _read(page)
    return await asyncio.to_thread(_png, await draw_page(pool, page, longest_side))


async def draw_page(pool: DecodePool, page: Page, longest_side: int) -> npt.NDArray[np.uint8]:
    """Return *page* as RGB, uint8 [height, width, 3], in drawn_size(). Raises SaccadeError."""
    content = await _read(page)
    if not page.is_drawn:
        return await asyncio.to_thread(decode, content, ImageLimits())
    width, height = drawn_size(page, longest_side)
    pixels = await pool.drawing(content, PdfPage(page.number - 1, width, height))
    return np.frombuffer(pixels, np.uint8).reshape(height, width, 3)


async def _read(page: Page) -> bytes:
    try:
        return await asyncio.to_thread(page.path.read_bytes)
    except OSError as error:
        raise InvalidImage(f"The file cannot be read any more: {error.strerror}.") from error


def _png(pixels: npt.NDArray[np.uint8]) -> bytes:
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "PNG", compress_level=1)
    return encoded.getvalue()
