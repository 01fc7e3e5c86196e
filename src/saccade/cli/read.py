"""`saccade read`: read documents with a model, and write them as Markdown."""

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.progress import Progress, TaskID

from saccade.cli import exit_codes
from saccade.cli.output import new_bar, resumable
from saccade.cli.served_model import printable, served_model
from saccade.documents.page_text import PageText
from saccade.documents.reader import new_journal
from saccade.documents.reading import Address, Documents, iterate, read_documents
from saccade.documents.settings import ReadSettings
from saccade.errors import StartupError
from saccade.errors import printable as one_line
from saccade.llm.serving import serve
from saccade.whole_file import whole_file

SETTINGS = ReadSettings()


def read(
    *files: Annotated[Path, Parameter(show_env_var=False)],
    url: str | None = None,
    model: str | None = None,
    serve_model: Annotated[str | None, Parameter(name="--serve", show_default=False)] = None,
    api_key: str | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
    settings: ReadSettings = SETTINGS,
) -> int:
    """Read documents by a model, and write them as Markdown: `saccade read report.pdf > report.md`.

    If no server answers at the default URL, the model that ships with Saccade is started. It reads printed capitals and
    digits.

    Parameters
    ----------
    files
        PDFs, images, and folders of these.
    url
        The API to ask; by default http://127.0.0.1:8000/v1.
    model
        The model's name; by default the first that the server lists.
    serve_model
        A model to serve for this command, a folder or a hub id, in place of a running server.
    api_key
        A key of the server. Prefer SACCADE_API_KEY, which `ps` does not show.
    json
        Write a line of JSON for each page, with its blocks, and their boxes in pixels of the page.
    """
    if not files:
        raise StartupError("Name at least one file: `saccade read report.pdf > report.md`.")
    if serve_model is not None and (url is not None or model is not None):
        raise StartupError("--serve starts a server of its own: leave out --url and --model.")
    documents = Documents.find(files, settings)
    journal = new_journal(settings.answers or Path(f"read-{documents.files[0].name}.jsonl"))
    num_faults, progress = 0, new_bar("pages")
    task = progress.add_task("", total=None)
    with resumable(journal), _address(url, model, serve_model, api_key) as (address, note), progress:
        tell = functools.partial(_set_total, progress, task)
        texts = iterate(read_documents(documents, address, journal, tell))
        with contextlib.closing(texts):
            for file, pages in itertools.groupby(texts, lambda page: page.file):
                first = next(pages)
                folder = settings.out if json or first.page else None  # a file that cannot be opened has no text
                with _target(file, folder, as_json=json) as write:
                    for page in itertools.chain((first,), pages):
                        write(_line(page) if json else _section(page))
                        progress.advance(task)
                        if page.fault:
                            num_faults += 1
                            place = f"{one_line(file)}, page {page.page}" if page.page else one_line(file)
                            progress.console.print(printable(f"saccade: {place}: {page.fault}"), soft_wrap=True)
    if note:
        print(f"saccade: {note}", file=sys.stderr)
    if num_faults:
        kept = f"the same command asks for these alone, the other answers are in {one_line(str(journal.path))}"
        again = f"; {kept}" if journal.path.exists() else ""
        print(f"saccade: {num_faults} could not be read{again}", file=sys.stderr)
        return exit_codes.ERROR
    if settings.answers is None:
        journal.path.unlink(missing_ok=True)
    return 0


@contextlib.contextmanager
def _address(
    url: str | None, model: str | None, serve_model: str | None, api_key: str | None
) -> Iterator[tuple[Address, str]]:
    """Yield the server to ask, and its note. Raises StartupError."""
    if serve_model is not None:
        with serve(serve_model) as server:
            yield Address(server.url), ""
    else:
        with served_model(url, model, api_key) as (client, name, note):
            yield Address(str(client.base_url), api_key or "", name), note


def _set_total(progress: Progress, task: TaskID, num_pages: int) -> None:
    progress.update(task, total=num_pages)


@contextlib.contextmanager
def _target(file: str, folder: Path | None, *, as_json: bool) -> Iterator[Callable[[str], object]]:
    """Yield a function that writes the texts of *file* to standard output, or to a file in *folder*.

    Raises StartupError.
    """
    if folder is None:
        yield _print
        return
    path = folder / f"{Path(file).name}.{'jsonl' if as_json else 'md'}"
    try:
        with whole_file(path) as part, part.open("w", encoding="utf-8") as target:
            yield target.write
    except OSError as error:
        raise StartupError(f"Cannot write {path}: {error.strerror}.") from error


def _print(text: str) -> None:
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def _line(page: PageText) -> str:
    return msgspec.json.encode(page).decode() + "\n"


def _section(page: PageText) -> str:
    """Return the Markdown of *page* after a comment with its number; "" for a file that cannot be opened."""
    lack = ", not complete" if page.fault else ""
    return f"<!-- {Path(page.file).name}, page {page.page}{lack} -->\n\n{page.markdown}\n\n" if page.page else ""
