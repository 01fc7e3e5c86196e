"""The server that answers a command: the one at an address, or else the bundled model, just for this command."""

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import msgspec

from saccade.cli.client import DEFAULT_URL
from saccade.engine.installed import require_engine
from saccade.errors import StartupError
from saccade.llm.serving import serve
from saccade.transport.unreachable import is_refused, proxy_hint, why_unreachable

if TYPE_CHECKING:
    import openai

NOT_FOUND = 404


class Served(NamedTuple):
    """A *client* of a server, the name of its *model*, and what the server notes about its answers."""

    client: "openai.OpenAI"
    model: str
    note: str


@contextlib.contextmanager
def served_model(url: str | None, model: str | None, api_key: str | None) -> Iterator[Served]:
    """Yield the server at *url*, by default at DEFAULT_URL, with *model*, by default the first that it lists.

    If *url* and *model* are None and no server answers, the bundled model is served for the block. Raises StartupError,
    also for an openai.APIError in the block.
    """
    import openai

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
            yield Served(client, name, note)
        except openai.APIError as error:
            raise StartupError(error_sentence(error, api)) from error


def _api(url: str) -> str:
    """Return *url* with /v1 if it has no path. Raises StartupError."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url if parts.path.strip("/") else f"{url.rstrip('/')}/v1"
    raise StartupError(f"--url {url} must be the address of an API, as {DEFAULT_URL}.")


class _Model(msgspec.Struct):
    """An entry of the server's list, as far as it is read; *note* is a string only if the server is Saccade."""

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
        if isinstance(error, openai.APIStatusError) and error.status_code != NOT_FOUND:
            raise
        status = f" with {NOT_FOUND}" if isinstance(error, openai.APIStatusError) else ""
        raise StartupError(_is_a_stranger(api, status)) from error
    for model in models:
        if name in (None, model.id):
            return model.id, printable(model.note) if isinstance(model.note, str) else ""
    if name is None:
        raise StartupError("The server lists no model; its workers may not be ready yet.")
    return name, ""


def error_sentence(error: "openai.APIError", api: str) -> str:
    """Return what the server says about *error*, or else a sentence that explains it."""
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


def printable(text: str) -> str:
    """Return *text* with U+FFFD for control characters, on which a terminal would act."""
    return "".join(one if one.isprintable() or one in "\n\t" else "\ufffd" for one in text)
