"""docs/clients.md, made of what the programs told."""

from collections.abc import Iterable

from results import Result

INTRODUCTION = """\
# Clients

What clients that others wrote do with `saccade serve`. `make clients` makes this page. It installs each client in a
separate environment, below `.cache/clients`. It runs the client's program of `scripts/clients/programs` against two
servers on loopback that require an API key. It ends with an error if a row fails.

- Images and chats go to the bundled model, and an answer works if it is the text on the image.
- Tools and structured output go to a random model, made for the run, with the template of Qwen3-VL. It cannot call
  tools by itself: a grammar makes its calls (`tool_choice: "required"`, a named function, or `strict`), and its
  structured answers. The rows say that clients and server understand each other, and nothing of what a model calls of
  its own accord.
- Coding agents do a task in a folder: they read a file, look at an image, change the file and say so. The gateway is
  real; its worker writes by a script what a model would write, in the form of the family. The templates lose system
  turns as those of the releases do. [Coding agents](agents.md) has the settings.
- Open WebUI's own package is too large for a trial: the requests that its server sends are sent by the HTTP client that
  it uses. openai for Node is the newest release that runs on Node 20.

"""


def page(results: Iterable[Result], notes: Iterable[str] = ()) -> str:
    """The page for *results*, in their order."""
    lines = ["| client | version | tried | result |", "|---|---|---|---|"]
    for result in results:
        detail = result.detail.replace("|", "\\|")
        outcome = "works" if result.ok else f"fails: {detail}"
        lines.append(f"| {result.client} | {result.version} | {result.what} | {outcome} |")
    return INTRODUCTION + "\n".join([*lines, *(f"\n{note}" for note in notes)]) + "\n"
