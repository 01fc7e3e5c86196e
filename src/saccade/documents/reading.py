"""Reads documents, for the command and, through read(), for programs and notebooks."""

import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from saccade.bench.client import Server, new_session
from saccade.documents.forms import find_form
from saccade.documents.page_text import PageText
from saccade.documents.pages import PageRanges, find_files, new_pool, open_file
from saccade.documents.reader import Reader, begin_pages, new_journal, pages_of
from saccade.documents.settings import ReadSettings
from saccade.errors import StartupError
from saccade.eval.runner import Journal
from saccade.llm.serving import serve
from saccade.log_setup import log_warnings
from saccade.loop_thread import LoopThread

T = TypeVar("T")
Tell = Callable[[int], object]
END: Any = object()


class Documents(NamedTuple):
    """The *files* to read, the *ranges* of pages in each (None for all), and the *settings*, which are checked."""

    files: Sequence[Path]
    ranges: PageRanges | None
    settings: ReadSettings

    @classmethod
    def find(cls, paths: Sequence[Path], settings: ReadSettings) -> "Documents":
        """Return the documents at *paths*, and make the folder for their texts and figures. Raises StartupError."""
        find_form("", settings.form)
        ranges = None if settings.pages is None else PageRanges.parse(settings.pages)
        files = find_files(paths, settings.out)
        if settings.out is not None:
            _make_folder(settings.out, files)
        return cls(files, ranges, settings)


class Address(NamedTuple):
    """The server to ask: its URL, a key, and the name of its model, or "" for the first that it lists."""

    url: str
    key: str = ""
    model: str = ""


def read(
    *files: str | os.PathLike[str],
    model: str | os.PathLike[str] | None = None,
    url: str | None = None,
    api_key: str = "",
    **settings: Any,
) -> Generator[PageText, None, None]:
    """Yield the text of each page of *files*, which are PDFs, images and folders of these, in order.

        for page in saccade.read("report.pdf", model="PaddlePaddle/PaddleOCR-VL", pages="3-9"):
            print(page.markdown)

    With *url*, a running server is asked, and *model* is the model's name there. Without it, *model* is a folder or a
    hub id that is served until the last page. None stands for the small model that ships with Saccade. Other *settings*
    are flags of `saccade read` by name. A page that fails has a `fault`. Raises StartupError.
    """
    documents = Documents.find([Path(file) for file in files], _settings_of(settings))
    with contextlib.ExitStack() as stack:
        if url is None:
            address = Address(stack.enter_context(serve(model)).url)
        else:
            address = Address(url, api_key, "" if model is None else os.fspath(model))
        journal = None
        if (answers := documents.settings.answers) is not None:
            journal = stack.enter_context(contextlib.closing(new_journal(Path(answers))))
        yield from iterate(read_documents(documents, address, journal))


async def read_documents(
    documents: Documents, address: Address, journal: Journal | None, tell: Tell = lambda _: None
) -> AsyncGenerator[PageText, None]:
    """Yield the text of each page, in order. *tell* gets the number of pages before the first. Raises StartupError."""
    settings, pool = documents.settings, new_pool()
    log_warnings()
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(new_session(settings.timeout))
        server = await Server(address.url, session, address.key, model=address.model).named()
        stack.push_async_callback(pool.close)
        await pool.start()
        opened = [await open_file(pool, file, documents.ranges) for file in documents.files]
        pages = list(pages_of(opened))
        tell(len(pages))
        form = find_form(server.model, settings.form)
        reader = Reader(server, form, pool, settings.out, journal, settings.concurrency, settings.max_tokens)
        with contextlib.closing(begin_pages(reader, pages)) as tasks:
            for task in tasks:
                yield await task


def iterate(generator: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """Yield what *generator* yields; an interrupt ends it.

    It runs in another thread, since a notebook's event loop may run in this one.
    """
    loop = LoopThread("documents")

    async def advance() -> T:
        return await anext(generator, END)

    try:
        while (item := loop.run(advance())) is not END:
            yield item
    finally:
        loop.close()


def _settings_of(settings: dict[str, Any]) -> ReadSettings:
    """Return *settings* by name. Raises StartupError for an unknown name."""
    for name in settings:
        if name not in ReadSettings.__dataclass_fields__:
            raise StartupError(f"There is no setting {name}; there are {', '.join(ReadSettings.__dataclass_fields__)}.")
    if (out := settings.get("out")) is not None:
        settings = {**settings, "out": Path(out)}
    return ReadSettings(**settings)


def _make_folder(folder: Path, files: Sequence[Path]) -> None:
    """Make the folder for the texts and figures of *files*. Raises StartupError if two have the same name."""
    names = [file.name for file in files]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise StartupError(
            f"Two files have the name {twice}, and in {folder} their texts would be one file. Read one after the other."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"Cannot make the folder {folder}: {error.strerror}.") from error
