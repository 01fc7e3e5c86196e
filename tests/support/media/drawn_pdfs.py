"""Pages of PDFs, drawn in the test's own process. A PDFium at a time: each call starts it and stops it."""

from collections.abc import Sequence

import numpy as np

from saccade.media.header import ImageLimits
from saccade.media.pdf import Renderer
from saccade.media.pdf_fonts import Font
from saccade.media.pdf_pages import PdfLimits, PdfPage

LIMITS = PdfLimits(ImageLimits())


def pages(encoded: bytes, limits: PdfLimits = LIMITS) -> list[PdfPage]:
    with Renderer() as renderer:
        return renderer.read_pages(encoded, limits)


def drawn(encoded: bytes, number: int = 0, fonts: Sequence[Font] = ()) -> np.ndarray:
    """Return page *number* as RGB [height, width, 3]."""
    with Renderer(fonts) as renderer:
        drawing = renderer.render(encoded, renderer.read_pages(encoded, LIMITS)[number])
    assert drawing.is_whole
    return drawing.image
