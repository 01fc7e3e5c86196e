"""The command lines that the README and the pages show."""

import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md")))
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"(?:^ {4}.*\S.*\n)+", re.MULTILINE)
SPAN = re.compile(r"`([^`]*)`")
PRINTED = re.compile(r"\$\((printf [^)]*)\)")
PROMPTED = re.compile(r"^\$ ((?:.*\\\n)*.*)$", re.MULTILINE)
OPERATORS = "();<>|&"


class Line(NamedTuple):
    """A command line of a *page*, whole if the page breaks it."""

    page: Path
    text: str

    def calls(self, program: str) -> Iterator[list[str]]:
        """Yield the arguments of each call of *program* in the line."""
        text = PRINTED.sub(lambda match: subprocess.check_output(["bash", "-c", match[1]], text=True), self.text)
        lexer = shlex.shlex(text, posix=True, punctuation_chars=OPERATORS)
        lexer.whitespace_split = True
        words: list[str] | None = None
        for word in [*lexer, ";"]:
            if words is not None and set(word) <= set(OPERATORS):
                yield words
                words = None
            elif words is not None:
                words += [] if word == "..." else [word]
            elif word == program or word.endswith(f"/bin/{program}"):
                words = []


def lines_of(page: Path) -> list[Line]:
    """Return the lines of the blocks of *page*, and those after a prompt in blocks that show answers too."""
    text = page.read_text()
    blocks = [textwrap.dedent(block) for block in BLOCK.findall(FENCE.sub("", text))]
    shown = [code for language, code in FENCE.findall(text) if language in ("", "console")]
    blocks += ["\n".join(PROMPTED.findall(code)) for code in shown]
    lines = [line for block in blocks for line in _joined(re.sub(r" *\\\n *", " ", block).splitlines())]
    return [Line(page, line) for line in lines]


def _joined(lines: list[str]) -> list[str]:
    """Return *lines* with those that are indented further added to the one before."""
    whole: list[str] = []
    for line in lines:
        if line.startswith(" ") and whole:
            whole[-1] += f"\n{line}"
        else:
            whole.append(line)
    return whole


def spans_of(page: Path) -> list[Line]:
    """Return the code within the sentences of *page*."""
    outside = BLOCK.sub("", FENCE.sub("", page.read_text()))
    return [Line(page, " ".join(span.split())) for span in SPAN.findall(outside)]
