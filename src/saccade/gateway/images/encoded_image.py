"""A request's image or video, still encoded, with its place in the request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from saccade.gateway.chat import Chat
from saccade.media.pdf_pages import PdfPage
from saccade.protocol.media import ImageLayout, VideoHeader


@dataclass(frozen=True)
class EncodedImage:
    """A request's encoded image or video."""

    field: str
    """Its place in the request, such as `messages[0].content[1].image_url.url`."""
    encoded: bytes
    """The file's bytes, which the images of a PDF share."""
    num_pixels: int
    """Of one frame."""
    content_hash: bytes
    """32 bytes."""
    layout: ImageLayout
    settings: Mapping[str, Any]
    """Those of the family's Layout."""
    video: VideoHeader | None = None
    """The header of a video."""
    page: PdfPage | None = None
    """The page of a PDF."""
    limits: tuple[str, ...] = ()
    """The places of limits of this one alone."""


def num_encoded_bytes(images: Sequence[EncodedImage]) -> int:
    """Return how many bytes the files of *images* have together.

    A file that several images share, as a PDF's pages do, counts once.
    """
    return sum({id(image.encoded): len(image.encoded) for image in images}.values())


def with_pages(chat: Chat, images: Sequence[EncodedImage]) -> Chat:
    """Return *chat* with one part for each of *images*, so that every page of a PDF has its own."""
    if all(image.page is None for image in images):
        return chat
    numbers = [0 if image.page is None else image.page.number for image in images]
    firsts = [position for position, number in enumerate(numbers) if number == 0]
    return chat.with_pages([stop - first for first, stop in pairwise([*firsts, len(images)])])
