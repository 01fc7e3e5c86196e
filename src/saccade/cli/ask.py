"""`saccade ask`: ask a model about images, from a terminal."""

import mimetypes
import sys
from pathlib import Path
from typing import Annotated, BinaryIO

from cyclopts import Parameter

from saccade.cli.client import data_url, stream_answer, user_message
from saccade.cli.served_model import printable, served_model
from saccade.config import Count
from saccade.consoles import new_console
from saccade.errors import StartupError

STDIN = "-"
MAX_BYTES = 256 << 20
"""Of a file. Servers take fewer, and say so; this is for devices without an end."""
FORM = '`saccade ask IMAGE... "What is this?"`'


def ask(
    *words: Annotated[str, Parameter(name="WORDS", show_env_var=False, allow_leading_hyphen=True)],
    url: str | None = None,
    model: str | None = None,
    system: str | None = None,
    max_tokens: Count | None = None,
    api_key: str | None = None,
) -> None:
    """Ask a model about images: `saccade ask cat.jpg "What is this?"`.

    If no server answers at the default URL, the model that ships with Saccade is started for this question.

    Parameters
    ----------
    words
        Files or http(s) URLs of images, PDFs and videos, or `-` for an image on stdin; then the question in quotes.
    url
        The API to ask; by default http://127.0.0.1:8000/v1.
    model
        The model's name; by default the first that the server lists.
    system
        A system message.
    max_tokens
        The most tokens of the answer.
    api_key
        A key of the server. Prefer SACCADE_API_KEY, which `ps` does not show.
    """
    images, question = _split(words)
    messages = [user_message([_image_url(image) for image in images], question)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    options = {} if max_tokens is None else {"max_tokens": max_tokens}
    try:
        with served_model(url, model, api_key) as (client, name, note):
            answer = stream_answer(client, name, messages, _show, **options)
    except KeyboardInterrupt as interrupt:
        if sys.stdout.isatty():
            print()
        raise KeyboardInterrupt("Interrupted: the answer is not complete.") from interrupt
    print()
    if note:
        print(f"saccade: {note}", file=sys.stderr)
    if sys.stdout.isatty():
        new_console(style="dim").print(str(answer))


def _split(words: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Return the images and the question. Raises StartupError."""
    for word in words:
        if word.startswith("-") and word != STDIN:
            raise StartupError(f"There is no flag {word} of `saccade ask`. Images have none: {FORM}.")
    if not words or words[-1] == STDIN or Path(words[-1]).is_file() or _names_a_file(words[-1]):
        raise StartupError(f"The question is missing; it comes last: {FORM}.")
    return words[:-1], words[-1]


def _names_a_file(word: str) -> bool:
    """Whether *word* looks like a file or a URL of an image, a PDF or a video; it need not exist."""
    media_type = mimetypes.guess_type(word)[0] or ""
    return " " not in word and media_type.startswith(("image/", "video/", "application/pdf"))


def _image_url(image: str) -> str:
    """Return the URL to send for the argument *image*. Raises StartupError."""
    if image.startswith(("http://", "https://", "data:")):
        return image
    try:
        content = _content(sys.stdin.buffer if image == STDIN else Path(image).expanduser().open("rb"))
    except FileNotFoundError as error:
        raise StartupError(
            f"There is no image {image}. If it is a word of the question, put the whole question in quotes."
        ) from error
    except OSError as error:
        raise StartupError(f"Cannot read {image}: {error.strerror}.") from error
    if len(content) > MAX_BYTES:
        raise StartupError(f"{image} has more than {MAX_BYTES >> 20} MiB, the most that `saccade ask` sends.")
    return data_url(content, mimetypes.guess_type(image)[0] or "image/png")


def _content(stream: BinaryIO) -> bytes:
    """Return what *stream* has, but no more than is needed to see that it has too much: a device has no end."""
    with stream:
        return stream.read(MAX_BYTES + 1)


def _show(piece: str) -> None:
    """Print a piece of the answer."""
    print(printable(piece) if sys.stdout.isatty() else piece, end="", flush=True)
