"""Builds a question with images from a row of a benchmark's file."""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pybase64

from saccade.errors import StartupError
from saccade.eval.rows import Row
from saccade.eval.scoring import LETTERS

MAX_IMAGES = 7
IMAGE_NAME = re.compile(r".{1,255}\.(png|jpe?g|webp|gif|bmp|tiff?)", re.IGNORECASE)
MEDIA_TYPES = {b"\x89PNG": "png", b"RIFF": "webp", b"GIF8": "gif", b"BM": "bmp", b"II*\0": "tiff", b"MM\0*": "tiff"}
SPLITS = {"0": "human", "1": "machine"}
"""ChartQA's column human_or_machine."""


class Question(NamedTuple):
    """A question. *parts* are texts and the bytes of image files, in the order in which they are sent.

    *number* is its place in the files, and *name* is what the file calls it. *rule* scores an answer, from 0 to 1.
    """

    number: int
    name: str
    categories: Sequence[str]
    parts: Sequence[str | bytes]
    answers: Sequence[str]
    rule: Callable[[str], float]

    @property
    def text(self) -> str:
        """The texts of the question, with a mark for each image."""
        return "".join(part if isinstance(part, str) else "[image] " for part in self.parts)

    def content(self) -> list[dict[str, object]]:
        """Return the content of the user's message."""
        return [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": data_url(part)}}
            for part in self.parts
        ]


def data_url(image: bytes) -> str:
    """Return the bytes of an image file as a `data:` URL."""
    kind = next((kind for start, kind in MEDIA_TYPES.items() if image.startswith(start)), "jpeg")
    return f"data:image/{kind};base64,{pybase64.b64encode(image).decode()}"


def first(row: Row, *names: str) -> Any:
    """Return the first of the columns *names* that is not empty, or None."""
    return next((row[name] for name in names if row.get(name) not in (None, "", [])), None)


def texts(value: Any) -> list[str]:
    """Return *value*, which is a text, a list, or a list written as a text, as a list of texts."""
    if isinstance(value, str) and value.startswith("["):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return [value]
    return [] if value is None else [str(one) for one in value] if isinstance(value, list | tuple) else [str(value)]


def options_of(row: Row) -> list[str]:
    """Return the options of *row*: a list, or columns A, B and so on."""
    return texts(row.get("options")) or [str(row[letter]) for letter in LETTERS if row.get(letter) is not None]


def categories_of(row: Row, columns: Sequence[str], file: Path) -> list[str]:
    """Return the categories of *row* from the first of *columns*, or from MMMU's ids and ChartQA's file names."""
    if names := texts(first(row, *columns)):
        return [SPLITS.get(name, name) for name in names]
    if match := re.fullmatch(r"(?:dev|validation|test)_(.+)_\d+", str(row.get("id"))):
        return [match[1]]
    return [file.stem.removeprefix("test_")] if file.stem.startswith("test_") and "imgname" in row else []


def parts_of(text: str, row: Row, folder: Path) -> list[str | bytes]:
    """Return *text* and the images of *row*, each in the place of its `<image 1>`, or before the text.

    Raises StartupError if an image is missing.
    """
    pieces = re.split(r"<image (\d)>", text)
    images = {str(number): image for number, image in enumerate(_images(row, folder), 1)}
    before = [image for number, image in images.items() if number not in pieces[1::2]]
    places = (images.get(piece, f"<image {piece}>") if index % 2 else piece for index, piece in enumerate(pieces))
    return [*before, *(part for part in places if part)]


def _images(row: Row, folder: Path) -> Iterator[bytes]:
    values = [row[name] for name in (f"image_{number}" for number in range(1, MAX_IMAGES + 1)) if row.get(name)]
    if not values:
        value = first(row, "image", "images", "image_path", "imgname")
        values = texts(value) if isinstance(value, str) else value if isinstance(value, list) else [value]
    for value in values:
        content = value.get("bytes") or value.get("path") if isinstance(value, dict) else value
        yield content if isinstance(content, bytes) else _file_or_base64(str(content or ""), folder)


def _file_or_base64(text: str, folder: Path) -> bytes:
    """Read the file *text* from *folder*, or from its folder `png`, as for ChartQA; decode any other text as base64."""
    if not IMAGE_NAME.fullmatch(text):
        try:
            if text:
                return pybase64.b64decode(text, validate=True)
        except ValueError:
            pass
        raise StartupError(f"A row in {folder} has no image: a file's name, base64 or bytes in `image`.")
    for path in ((folder / text).resolve(), (folder / "png" / text).resolve()):
        if path.is_relative_to(folder.resolve()) and path.is_file():
            return path.read_bytes()
    raise StartupError(f"There is no image {text} in {folder}; --images names the folder that it is in.")
