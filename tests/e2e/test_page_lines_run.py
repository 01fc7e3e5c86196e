"""The command lines that a newcomer copies do what their page says, against the bundled model. # F8

All of them run, as they are written, except those that NOT_RUN names with a reason.
"""

import base64
import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pdfs
import pytest
from page_lines import ROOT, Line, lines_of
from server import Server, serving

from saccade.cli.bundled import bundled

pytestmark = pytest.mark.ci

PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("start", "read", "eval", "formats"))]
PORTS = ("http://127.0.0.1:8000", "http://127.0.0.1:8001")
IMAGE = bundled("images/texts/8K-brown.png")

NOT_RUN = {
    "make ": "tests/scripts/test_install.py, and the tests of what each target runs",
    "saccade serve": "runs until Ctrl-C; every test of a server runs it",
    "saccade worker": "tests/e2e/test_workers_over_tcp.py",
    "saccade gateway": "tests/e2e/test_workers_over_tcp.py",
    "saccade compile": "needs a GPU",
    "saccade pull": "needs a hub; tests/cli/test_models.py has one",
    "saccade demo": "tests/cli/test_demo.py",
    "saccade doctor": "its exit code says what this machine lacks; tests/cli/test_doctor.py",
    "saccade ask https:": "needs the network",
    "saccade eval http://127.0.0.1:8000  ": "asks 1000 questions; tests/eval/test_eval_command.py asks ten of them",
    "saccade eval http://127.0.0.1:8000 mmmu ": "needs parquet files; tests/eval/test_tasks.py",
    ".venv/bin/python examples/": "tests/e2e/test_programs.py",
    "print(saccade.LLM": "Python; tests/llm/test_python_page.py",
    "EYBZ-blue.png": "an answer",
    "What does it say? EYBZ": "an answer",
    "What colour is the text?": "an answer",
}


def is_run(line: Line) -> bool:
    return not line.text.startswith(tuple(NOT_RUN))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files and the programs that the lines name."""
    folder = tmp_path_factory.mktemp("newcomer")
    for name in ("photo.jpg", "cat.jpg", "image.jpg", "table.png", "letter.png", "scans/a.png"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(IMAGE, folder / name)
    (folder / "report.pdf").write_bytes(pdfs.pdf(*[b"BT /F 60 Tf 90 40 Td (8K) Tj ET"] * 4, box=b"0 0 256 128"))
    for name in ("Qwen3-VL-2B", "MODEL", "ID", "PaddlePaddle/PaddleOCR-VL-1.6"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(bundled("model"))
    body = {"model": "saccade-reader", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 2}
    request = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (folder / "requests.jsonl").write_text(json.dumps(request))
    (folder / "data").mkdir()
    encoded = base64.b64encode(IMAGE.read_bytes()).decode()
    for name in ("OCRBench", "DocVQA_VAL"):
        with (folder / "data" / f"{name}.tsv").open("w", newline="") as file:
            rows = csv.DictWriter(file, ("index", "image", "question", "answer", "category"), delimiter="\t")
            rows.writeheader()
            rows.writerow(
                dict(zip(rows.fieldnames, ("0", encoded, "What does it say?", "['8K']", "words"), strict=True))
            )
    (folder / "screenshot").write_text(f"#!/bin/sh\ncat {IMAGE}\n")
    (folder / "screenshot").chmod(0o755)
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_lines_run_as_they_are_written(page: Path, server: Server, folder: Path) -> None:
    lines = [line.text for line in lines_of(page) if is_run(line)]
    assert lines
    places = f"{Path(sys.executable).parent}:{folder}:{os.environ['PATH']}"
    for line in lines:
        environment = {**os.environ, "PATH": places} | (
            {} if "--serve" in line else {"SACCADE_URL": f"{server.url}/v1"}
        )
        for port in PORTS:
            line = line.replace(port, server.url)
        done = subprocess.run(
            ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        shutil.rmtree(folder / "OUT", ignore_errors=True)


def test_each_reason_is_of_a_line_that_there_is() -> None:
    lines = [line.text for page in PAGES for line in lines_of(page)]
    assert [start for start in NOT_RUN if not any(line.startswith(start) for line in lines)] == []
