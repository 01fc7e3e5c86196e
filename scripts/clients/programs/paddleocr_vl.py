"""PaddleOCR's pipeline for documents: the program of docs/documents.md, without the layout models that it would fetch.

So a page is one region. The random model writes as many tokens as the pipeline allows.
"""

# /// script
# dependencies = ["paddleocr[doc-parser]==3.7.0", "paddlepaddle==3.3.1"]
# ///

import contextlib
import os
import re
import shutil
import sys
from pathlib import Path

from questions import CALLER, IMAGE, KEY
from results import expect, tell

PAGE = Path(__file__).parents[3] / "docs" / "documents.md"
FOLDER = Path(os.environ["WORK_FOLDER"]) / "paddleocr"
PROGRAM = re.compile(r"^    from paddleocr import (?:.*\n|\n)+?(?=^\S)", re.MULTILINE)
ADDRESS = "http://127.0.0.1:8000/v1"


def read_page() -> None:
    """A page becomes Markdown in the folder that the program names."""
    [program] = PROGRAM.findall(PAGE.read_text())
    server = f'"{CALLER.url}", vl_rec_api_model_name="{CALLER.model}", vl_rec_api_key="{KEY}"'
    code = re.sub("^    ", "", program, flags=re.MULTILINE)
    code = code.replace(f'"{ADDRESS}"', f"{server}, use_layout_detection=False")
    shutil.copyfile(IMAGE, FOLDER / "page.png")
    os.chdir(FOLDER)
    # What the pipeline prints must not be taken for a row.
    with contextlib.redirect_stdout(sys.stderr):
        exec(compile(code, str(PAGE), "exec"), {})
    expect([path.name for path in (FOLDER / "output").glob("*.md")], ["page.md"])
    expect(bool((FOLDER / "output" / "page.md").read_text().strip()), True)


FOLDER.mkdir()
tell("PaddleOCR", "paddleocr", {"the program of [Documents](documents.md), a page as one region": read_page})
