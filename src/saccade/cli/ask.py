"""`saccade ask`: ask a model about images, from a terminal."""

import contextlib
import mimetypes
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import msgspec
from cyclopts import Parameter

from saccade.cli.client import DEFAULT_URL, data_url, stream_answer, user_message
from saccade.config import Count
from saccade.consoles import new_console
from saccade.engine.installed import require_engine
from saccade.errors import StartupError
from saccade.llm.serving import serve
from saccade.transport.unreachable import is_refused, proxy_hint, why_unreachable

if TYPE_CHECKING:
    import openai

STDIN = "-"
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
    import openai

    images, question = _split(words)
    messages = [user_message([_image_url(image) for image in images], question)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    options = {} if max_tokens is None else {"max_tokens": max_tokens}
    api = _api(url or DEFAULT_URL)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(openai.OpenAI(base_url=api, api_key=api_key or "none", max_retries=0))
        try:
            try:
                name, note = _served(client, api, model)
            except openai.APIConnectionError as error:
                if url is not None or model is not None or not is_refused(error):
                    raise
                require_engine(f"No server answers at {api}, and the bundled model")
                print(f"saccade: no server answers at {api}; the bundled model answers this once", file=sys.stderr)
                client = stack.enter_context(client.with_options(base_url=stack.enter_context(serve()).url))
                name, note = _served(client, api)
            answer = stream_answer(client, name, messages, _show, **options)
        except openai.APIError as error:
            raise StartupError(_sentence(error, api)) from error
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
    """Whether *word* is written as a file or a URL of an image, a PDF or a video; there need be none."""
    media_type = mimetypes.guess_type(word)[0] or ""
    return " " not in word and media_type.startswith(("image/", "video/", "application/pdf"))


def _image_url(image: str) -> str:
    """Return the URL to send for the argument *image*. Raises StartupError."""
    if image.startswith(("http://", "https://", "data:")):
        return image
    try:
        content = sys.stdin.buffer.read() if image == STDIN else Path(image).expanduser().read_bytes()
    except FileNotFoundError as error:
        raise StartupError(
            f"There is no image {image}. If it is a word of the question, put the whole question in quotes."
        ) from error
    except OSError as error:
        raise StartupError(f"Cannot read {image}: {error.strerror}.") from error
    return data_url(content, mimetypes.guess_type(image)[0] or "image/png")


def _api(url: str) -> str:
    """Return *url* with /v1 if it has no path. Raises StartupError."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url if parts.path.strip("/") else f"{url.rstrip('/')}/v1"
    raise StartupError(f"--url {url} must be the address of an API, as {DEFAULT_URL}.")


class _Model(msgspec.Struct):
    """An entry of the server's list, as far as it is read; *note* is a string only of Saccade's."""

    id: str
    note: object = ""


class _Models(msgspec.Struct):
    """The server's list of models."""

    data: list[_Model]


def _served(client: "openai.OpenAI", api: str, name: str | None = None) -> tuple[str, str]:
    """Return the model's name, and what the server of *api* notes about its answers.

    Without a *name* it is the first model that the server lists. Raises openai.APIError, and StartupError if the server
    lists none.
    """
    import openai

    try:
        # The SDK's own list fails in unforeseen ways if the answer is a page.
        models = msgspec.json.decode(client.models.with_raw_response.list().content, type=_Models).data
    except (openai.APIStatusError, msgspec.DecodeError) as error:
        # Such a server may still answer for a model that the user names.
        if name is not None:
            return name, ""
        if isinstance(error, openai.APIStatusError):
            raise
        raise StartupError(_is_a_stranger(api)) from error
    for model in models:
        if name in (None, model.id):
            return model.id, _printable(model.note) if isinstance(model.note, str) else ""
    if name is None:
        raise StartupError("The server lists no model; its workers may not be ready yet.")
    return name, ""


def _sentence(error: "openai.APIError", api: str) -> str:
    """Return what the server says about *error*, else a sentence of ours."""
    import openai

    if isinstance(error, openai.APIConnectionError):
        remedy = "Start one with `saccade serve`, or pass its address as --url."
        return why_unreachable(api, error, remedy) + proxy_hint(api)
    if isinstance(error.body, dict) and isinstance(error.body.get("message"), str):
        return str(error.body["message"])
    status = f" with {error.status_code}" if isinstance(error, openai.APIStatusError) else ""
    return _is_a_stranger(api, status)


def _is_a_stranger(api: str, status: str = "") -> str:
    return f"{api} answered{status}, which is not an answer of the OpenAI API.{proxy_hint(api)}"


def _show(piece: str) -> None:
    """Print a piece of the answer."""
    print(_printable(piece) if sys.stdout.isatty() else piece, end="", flush=True)


def _printable(text: str) -> str:
    """Return *text* without control characters, on which a terminal would act."""
    return "".join(one if one.isprintable() or one in "\n\t" else "\ufffd" for one in text)
