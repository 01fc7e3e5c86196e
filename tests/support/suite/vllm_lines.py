"""Command lines of `vllm serve`, as recipes and notes of others have them. # F15

Each row of vllm_lines.txt has a name, the checkpoint that the line is for, and what follows `vllm serve`. M stands for
the model.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TEMPLATE = "examples/tool_chat_template_gemma4.jinja"
FOLDER = "/data/models"
REFUSED = {
    "R16": "a draft `model` is not served; leave it out",
    "R24": "glm47",
    "R31": "fp8_e5m2",
    "R32": "Saccade runs no third-party code",
    "R36": "Saccade generates answers",
    "R37": "never with those of an adapter",
    "S7": "leave the flag out",
}
"""What the error of a line says, if a flag or its value cannot be served."""


@dataclass(frozen=True)
class Line:
    """The *words* after `vllm serve`, and the name of a tiny *checkpoint* of the family."""

    checkpoint: str
    words: Sequence[str]

    def with_stand_ins(self, stand_ins: Mapping[str, str]) -> list[str]:
        """Return the words, with others in place of the model and of files."""
        return [stand_ins.get(word, word) for word in self.words]


def _line(row: str) -> tuple[str, Line]:
    name, checkpoint, words = row.split("|", 2)
    return name, Line(checkpoint, shlex.split(words))


LINES = dict(map(_line, Path(__file__).with_suffix(".txt").read_text().splitlines()))
