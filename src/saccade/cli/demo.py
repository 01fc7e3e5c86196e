"""`saccade demo`: start the bundled model, ask it about the bundled images through the openai SDK, stop.

With several workers, it shows a gateway in front of them instead, and what happens when one is killed.

The bundled model was not trained on lists of answers or tools, so grammars enforce two answers. One comes from a list,
from which the model chooses. The other is a call whose arguments the grammar spells out.
"""

import contextlib
import json
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from PIL import Image
from rich.color import Color
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from saccade.cli.admin_port import call
from saccade.cli.bundled import bundled
from saccade.cli.client import about, ask_about
from saccade.cli.screen import own_program
from saccade.config import Count, program
from saccade.consoles import new_console
from saccade.engine.installed import require_engine
from saccade.errors import StartupError
from saccade.llm.serving import free_port, serve
from saccade.models.bundled_model import ABILITIES, BUNDLED_NAME
from saccade.private_folder import private_folder
from saccade.processes.parent_death import tied

if TYPE_CHECKING:
    import openai

IMAGE_COLUMNS = 48
START_SECONDS = 120.0
QUESTION = "What does it say?"
QUESTIONS = {
    "texts": (QUESTION, "What colour is the text?"),
    "shapes": ("What shape is it?", "What colour is the shape?"),
}
"""The questions about the images of each folder."""

SHAPES = ("circle", "square", "diamond", "triangle", "star", "cross")
TOOL_NAME = "file_image"


def call_tool(client: "openai.OpenAI", model: str, image: Path, labels: Mapping[str, str]) -> str:
    """Make the model call a tool with the *labels* of the image; return the call as it arrived."""
    parameters = {
        "type": "object",
        "properties": {name: {"const": value} for name, value in labels.items()},
        "required": list(labels),
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=model,
        messages=about(image, "File it."),
        tools=[{"type": "function", "function": {"name": TOOL_NAME, "strict": True, "parameters": parameters}}],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (call,) = answer.model_dump()["choices"][0]["message"]["tool_calls"]
    return f"{call['function']['name']}({json.dumps(json.loads(call['function']['arguments']))})"


def image_rows(path: Path, columns: int = IMAGE_COLUMNS) -> Segments:
    """Return the image for a terminal, with two pixels per cell: an upper half block on a background."""
    with Image.open(path) as opened:
        height = max(2, round(opened.height * columns / opened.width) // 2 * 2)
        small = opened.convert("RGB").resize((columns, height), Image.Resampling.LANCZOS)
    pixels = small.tobytes()

    def colour(x: int, y: int) -> Color:
        offset = 3 * (y * columns + x)
        return Color.from_rgb(*pixels[offset : offset + 3])

    segments = []
    for y in range(0, height, 2):
        segments += [Segment("▀", Style(color=colour(x, y), bgcolor=colour(x, y + 1))) for x in range(columns)]
        segments.append(Segment.line())
    return Segments(segments)


def show_held_answers(client: "openai.OpenAI", model: str, image: Path, console: Console) -> None:
    """Print a structured answer and a tool call about an image of a shape, and the effect of their grammars."""
    console.print(f"\n{image.name}, answers that a grammar holds", style="dim")
    console.print(f"{QUESTIONS['shapes'][0]} One of {', '.join(SHAPES)}: ", end="", style="bold")
    shape = ask_about(client, model, image, QUESTIONS["shapes"][0], console, choices=SHAPES).text
    console.print("\nA tool call: ", end="", style="bold")
    call = call_tool(client, model, image, {"shape": shape})
    console.print(call, style="bold green", markup=False)
    console.print("The model chose from the list; it was not trained on tools, and the grammar spelled out the call.")


def demo(*, workers: Count = 1) -> None:
    """Start the bundled model, ask it about the images that ship with Saccade, and stop.

    Parameters
    ----------
    workers
        With 2 or more, show how a gateway sends images to workers, and what happens if one is killed.
    """
    import openai

    require_engine()
    console = new_console(markup=True)
    if workers > 1:
        show_workers(workers, console)
        return
    images = [image for kind in QUESTIONS for image in sorted(bundled("images").glob(f"{kind}/*.png"))]
    with serve() as server:
        client, model = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0), server.model
        for image in images:
            console.print(f"\n{image.name}", style="dim")
            if console.is_terminal:
                console.print(image_rows(image))
            for question in QUESTIONS[image.parent.name]:
                console.print(f"{question} ", end="", style="bold")
                answer = ask_about(client, model, image, question, console)
                console.print(f"   [dim]{answer}[/dim]")
        show_held_answers(client, model, images[-1], console)
    console.print(f"\n{ABILITIES}", soft_wrap=True)
    console.print(f"Run `{own_program()} serve` to serve it, or with MODEL after it another one.", soft_wrap=True)


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
    """Show where images go, that a repeat goes to the worker that holds it, and that a killed worker does no harm."""
    import openai

    images = sorted(bundled("images").glob("texts/*.png"))
    console.print(f"{num_workers} workers start, each with the whole bundled model, and a gateway.")
    with _running(num_workers, images[0]) as fleet:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{fleet.port}/v1", api_key="none", max_retries=0)
        names = {url: f"worker {number}" for number, url in enumerate(fleet.workers, 1)}

        def ask(image: Path) -> str:
            route = fleet.route(image)
            answer = ask_about(client, BUNDLED_NAME, image, QUESTION, console)
            tokens = f"{answer.cached_tokens} of {answer.prompt_tokens} tokens cached"
            console.print(f"   [dim]{image.name}, by {names[route.worker]} ({route.reason}), {tokens}")
            return route.worker

        console.print("\nThe images are new. Each goes to the worker with the least work:")
        for image in images:
            ask(image)
        console.print("\nThe same again. Each goes to the worker that holds it, and most of its prompt is cached:")
        holder = [ask(image) for image in images][-1]
        process = fleet.workers[holder]
        console.print(f"\nNow `kill -9 {process.pid}`, {names[holder]}, and its question again:")
        process.kill()
        ask_about(client, BUNDLED_NAME, images[-1], QUESTION, console)
        console.print(f"   [dim]{images[-1].name}, by another than {names[holder]}")
        console.print("\nIt was answered all the same. docs/fleet.md shows workers on several machines.")


@contextlib.contextmanager
def _running(num_workers: int, image: Path) -> Iterator[_Fleet]:
    """Run the processes until the block ends; yield when *image* has a route to each worker. Raises StartupError."""
    with private_folder("saccade-demo-") as private, contextlib.ExitStack() as stack:
        log = private / "log"

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
