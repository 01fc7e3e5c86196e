"""Asks a server about pages, several at a time, and yields their texts in order."""

import asyncio
import functools
import re
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3
import msgspec
from PIL import Image

from saccade.bench.client import NO_TEXT, Record, Server
from saccade.documents.markup import Sheet, read_answer
from saccade.documents.page_text import Figure, PageText
from saccade.documents.pages import Page, UnreadableFile, draw_page, drawn_size, encode_page
from saccade.documents.repetition import repetition_start
from saccade.errors import SaccadeError, StartupError
from saccade.eval.ask import TRANSIENT
from saccade.eval.questions import data_url
from saccade.eval.runner import Journal, retried
from saccade.gateway.images.decode_pool.pool import DecodePool
from saccade.models.family import PageForm
from saccade.whole_file import whole_file

TEMPERATURES = (0.0, 0.3)
"""Of the first question, and of the second about a page whose answer repeats itself."""

CHECK_EVENTS = 64
AHEAD = 2
"""Pages that are read or wait to be yielded, for each that is read at a time: a slow one holds up few others."""

REPEATS = "The answer repeated itself without end, twice; it is cut there."
_MESSAGE = re.compile(r'"message"\s*:\s*("(?:[^"\\]|\\.)*")')


@dataclass(frozen=True)
class Reader:
    """How pages are read: the *server*, its model's *form*, and the *pool* that draws.

    Figures are written to the folder *out*, if there is one. Answers of an earlier run are in the *journal*.
    """

    server: Server
    form: PageForm
    pool: DecodePool
    out: Path | None = None
    journal: Journal | None = None
    concurrency: int = 8
    max_tokens: int | None = None


def new_journal(path: Path) -> Journal:
    """Open the file of answers. Raises StartupError."""
    return Journal(path, lambda line: line["key"], lambda line: not line["fault"])


def begin_pages(
    reader: Reader, pages: Iterable[Page | UnreadableFile]
) -> Generator[asyncio.Task[PageText], None, None]:
    """Yield a task for the text of each of *pages*, in order; several more are begun ahead.

    A page that fails has a fault; the others have their text. Closing the generator cancels what has been begun.
    """
    places = asyncio.Semaphore(reader.concurrency)

    async def read(page: Page | UnreadableFile) -> PageText:
        if isinstance(page, UnreadableFile):
            return PageText(str(page.path), 0, fault=page.reason)
        async with places:
            return await read_page(reader, page)

    begun = deque[asyncio.Task[PageText]]()
    try:
        for page in pages:
            begun.append(asyncio.create_task(read(page)))
            if len(begun) >= AHEAD * reader.concurrency:
                yield begun[0]
                begun.popleft()
        while begun:
            yield begun[0]
            begun.popleft()
    finally:
        for task in begun:
            task.cancel()


async def read_page(reader: Reader, page: Page) -> PageText:
    """Return the text of *page*, from the journal if it is there."""
    if not (page.width and page.height):
        return PageText(str(page.path), page.number, fault="The page is damaged: it has no size.")
    width, height = drawn_size(page, reader.form.longest_side)
    place = PageText(str(page.path), page.number, width, height)
    key = _key(reader, page)
    try:
        line = reader.journal.results.get(key) if reader.journal is not None else None
        if line is None:
            line = {"key": key, **await _ask(reader, page)}
            if reader.journal is not None:
                reader.journal.add_result(line)
        sheet = Sheet(width, height, f"{page.path.name}-{page.number}")
        reading = read_answer(line["text"], reader.form, sheet)
        await _cut_out(reader, page, reading.figures)
    except StartupError:
        raise  # a file cannot be written, which is not the page's fault
    except SaccadeError as error:
        return msgspec.structs.replace(place, fault=error.message)
    markdown, blocks, figures = reading
    return msgspec.structs.replace(place, markdown=markdown, blocks=blocks, figures=figures, fault=line["fault"])


def _key(reader: Reader, page: Page) -> str:
    """Return a digest of what tells an answer from others: the page, the model and the question."""
    question = (reader.server.model, reader.form, reader.max_tokens, page.digest, page.number)
    return blake3.blake3(msgspec.msgpack.encode(question)).hexdigest(length=16)


async def _ask(reader: Reader, page: Page) -> Mapping[str, Any]:
    """Return the `text` and the `fault` of an answer about *page*. Raises SaccadeError if the page cannot be drawn."""
    encoded = await encode_page(reader.pool, page, reader.form.longest_side)
    text = ""
    for temperature in TEMPERATURES:
        body = _body(reader, encoded, temperature)
        ask = functools.partial(reader.server.ask, body, Record(page.number, 0, 0.0), _is_repeating)
        record, text = await retried(ask, _is_transient)
        if (start := repetition_start(text)) is None:
            return {"text": text, "fault": _fault(record)}
        text = text[:start]
    return {"text": text, "fault": REPEATS}


def _body(reader: Reader, encoded: bytes, temperature: float) -> bytes:
    image = {"type": "image_url", "image_url": {"url": data_url(encoded)}}
    content = [image, {"type": "text", "text": reader.form.prompt}]
    fields: dict[str, object] = {
        "model": reader.server.model,
        "messages": [{"role": "user", "content": content}],
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if reader.max_tokens is not None:
        fields["max_tokens"] = reader.max_tokens
    return msgspec.json.encode(fields)


def _is_repeating(pieces: Sequence[str]) -> bool:
    """Whether the rest of an answer need not be read; this is checked only now and then."""
    return len(pieces) % CHECK_EVENTS == 0 and repetition_start("".join(pieces)) is not None


def _is_transient(result: tuple[Record, str]) -> bool:
    record, text = result
    return record.error in TRANSIENT and repetition_start(text) is None


def _fault(record: Record) -> str:
    """Return what is wrong with an answer, or "" for a good one. An answer without text is a good one."""
    if record.error not in (None, NO_TEXT):
        message = _MESSAGE.search(record.example or "")
        return str(msgspec.json.decode(message[1])) if message else f"{record.error}: {record.example}"
    return "The answer is cut off: it has as many tokens as it may have." if record.finish_reason == "length" else ""


async def _cut_out(reader: Reader, page: Page, figures: Sequence[Figure]) -> None:
    """Write *figures* into the folder, if there is one. Raises SaccadeError if the page cannot be drawn."""
    if reader.out is None or not figures:
        return
    pixels = await draw_page(reader.pool, page, reader.form.longest_side)
    for figure in figures:
        path = reader.out / figure.name
        try:
            await asyncio.to_thread(_save, Image.fromarray(pixels).crop(figure.box), path)
        except OSError as error:
            raise StartupError(f"Cannot write {path}: {error.strerror}.") from error


def _save(image: Image.Image, path: Path) -> None:
    with whole_file(path) as part:
        image.save(part, "PNG")


def pages_of(opened: Sequence[Sequence[Page] | UnreadableFile]) -> Iterator[Page | UnreadableFile]:
    """Yield the pages of *opened* files in order, and the files that cannot be read."""
    for one in opened:
        if isinstance(one, UnreadableFile):
            yield one
        else:
            yield from one
