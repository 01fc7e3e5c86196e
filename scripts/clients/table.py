"""docs/clients.md, made of what the programs told."""

from collections.abc import Iterable

from results import Result

INTRODUCTION = """\
# Clients

These clients, which others wrote, were tried with `saccade serve`. `make clients` makes this page. It installs each
client in a separate environment, below `.cache/clients`. It runs the client's program in `scripts/clients/programs`
against two servers on loopback that require an API key. It ends with an error if a row fails.

- Images and chats go to the bundled model, and an answer works if it is the text on the image.
- Tools and structured output go to a random model, made for the run, with the template of Qwen3-VL. It cannot call
  tools by itself: a grammar makes its calls (`tool_choice: "required"`, a named function, or `strict`), and its
  structured answers. The rows say that clients and server understand each other. They do not say what a model calls by
  itself.
- Coding agents do a task in a folder: they read a file, look at an image, change the file and say so. The gateway is
  real. Its worker follows a script instead of a model, and writes in the family's form. The templates lose system
  turns as the releases' own do. [Coding agents](agents.md) has the settings.
- Jupyter's kernel runs Saccade in the notebook itself, without a server.
- Open WebUI's own package is too large for a trial, so its HTTP client sends the requests that its server sends. openai
  for Node is the newest release that runs on Node 20.
- lmms-eval and VLMEvalKit run their own clients for OpenAI's API. What they need for models and data sets of their own
  is not installed. VLMEvalKit is tried as `ms-vlmeval`, which is built from it: it is not on PyPI under its own name.

"""


def page(results: Iterable[Result], notes: Iterable[str] = ()) -> str:
    """The page for *results*, in their order."""
    lines = ["| client | version | tried | result |", "|---|---|---|---|"]
    for result in results:
        detail = result.detail.replace("|", "\\|")
        outcome = "works" if result.ok else f"fails: {detail}"
        lines.append(f"| {result.client} | {result.version} | {result.what} | {outcome} |")
    return INTRODUCTION + "\n".join([*lines, *(f"\n{note}" for note in notes)]) + "\n"
