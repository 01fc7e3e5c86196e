"""POST /pdf_pages/{number}: a page of a PDF as an image, for clients that cannot draw it themselves."""

from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from saccade.errors import InvalidValue
from saccade.gateway.images.pdf_drawer import PdfDrawer
from saccade.gateway.server.body import BodyReader, while_connected
from saccade.whole_numbers import read_whole_number

NUM_PAGES: Final = "x-saccade-num-pages"
"""The header of the answer that says how many pages the PDF has."""

MAX_NUMBER: Final = 1_000_000


@dataclass(frozen=True)
class PdfPages:
    """The endpoint that draws pages with *drawer*."""

    bodies: BodyReader
    drawer: PdfDrawer

    async def draw(self, request: Request) -> Response:
        """POST /pdf_pages/{number}: draw a page of the PDF in the body."""
        if not (number := read_whole_number(request.path_params["number"], MAX_NUMBER)):
            raise InvalidValue("`number` must be a whole number from 1 on.", "number")
        with self.bodies.begin_request(request.scope) as call:
            encoded = bytes(await self.bodies.read_body(request.scope, request.receive, call))
            with call.place(), while_connected(request.scope):
                page = await self.drawer.draw_page(call, encoded, number)
        headers = {NUM_PAGES: str(page.num_pages), "x-content-type-options": "nosniff"}
        return Response(page.png, media_type="image/png", headers=headers)
