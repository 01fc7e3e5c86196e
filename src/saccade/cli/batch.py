"""`saccade batch`: run a file of requests against a server."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import uvloop
from cyclopts import Parameter

from saccade.bench.client import Server, new_session, root_of
from saccade.cli import exit_codes
from saccade.cli.client import DEFAULT_URL
from saccade.cli.output import new_bar, resumable
from saccade.cli.served_model import error_sentence, printable
from saccade.config import Count, Seconds
from saccade.errors import StartupError
from saccade.eval.batch import is_good, open_journal, requests, run_batch
from saccade.eval.runner import Journal
from saccade.eval.server_batch import begin_batch, finish_batch, known_batch

if TYPE_CHECKING:
    import openai

CONCURRENCY = 64
MAX_RETRIES = 8
"""Of a call to a server with batches: about half a minute, in which it may start again."""
SERVER_ERROR = 500


def batch(
    file: Path,
    /,
    *,
    url: str = DEFAULT_URL,
    output: Annotated[Path | None, Parameter(show_default=False)] = None,
    concurrency: Count | None = None,
    timeout: Seconds = 3600.0,
    api_key: str = "",
) -> int:
    """Run a file in OpenAI's batch format (JSONL: custom_id, method, url, body) against a server.

    `saccade batch requests.jsonl --url http://127.0.0.1:8000`

    The same command again asks only those without an answer. A server with /v1/batches runs the file as a batch, and
    goes on if this command ends.

    Parameters
    ----------
    file
        The requests, such as those for OpenAI's batch API.
    url
        The server.
    output
        The file of responses and errors, by default `FILE.results.jsonl`.
    concurrency
        Send the requests from here, this number at a time, even if the server has /v1/batches. Without these, 64.
    timeout
        Seconds after which a request has failed.
    api_key
        The API key. Prefer SACCADE_API_KEY, which `ps` does not show.
    """
    endpoints = {request.custom_id: request.url for request in requests(file)}
    names = endpoints.keys()
    journal = open_journal(output or file.with_suffix(".results.jsonl"))
    num_old, begin = len(names & journal.results.keys()), time.perf_counter()
    with resumable(journal), new_bar("answers") as bar:
        task = bar.add_task("", total=len(names), completed=num_old)

        def tell(number: int) -> None:
            bar.update(task, completed=number)

        is_one_batch = concurrency is None and num_old < len(names) and len({*endpoints.values()}) == 1
        if not (
            is_one_batch
            and uvloop.run(_has_batches(url, api_key, timeout))
            and _run_at_server(url, api_key, timeout, file, journal, tell)
        ):
            uvloop.run(_run(url, api_key, file, journal, concurrency or CONCURRENCY, timeout, tell))
    # The output may have answers to requests that are not in the file, and lack those of a cancelled batch.
    num_good = sum(name in journal.results and is_good(journal.results[name]) for name in names)
    print(
        f"{len(names)} requests: {num_good} good answers, {num_old} of them from before, in {journal.path}; "
        f"{time.perf_counter() - begin:.1f} s"
    )
    return 0 if num_good == len(names) else exit_codes.ERROR


async def _has_batches(url: str, api_key: str, seconds: float) -> bool:
    """Return whether the server has /v1/batches. Raises StartupError if it does not answer."""
    async with new_session(seconds) as session:
        return await (await Server(url, session, api_key).named()).has_batches()


def _run_at_server(
    url: str, api_key: str, seconds: float, file: Path, journal: Journal, tell: Callable[[int], None]
) -> bool:
    """Run the requests without an answer as a batch of the server. Return False if the server refuses that.

    Raises StartupError.
    """
    import openai

    api = f"{root_of(url)}/v1"
    with openai.OpenAI(base_url=api, api_key=api_key or "none", timeout=seconds, max_retries=MAX_RETRIES) as client:
        try:
            fault = _fault_of_batch(client, file, journal, tell)
        except openai.APIError as error:
            fault = error_sentence(error, api)
            if not isinstance(error, openai.APIStatusError) or error.status_code >= SERVER_ERROR:
                raise StartupError(fault) from error
    if fault:
        print(
            printable(f"saccade: the server runs no batch of this file: {fault} It gets the requests one by one."),
            file=sys.stderr,
        )
    return not fault


def _fault_of_batch(client: "openai.OpenAI", file: Path, journal: Journal, tell: Callable[[int], None]) -> str:
    """Begin a batch or go on with one, and wait for its answers. Return why there are none, "" if they are there."""
    batch_id = known_batch(client, journal) or begin_batch(client, file, journal)
    try:
        return finish_batch(client, batch_id, file, journal, tell)
    except KeyboardInterrupt as interrupt:
        end = f"POST {client.base_url}batches/{batch_id}/cancel ends it"
        raise KeyboardInterrupt(
            f"Interrupted. {batch_id} goes on at the server: the same command goes on with it, and {end}."
        ) from interrupt


async def _run(
    url: str,
    api_key: str,
    file: Path,
    journal: Journal,
    concurrency: int,
    seconds: float,
    tell: Callable[[int], None],
) -> None:
    async with new_session(seconds) as session:
        server = await Server(url, session, api_key).named()
        await run_batch(server, requests(file), journal, concurrency, tell)
