"""Reads images and videos that a conversation from Python holds as objects, not as URLs."""

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from saccade.errors import InvalidImage, InvalidImageUrl, InvalidValue
from saccade.media.decode import BROKEN

Source = bytes | Path | Image.Image
"""An image or video: the bytes of a file, its path, or pixels."""

ImageInput = Source | npt.NDArray[np.uint8] | str
"""An image as a program has it: a source, pixels uint8 [height, width, 3], or a URL or path as text."""

MEDIA_PARTS = {
    **dict.fromkeys(("image", "image_pil", "image_url"), "image_url"),
    **dict.fromkeys(("video", "video_url"), "video_url"),
}
"""Types of parts here, each with the type that the API has for it; `image_pil` is vLLM's."""

PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


def read_messages(messages: Iterable[Any]) -> tuple[list[Any], dict[str, Source]]:
    """Return *messages* with a name in place of each image or video that is not a URL, and the sources by name.

    Raises InvalidValue for an object that cannot be an image or video.
    """
    sources: dict[str, Source] = {}
    read = list(messages)
    for position, message in enumerate(read):
        if isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple):
            read[position] = {**message, "content": [_part(part, sources) for part in message["content"]]}
    return read, sources


def _part(part: Any, sources: dict[str, Source]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in MEDIA_PARTS or kind not in part:
        return part
    media = part[kind] if isinstance(part[kind], Mapping) else {"url": part[kind]}
    name = MEDIA_PARTS[kind]
    return {"type": name, name: {**media, "url": _url(media.get("url"), sources)}}


def _url(value: Any, sources: dict[str, Source]) -> str:
    """Return *value* if it is a URL that the gateway reads; otherwise add it to *sources* and return its name."""
    if isinstance(value, str):
        is_file = value.startswith("file://")
        if value[:5].lower() == "data:" or ("://" in value and not is_file):
            return value
        value = Path(unquote(urlsplit(value).path) if is_file else value)
    if isinstance(value, np.ndarray):
        value = _image_of(value)
    if not isinstance(value, Source):
        kind = type(value).__name__
        raise InvalidValue(
            f"An image is a PIL image, an array of pixels, a path, a URL or bytes of a file, not of type {kind}.",
            "messages",
        )
    name = f"file-{len(sources):032x}"
    sources[name] = value
    return name


def _image_of(pixels: npt.NDArray[Any]) -> Image.Image:
    """Return *pixels* as an image.

    Raises InvalidValue if there are none, if they are not uint8, or if they are not grey, RGB or RGBA.
    """
    channels = pixels.shape[2:]
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or channels not in ((), (3,), (4,)) or not pixels.size:
        raise InvalidValue(
            "An array of pixels is uint8 [height, width, 3], [height, width, 4] with alpha or [height, width] in grey, "
            f"not {pixels.dtype} {list(pixels.shape)}.",
            "messages",
        )
    return Image.fromarray(pixels)


def num_bytes(source: Source) -> int:
    """Return roughly how many bytes load() will return."""
    if isinstance(source, Image.Image):
        return source.width * source.height * len(source.getbands())
    if isinstance(source, bytes):
        return len(source)
    try:
        return source.stat().st_size
    except (OSError, ValueError):
        return 0  # load() says why


def load(source: Source) -> bytes:
    """Return *source* as an encoded file; pixels become an upright PNG.

    Raises InvalidImageUrl if a file cannot be read, or InvalidImage if a PIL image cannot.
    """
    if isinstance(source, bytes):
        return source
    if isinstance(source, Path):
        try:
            return source.read_bytes()
        except (OSError, ValueError) as error:
            cause = error.strerror if isinstance(error, OSError) else "that is no path"
            raise InvalidImageUrl(f"Cannot read {str(source)[:200]}: {cause}.") from error
    encoded = io.BytesIO()
    try:
        upright = ImageOps.exif_transpose(source)
        (upright if upright.mode in PNG_MODES else upright.convert("RGB")).save(encoded, "PNG", compress_level=1)
    except (*BROKEN, AssertionError) as error:
        raise InvalidImage("The PIL image cannot be read: its file is damaged or closed.") from error
    return encoded.getvalue()
