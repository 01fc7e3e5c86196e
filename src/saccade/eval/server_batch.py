"""Runs a file of requests as a batch of a server, which goes on with it while this program does not run."""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from saccade.errors import StartupError
from saccade.eval.batch import requests
from saccade.eval.runner import Journal
from saccade.whole_file import whole_file

if TYPE_CHECKING:
    import openai
    from openai.types import Batch

ENDED: Final = ("completed", "failed", "expired", "cancelled")
POLL_SECONDS: Final = 1.0


def known_batch(client: "openai.OpenAI", journal: Journal) -> str | None:
    """Return the id of the batch that an earlier run has begun for *journal*, or None. Raises openai.APIError."""
    import openai

    try:
        return client.batches.retrieve(_note(journal).read_text()).id
    except (FileNotFoundError, openai.NotFoundError):
        return None


def begin_batch(client: "openai.OpenAI", file: Path, journal: Journal) -> str:
    """Begin a batch of the requests of *file* that *journal* has no answer to, and return its id.

    All have one `url`. The id is in a file next to the journal until its answers are there. Raises openai.APIError and
    StartupError.
    """
    with tempfile.TemporaryFile() as upload:
        for request in requests(file):
            if request.custom_id not in journal.results:
                upload.write(msgspec.json.encode(request) + b"\n")
        upload.seek(0)
        source = client.files.create(file=(file.name, upload), purpose="batch").id
    endpoint: Any = next(requests(file)).url
    batch = client.batches.create(input_file_id=source, endpoint=endpoint, completion_window="24h").id
    note = _note(journal)
    try:
        with whole_file(note) as part:
            part.write_text(batch)
    except OSError as error:
        raise StartupError(f"Cannot write {note}: {error.strerror}.") from error
    return batch


def finish_batch(
    client: "openai.OpenAI", batch_id: str, file: Path, journal: Journal, tell: Callable[[int], None]
) -> str:
    """Wait for a batch, and add its answers to *journal* in the order of the requests in *file*.

    *tell* gets the number of answers from time to time. Return why the server has not run the batch, "" if it has.
    Raises openai.APIError.
    """
    import openai

    batch, num_old = client.batches.retrieve(batch_id), len(journal.results)
    while batch.status not in ENDED:
        if batch.request_counts is not None:
            tell(num_old + batch.request_counts.completed + batch.request_counts.failed)
        time.sleep(POLL_SECONDS)
        batch = client.batches.retrieve(batch_id)
    try:
        lines = {line["custom_id"]: line for line in _lines(client, batch)}
    except openai.NotFoundError:
        _note(journal).unlink()
        raise
    for request in requests(file):
        if request.custom_id in lines and request.custom_id not in journal.results:
            journal.add_result(lines[request.custom_id])
    _note(journal).unlink()
    faults = batch.errors.data if batch.errors is not None else None
    return " ".join(fault.message or "" for fault in faults or ()) if batch.status == "failed" else ""


def _note(journal: Journal) -> Path:
    return journal.path.with_name(f"{journal.path.name}.batch")


def _lines(client: "openai.OpenAI", batch: "Batch") -> Iterator[dict[str, Any]]:
    """Yield the answers, then the errors of *batch*. Raises openai.APIError."""
    for file in (batch.output_file_id, batch.error_file_id):
        if file is not None:
            yield from map(msgspec.json.decode, client.files.content(file).content.splitlines())
