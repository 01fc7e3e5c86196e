"""`saccade demo`: start the bundled model, ask it about the bundled images through the openai SDK, stop.

The bundled model was not trained on lists of answers or tools, so grammars enforce two answers: one of a list, which
the model chooses, and a call whose arguments the grammar spells out.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from rich.color import Color
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from saccade.cli.bundled import bundled
from saccade.cli.client import about, ask_about
from saccade.cli.demo_workers import show_workers
from saccade.config import Count
from saccade.llm.serving import serve

if TYPE_CHECKING:
    import openai

IMAGE_COLUMNS = 48
QUESTIONS = {
    "texts": ("What does it say?", "What colour is the text?"),
    "shapes": ("What shape is it?", "What colour is the shape?"),
}
"""The questions about the images of each folder."""

SHAPES = ("circle", "square", "diamond", "triangle", "star", "cross")
TOOL_NAME = "file_picture"


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
    """Return the image for a terminal: two pixels a cell, upper half block on its background."""
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
    console.print(f"\n{image.name}, answers that a grammar holds", style="dim", highlight=False)
    console.print(f"{QUESTIONS['shapes'][0]} One of {', '.join(SHAPES)}: ", end="", style="bold", highlight=False)
    shape = ask_about(client, model, image, QUESTIONS["shapes"][0], console, choices=SHAPES).text
    console.print("\nA tool call: ", end="", style="bold")
    call = call_tool(client, model, image, {"shape": shape})
    console.print(call, style="bold green", markup=False, highlight=False)
    console.print("The model chose from the list; it was not trained on tools, and the grammar spelled out the call.")


def demo(*, workers: Count = 1) -> None:
    """Start the bundled model, ask it about the images that ship with Saccade, and stop.

    Parameters
    ----------
    workers
        With 2 or more, show how a gateway sends images to workers, and what happens if one is killed.
    """
    import openai

    console = Console()
    if workers > 1:
        show_workers(workers, console)
        return
    images = [image for kind in QUESTIONS for image in sorted(bundled("images").glob(f"{kind}/*.png"))]
    with serve() as server:
        client, model = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0), server.model
        for image in images:
            console.print(f"\n{image.name}", style="dim", highlight=False)
            if console.is_terminal:
                console.print(image_rows(image))
            for question in QUESTIONS[image.parent.name]:
                console.print(f"{question} ", end="", style="bold")
                answer = ask_about(client, model, image, question, console)
                console.print(f"   [dim]{answer}[/dim]", highlight=False)
        show_held_answers(client, model, images[-1], console)
    console.print("\nThe bundled model only reads 1 to 4 capitals and digits, and names six shapes and eight colours.")
    console.print("Run `saccade serve` to serve it, or `saccade serve MODEL` for another model.")
