"""HTML for notebooks: the images of a question, and texts."""

import base64
import html
import io
from collections.abc import Sequence

from PIL import Image

from saccade.errors import SaccadeError
from saccade.llm.conversation import Source, load
from saccade.media.decode import decode
from saccade.media.header import ImageLimits

SIDE = 160
"""Of a shown image, in pixels; larger ones would make a notebook's file large."""

MAX_IMAGES = 8


def images_html(images: Sequence[Source]) -> str:
    """Return the first few of *images* as HTML; a video or an image that cannot be read is left out."""
    num_more = len(images) - MAX_IMAGES
    more = f"<p>and {num_more} more</p>" if num_more > 0 else ""
    return "".join(map(_image_html, images[:MAX_IMAGES])) + more


def _image_html(source: Source) -> str:
    try:
        image = Image.fromarray(decode(load(source), ImageLimits()))
    except SaccadeError:
        return ""
    image.thumbnail((SIDE, SIDE))
    encoded = io.BytesIO()
    image.save(encoded, "PNG")
    return f'<img src="data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}" alt="an image">'


def text_html(text: str) -> str:
    """Return *text*, in which nothing is HTML."""
    return f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>'
