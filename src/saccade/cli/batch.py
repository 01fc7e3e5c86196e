"""`saccade batch`: run a file of requests against a server."""

import time
from pathlib import Path
from typing import Annotated

import uvloop
from cyclopts import Parameter

from saccade.bench.client import Server, new_session
from saccade.cli import exit_codes
from saccade.cli.client import DEFAULT_URL
from saccade.cli.output import resumable
from saccade.config import Count, Seconds
from saccade.consoles import new_console
from saccade.eval.batch import is_good, open_journal, requests, run_batch
from saccade.eval.runner import Journal


def batch(
    file: Path,
    /,
    *,
    url: str = DEFAULT_URL,
    output: Annotated[Path | None, Parameter(show_default=False)] = None,
    concurrency: Count = 64,
    timeout: Seconds = 3600.0,
    api_key: str = "",
) -> int:
    """Run a file in OpenAI's batch format (JSONL: custom_id, method, url, body) against a server.

    `saccade batch requests.jsonl --url http://127.0.0.1:8000`

    The same command again asks only those without an answer.

    Parameters
    ----------
    file
        The requests, such as those for OpenAI's batch API.
    url
        The server.
    output
        The file of responses and errors, by default `FILE.results.jsonl`, in the order in which they come.
    concurrency
        Requests that wait for their answers at a time.
    timeout
        Seconds after which a request has failed.
    api_key
        The API key. Prefer SACCADE_API_KEY, which `ps` does not show.
    """
    names = {request.custom_id for request in requests(file)}
    journal = open_journal(output or file.with_suffix(".results.jsonl"))
    num_old, begin = len(names & journal.results.keys()), time.perf_counter()
    with resumable(journal):
        uvloop.run(_run(url, api_key, file, journal, concurrency, timeout))
    # The output may have answers to requests that are no longer in the file.
    num_good = sum(is_good(journal.results[name]) for name in names)
    print(
        f"{len(names)} requests: {num_good} good answers, {num_old} of them from before, in {journal.path}; "
        f"{time.perf_counter() - begin:.1f} s"
    )
    return 0 if num_good == len(names) else exit_codes.ERROR


async def _run(url: str, api_key: str, file: Path, journal: Journal, concurrency: int, seconds: float) -> None:
    async with new_session(seconds) as session:
        server = await Server(url, session, api_key).named()
        with new_console(stderr=True).status("") as status:
            await run_batch(server, requests(file), journal, concurrency, lambda num: status.update(f"{num} answers"))
