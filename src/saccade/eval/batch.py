"""Runs a file in OpenAI's batch format against a server: one request per line, and one response or error per line."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import uuid4

import msgspec

from saccade.bench.client import Server
from saccade.errors import StartupError
from saccade.eval.runner import Journal, retried, run_all

OK = 200
TRANSIENT = (0, 429, 502, 503, 504)


class Request(msgspec.Struct, frozen=True):
    """A line of the input."""

    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    url: Annotated[str, msgspec.Meta(pattern=r"^/v1/[a-z_/]+$")]
    body: dict[str, Any]
    method: Literal["POST"]


def requests(file: Path) -> Iterator[Request]:
    """Yield the requests in *file*. Raises a StartupError that names a wrong line."""
    names = set()
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    request = msgspec.json.decode(line, type=Request)
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    raise StartupError(
                        f"{file}, line {number}, is no request: it needs `custom_id`, `method` POST, `url` such as "
                        "/v1/chat/completions, and `body`."
                    ) from error
                if request.custom_id in names:
                    raise StartupError(f"{file}, line {number}: an earlier line has the same `custom_id`.")
                if request.body.get("stream"):
                    raise StartupError(
                        f"{file}, line {number}: the answers of a batch are not streamed; drop `stream`."
                    )
                names.add(request.custom_id)
                yield request
    except OSError as error:
        raise StartupError(f"Cannot read {file}: {error.strerror}.") from error


def open_journal(file: Path) -> Journal:
    """Open the output. Raises StartupError."""
    return Journal(file, lambda line: line["custom_id"], is_good)


def is_good(line: Mapping[str, Any]) -> bool:
    return line["response"] is not None and line["response"]["status_code"] == OK


async def run_batch(
    server: Server, batch: Iterable[Request], journal: Journal, at_once: int, tell: Callable[[int], None]
) -> None:
    """Send the requests that *journal* has no answer to. *tell* gets the number of answers after each one."""

    async def ask(request: Request) -> None:
        if request.custom_id not in journal.results:
            once = functools.partial(server.post, request.url, msgspec.json.encode(request.body))
            journal.add_result(answer_line(request, *await retried(once, lambda answer: answer[0] in TRANSIENT)))
        tell(len(journal.results))

    await run_all(batch, ask, at_once)


def answer_line(request: Request, status: int, text: str, request_id: str) -> dict[str, object]:
    """Return a line of the output; *status* is 0 if there was no answer."""
    line = {"id": f"batch_req_{uuid4().hex}", "custom_id": request.custom_id, "response": None, "error": None}
    if not status:
        return line | {"error": {"code": "no_answer", "message": text}}
    try:
        body = msgspec.json.decode(text)
    except msgspec.MsgspecError:
        body = {"error": {"message": text}}
    return line | {"response": {"status_code": status, "request_id": request_id, "body": body}}
