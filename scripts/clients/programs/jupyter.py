"""Jupyter: a notebook whose kernel runs Saccade's own Python, with the cells of this program.

The kernel needs Saccade and Jupyter's package for kernels, so it finds this environment's packages too.
"""

# /// script
# dependencies = ["ipykernel==7.4.0", "nbclient==0.11.0", "nbformat==5.11.1"]
# ///

import json
import os
import sysconfig
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from questions import IMAGE, IMAGE_SAYS, QUESTION
from results import expect, tell

FOLDER = Path(os.environ["WORK_FOLDER"]) / "jupyter"
KERNEL = FOLDER / "kernels" / "saccade"
NUM_CHATS = 20
CELLS = {
    "begin": "from pathlib import Path\nimport numpy as np\nimport pydantic\nimport saccade\nfrom PIL import Image\n"
    f"image, question = Path({str(IMAGE)!r}), {QUESTION!r}\nllm = saccade.LLM()\nllm",
    "batch": "parts = [{'type': 'image', 'image': image}, {'type': 'text', 'text': question}]\n"
    "chat = [{'role': 'user', 'content': parts}]\n"
    f"results = llm.chat([chat] * {NUM_CHATS})",
    "result": "results[0]",
    "array": "print(llm.ask(np.asarray(Image.open(image).convert('RGB')), question))",
    "several": "len(llm.ask([image, image], question)) > 0",
    "class": "from typing import Literal\nclass Text(pydantic.BaseModel):\n    colour: Literal['green', 'red']\n"
    "[result] = llm.chat(chat, response_format=Text)\ntype(result.parsed).__name__",
    "wrong": "try:\n    saccade.SamplingParams(temperature=-1)\nexcept saccade.errors.InvalidValue as error:\n    print(error)",
    "await": "llm.close()\nasync with saccade.AsyncLLM() as other:\n    result = await other.chat(chat)\nprint(result.text)",
}


def executed() -> dict[str, list[Any]]:
    """The outputs of each cell, after all have run."""
    KERNEL.mkdir(parents=True)
    packages = sysconfig.get_paths()["purelib"]
    command = [os.environ["SACCADE_PYTHON"], "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel = {"argv": command, "display_name": "saccade", "language": "python", "env": {"PYTHONPATH": packages}}
    (KERNEL / "kernel.json").write_text(json.dumps(kernel))
    os.environ["JUPYTER_PATH"] = str(FOLDER)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS.values()])
    NotebookClient(notebook, timeout=300, kernel_name="saccade", allow_errors=True).execute()
    return {name: cell["outputs"] for name, cell in zip(CELLS, notebook["cells"], strict=True)}


def text_of(outputs: list[Any]) -> str:
    """What the cell printed, without its errors' stream, and its value as text. Raises RuntimeError if it failed."""
    for one in outputs:
        if one["output_type"] == "error":
            raise RuntimeError(f"{one['ename']}: {one['evalue']}")
    said = [one for one in outputs if one.get("name") != "stderr"]
    return "".join(one["text"] if "text" in one else one["data"]["text/plain"] for one in said).strip()


outputs: dict[str, list[Any]] = {}


def begin() -> None:
    """An LLM starts and says what it is."""
    outputs.update(executed())
    expect(text_of(outputs["begin"]).startswith("<saccade.LLM saccade-reader"), True)


def batch() -> None:
    """The bar is one output of the cell, which ends with the whole count."""
    [bar] = outputs["batch"]
    expect(bar["data"]["text/plain"], f"{NUM_CHATS} of {NUM_CHATS} answers")
    expect(f'value="{NUM_CHATS}"' in bar["data"]["text/html"], True)


def result() -> None:
    """A result shows the image and the text."""
    [shown] = outputs["result"]
    html = shown["data"]["text/html"]
    expect(("data:image/png;base64," in html, IMAGE_SAYS in html), (True, True))


def arrays() -> None:
    """An array of pixels is an image, and a list has several."""
    expect(text_of(outputs["array"]), IMAGE_SAYS)
    expect(text_of(outputs["several"]), "True")


def classes() -> None:
    """The answer is an object of the class."""
    expect(text_of(outputs["class"]), "'Text'")


def wrong() -> None:
    """A value that no model takes raises."""
    expect("temperature" in text_of(outputs["wrong"]), True)


def awaited() -> None:
    """Await works in a cell, since a notebook's loop is running."""
    expect(text_of(outputs["await"]), IMAGE_SAYS)


tell(
    "Jupyter",
    "ipykernel",
    {
        "a notebook: `saccade.LLM` starts and says its model": begin,
        "the bar of a batch": batch,
        "a result with its image": result,
        "NumPy arrays and several images": arrays,
        "a Pydantic class as `response_format`": classes,
        "a wrong sampling parameter": wrong,
        "`await` in a cell": awaited,
    },
)
