"""What the programs of all clients ask, and of which server.

Like `results`, this module needs nothing but Python.
"""

import base64
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import expect


@dataclass(frozen=True)
class Target:
    """A server: its root, and the model that it serves."""

    root: str
    model: str

    @property
    def url(self) -> str:
        """What clients call the base URL."""
        return f"{self.root}/v1"


READER = Target(os.environ["READER_ROOT"], os.environ["READER_MODEL"])
"""The bundled model, which reads the image."""

CALLER = Target(os.environ["CALLER_ROOT"], os.environ["CALLER_MODEL"])
"""A random model whose template takes tools; grammars hold what it answers."""

KEY = os.environ["API_KEY"]
"""The key that both servers want."""

IMAGE = Path(os.environ["IMAGE"])
IMAGE_SAYS = os.environ["IMAGE_SAYS"]
IMAGE_DATA = base64.b64encode(IMAGE.read_bytes()).decode()
IMAGE_URL = f"data:image/png;base64,{IMAGE_DATA}"
VIDEO_URL = "data:image/gif;base64," + base64.b64encode(Path(os.environ["VIDEO"]).read_bytes()).decode()
"""A video that shows the image."""

QUESTION = "What does it say?"
MESSAGES: list[Any] = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": IMAGE_URL}},
            {"type": "text", "text": QUESTION},
        ],
    }
]
"""The question about the image, in OpenAI's form."""

ABOUT_VIDEO: list[Any] = [
    {
        "role": "user",
        "content": [
            {"type": "video_url", "video_url": {"url": VIDEO_URL}},
            {"type": "text", "text": QUESTION},
        ],
    }
]
"""The question about the video, in the form that vLLM has added to OpenAI's."""

SIDES = ("left", "right")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "turn",
        "description": "Turn the camera.",
        "parameters": {
            "type": "object",
            "properties": {"side": {"type": "string", "enum": [*SIDES]}, "steps": {"type": "integer", "enum": [1, 2]}},
            "required": ["side", "steps"],
            "additionalProperties": False,
        },
    },
}
MAX_TOKENS = 1900
"""Less than the reader's context, and enough for the longest card: where JSON takes white space, a grammar allows 40."""


def expect_call(name: object, arguments: Mapping[str, Any]) -> None:
    """Raise unless this is a call of TOOL that matches its schema."""
    expect(name, "turn")
    expect(set(arguments), {"side", "steps"})
    expect(arguments["side"], *SIDES)
    expect(arguments["steps"], 1, 2)
