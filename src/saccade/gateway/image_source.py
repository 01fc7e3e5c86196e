"""Where a request's image or video comes from: a URL, an uploaded file, or the request itself."""

import re
from dataclasses import dataclass
from typing import Final

from saccade.models.family import ImageOptions, VideoOptions

FILE_ID: Final = re.compile("file-[0-9a-f]{32}")
NO_FILE: Final = f"file-{32 * '0'}"
"""An id that no file has."""


def url_of_file(file_id: str) -> str:
    """Return *file_id*, or NO_FILE if it is malformed, for use in place of a URL."""
    return file_id if is_file_id(file_id) else NO_FILE


def is_file_id(url: str) -> bool:
    """Return whether *url* is an uploaded file's id rather than a URL."""
    return FILE_ID.fullmatch(url) is not None


@dataclass(frozen=True)
class ImageSource:
    """The source of an image or video, and its options."""

    field: str
    """The place of *url* in the request, such as `messages[0].content[1].image_url.url`."""
    url: str
    """An image's may be a file's id."""
    options: ImageOptions | VideoOptions
    content: bytes | None = None
    """The encoded bytes, from a caller in this process. The request's memory counts them already."""
    limits: tuple[str, ...] = ()
    """The places of limits of this one alone."""
    frames: tuple[str, ...] = ()
    """The URLs of a video's frames, in place of its own."""

    @property
    def num_fetched_frames(self) -> int:
        """How many frames are not in data: URLs; each counts as an image."""
        return sum(url[:5].lower() != "data:" for url in self.frames)
