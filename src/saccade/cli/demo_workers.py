"""`saccade demo --workers N`: several workers and one gateway, and what happens when a worker is killed."""

import contextlib
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from saccade.cli.admin_port import call
from saccade.cli.bundled import BUNDLED_NAME, bundled
from saccade.cli.client import about, ask_about
from saccade.config import program
from saccade.errors import StartupError
from saccade.llm.serving import free_port
from saccade.processes.parent_death import tied

QUESTION = "What does it say?"
START_SECONDS = 120.0


class _Route(msgspec.Struct):
    """The answer to POST /route, as far as it is shown."""

    worker: str
    reason: str
    candidates: list[msgspec.Raw]


@dataclass(frozen=True)
class _Fleet:
    """The gateway's ports on 127.0.0.1, its admin key, and the processes of the workers by their address."""

    port: int
    admin_port: int
    admin_key: str
    workers: dict[str, "subprocess.Popen[bytes]"]

    def route(self, image: Path) -> _Route:
        """Return where the question about *image* would go. Raises StartupError."""
        body = msgspec.json.encode({"model": BUNDLED_NAME, "messages": about(image, QUESTION)})
        return msgspec.json.decode(
            call(f"http://127.0.0.1:{self.admin_port}", "/route", self.admin_key, body), type=_Route
        )

    def is_ready(self, image: Path) -> bool:
        with contextlib.suppress(StartupError):
            return len(self.route(image).candidates) == len(self.workers)
        return False


def show_workers(num_workers: int, console: Console) -> None:
    """Show where images go, that a repeat goes to the worker that holds it, and that a killed worker is no loss."""
    import openai

    images = sorted(bundled("images").glob("texts/*.png"))
    console.print(f"{num_workers} workers start, each with the whole bundled model, and a gateway.", highlight=False)
    with _running(num_workers, images[0]) as fleet:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{fleet.port}/v1", api_key="none", max_retries=0)
        names = {url: f"worker {number}" for number, url in enumerate(fleet.workers, 1)}

        def ask(image: Path) -> str:
            route = fleet.route(image)
            answer = ask_about(client, BUNDLED_NAME, image, QUESTION, console)
            tokens = f"{answer.cached_tokens} of {answer.prompt_tokens} tokens cached"
            console.print(f"   [dim]{image.name}, by {names[route.worker]} ({route.reason}), {tokens}", highlight=False)
            return route.worker

        console.print("\nThe images are new. Each goes to the worker with the least work:")
        for image in images:
            ask(image)
        console.print("\nThe same again. Each goes to the worker that holds it, and most of its prompt is cached:")
        holder = [ask(image) for image in images][-1]
        process = fleet.workers[holder]
        console.print(f"\nNow `kill -9 {process.pid}`, {names[holder]}, and its question again:", highlight=False)
        process.kill()
        ask_about(client, BUNDLED_NAME, images[-1], QUESTION, console)
        console.print(f"   [dim]{images[-1].name}, by another than {names[holder]}", highlight=False)
        console.print("\nIt was answered all the same. docs/fleet.md shows workers on several machines.")


@contextlib.contextmanager
def _running(num_workers: int, image: Path) -> Iterator[_Fleet]:
    """Run the processes until the block ends; yield when *image* has a route to each worker. Raises StartupError."""
    with tempfile.TemporaryDirectory(prefix="saccade-demo-") as private, contextlib.ExitStack() as stack:
        log = Path(private) / "log"

        def start(*words: str, **variables: str) -> "subprocess.Popen[bytes]":
            command, environment = program(*words, "--log-level", "ERROR")
            with log.open("ab") as stderr:
                process = subprocess.Popen(tied(command, signal.SIGTERM), stderr=stderr, env=environment | variables)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return process

        sockets = [f"{private}/{number}.sock" for number in range(num_workers)]
        workers = {f"unix:{path}": start("worker", "--uds", path, "--no-summary") for path in sockets}
        fleet = _Fleet(free_port(), free_port(), secrets.token_hex(), workers)
        ports = ("--port", str(fleet.port), "--admin-port", str(fleet.admin_port))
        urls = (word for url in workers for word in ("--worker-url", url))
        gateway = start("gateway", *urls, *ports, SACCADE_ADMIN_KEY=fleet.admin_key)
        deadline = time.monotonic() + START_SECONDS
        while not fleet.is_ready(image):
            has_ended = any(process.poll() is not None for process in (gateway, *workers.values()))
            if has_ended or time.monotonic() > deadline:
                raise StartupError(f"The workers or their gateway did not start. They wrote:\n{log.read_text()}")
            time.sleep(0.1)
        yield fleet
