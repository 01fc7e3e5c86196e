"""Draws a page of a PDF for a client that shows it to a person, such as the page at /."""

import io
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from PIL import Image

from saccade.errors import InvalidImage, InvalidValue
from saccade.gateway.images.decode_pool.job import RGB_BYTES
from saccade.gateway.images.decode_pool.pool import DecodePool
from saccade.gateway.request import Request
from saccade.gateway.work_threads import WorkThreads
from saccade.media.header import other_format
from saccade.media.pdf_pages import PdfPage

MAX_SIDE = 2048
"""Of a drawn page, in pixels: enough for a screen. A model may get a larger one."""


class DrawnPage(NamedTuple):
    """A page as a PNG file, and how many pages its PDF has."""

    png: bytes
    num_pages: int


@dataclass(frozen=True)
class PdfDrawer:
    """Draws pages in the confined processes of *pool*, and encodes them in *threads*."""

    pool: DecodePool
    threads: WorkThreads

    async def draw_page(self, request: Request, encoded: bytes, number: int) -> DrawnPage:
        """Return page *number*, from 1, of the PDF *encoded*, as a model gets it before it is resized.

        Raises InvalidImage if *encoded* is no PDF, InvalidValue if it has no such page, and the errors of
        DecodePool.pdf_pages().
        """
        if other_format(encoded) != "PDF":
            raise InvalidImage("The body is not a PDF. Send the bytes of the file, neither as JSON nor in base64.")
        pages = await self.pool.pdf_pages(encoded, request.client)
        if not 1 <= number <= len(pages):
            raise InvalidValue(
                f"The PDF has {len(pages)} page{'s' * (len(pages) > 1)}, so it has no page {number}.", "number"
            )
        page = _within_side(pages[number - 1])
        with await request.pixels(page.width * page.height * RGB_BYTES):
            pixels = await self.pool.drawing(encoded, page, request.client)
            png = await self.threads.run_work(True, len(pixels), lambda: _png(pixels, page))
        return DrawnPage(png, len(pages))


def _within_side(page: PdfPage) -> PdfPage:
    scale = min(1.0, MAX_SIDE / max(page.width, page.height))
    width, height = (max(1, round(side * scale)) for side in (page.width, page.height))
    return msgspec.structs.replace(page, width=width, height=height)


def _png(pixels: bytes, page: PdfPage) -> bytes:
    encoded = io.BytesIO()
    Image.frombytes("RGB", (page.width, page.height), pixels).save(encoded, "PNG", compress_level=1)
    return encoded.getvalue()
