"""`saccade read` against servers that answer by a script."""

import asyncio
import base64
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import decode_servers
import pdfs
import psutil
import pytest
import structlog
from PIL import Image, ImageDraw
from scripted_server import ScriptedServer, event, listening, stream
from server import free_port
from tables import table

import saccade
from saccade.cli.bundled import bundled
from saccade.cli.main import run
from saccade.documents import reader
from saccade.documents.forms import page_forms
from saccade.errors import StartupError
from saccade.models.bundled_model import ABILITIES

PAGE = Path(__file__).parents[2] / "docs" / "read.md"
LETTER = b"0 0 612 792"
TWO_COLUMNS = b"".join(
    b"BT /F 12 Tf %d %d Td (Column %d line %d) Tj ET " % (72 + 240 * column, 700 - 20 * line, column, line)
    for column in range(2)
    for line in range(20)
)
TABLE = b"".join(b"72 %d 400 30 re S BT /F 12 Tf 80 %d Td (Cell %d) Tj ET " % (y, y + 10, y) for y in (600, 630, 660))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the files lie in the test's folder, and nothing wait before it asks again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("saccade.eval.runner.RETRY_SECONDS", (0.0, 0.0))
    usual = structlog.get_config()
    # As in the program: standard output has the answers alone.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with decode_servers.shared():
        yield
    structlog.configure(**usual)


def scanned(*sizes: tuple[int, int]) -> bytes:
    """A PDF of images alone, as a scanner writes it; each page has a black rectangle in its middle."""
    images = []
    for width, height in sizes:
        image = Image.new("RGB", (width, height), "white")
        ImageDraw.Draw(image).rectangle((width // 4, height // 4, 3 * width // 4, 3 * height // 4), fill="black")
        images.append(image)
    encoded = io.BytesIO()
    images[0].save(encoded, "PDF", resolution=100, save_all=True, append_images=images[1:])
    return encoded.getvalue()


def image_of(body: dict[str, Any]) -> Image.Image:
    """The image of a request."""
    url = body["messages"][0]["content"][0]["image_url"]["url"]
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def answering(text: Callable[[int], str]) -> Callable[..., tuple[int, str]]:
    """Answer the number-th request, from 0, with a text."""
    return lambda server, _: (200, stream([text(len(server.bodies) - 1)]))


def read(server: ScriptedServer, *words: str) -> int:
    """Return the exit code of `saccade read` against *server*, one page at a time."""

    async def command() -> int:
        async with listening(server):
            flags = ["--url", server.url] + ([] if "--concurrency" in words else ["--concurrency", "1"])
            return await asyncio.to_thread(run, ["read", *words, *flags])

    return asyncio.run(command())


def test_pages_come_in_order_and_leave_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.pdf").write_bytes(pdfs.pdf(TWO_COLUMNS, TABLE, box=LETTER))
    Path("scans").mkdir()
    Path("scans/b.pdf").write_bytes(scanned((850, 1100)))
    Path("scans/c.png").write_bytes(images_file((300, 200)))
    Path("scans/notes.txt").write_text("no document")
    server = ScriptedServer(answering(lambda number: f"# Text {number}"))
    assert read(server, "a.pdf", "scans") == 0
    output, errors = capsys.readouterr()
    places = ["a.pdf, page 1", "a.pdf, page 2", "b.pdf, page 1", "c.png, page 1"]
    assert output == "".join(f"<!-- {place} -->\n\n# Text {number}\n\n" for number, place in enumerate(places))
    assert errors == ""
    assert sorted(os.listdir()) == ["a.pdf", "scans"]
    # Letter paper with its longer side as our form says, the scan no finer than its paper allows, the image as it is.
    assert [image_of(body).size for body in server.bodies] == [(1583, 2048), (1583, 2048), (1583, 2048), (300, 200)]
    assert {body["messages"][0]["content"][1]["text"] for body in server.bodies} == {page_forms()["markdown"].prompt}
    assert server.bodies[0]["temperature"] == 0


def images_file(size: tuple[int, int]) -> bytes:
    encoded = io.BytesIO()
    Image.new("RGB", size, "white").save(encoded, "PNG")
    return encoded.getvalue()


def test_several_pages_are_read_at_a_time_and_still_come_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.pdf").write_bytes(pdfs.pdf(*[pdfs.TEXT] * 9))
    server = ScriptedServer(lambda _, body: (200, stream([str(image_of(body).size)])))
    assert read(server, "a.pdf", "--concurrency", "3", "--pages", "2,4-6,9-", "--json") == 0
    pages = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [page["page"] for page in pages] == [2, 4, 5, 6, 9]
    rest = {"markdown": "(833, 417)", "blocks": [], "figures": [], "fault": ""}
    assert pages[0] == {"file": "a.pdf", "page": 2, "width": 833, "height": 417, **rest}
    assert len(server.bodies) == 5


def test_boxes_are_in_pixels_and_figures_are_cut_out(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.pdf").write_bytes(scanned((850, 1100)))
    place = '<div data-bbox="[250, 250, 750, 750]" data-label="Figure"><img alt="black"></div>'
    server = ScriptedServer(answering(lambda _: place), model="chandra-ocr-2")
    assert read(server, "a.pdf", "--json") == 0
    [page] = map(json.loads, capsys.readouterr().out.splitlines())
    width, height = page["width"], page["height"]
    box = [round(width / 4), round(height / 4), round(3 * width / 4), round(3 * height / 4)]
    assert page["blocks"] == [{"label": "Figure", "box": box, "markdown": "![black](a.pdf-1-1.png)"}]
    assert read(server, "a.pdf", "--out", "texts") == 0
    assert capsys.readouterr().out == ""
    assert Path("texts/a.pdf.md").read_text() == "<!-- a.pdf, page 1 -->\n\n![black](a.pdf-1-1.png)\n\n"
    figure = Image.open("texts/a.pdf-1-1.png")
    assert figure.size == (box[2] - box[0], box[3] - box[1])
    assert max(figure.getpixel((figure.width // 2, figure.height // 2))) < 32


def test_what_fails_is_named_and_the_rest_is_kept_and_not_asked_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("a.pdf").write_bytes(pdfs.pdf(pdfs.TEXT, pdfs.SQUARE, pdfs.TEXT))
    Path("locked.pdf").write_bytes(pdfs.pdf(pdfs.TEXT, trailer=pdfs.LOCK))
    error = json.dumps({"error": {"message": 'The "prompt" has too many tokens.', "code": "x"}})

    def fail_once(server: ScriptedServer, _: dict[str, Any]) -> tuple[int, str]:
        return (400, error) if len(server.bodies) == 2 else (200, stream([f"Text {len(server.bodies)}"]))

    server = ScriptedServer(fail_once)
    assert read(server, "a.pdf", "locked.pdf") == 1
    output, errors = capsys.readouterr()
    assert output.split("\n\n")[:-1] == [
        *("<!-- a.pdf, page 1 -->", "Text 1", "<!-- a.pdf, page 2, not complete -->", ""),
        *("<!-- a.pdf, page 3 -->", "Text 3"),
    ]
    assert errors.splitlines() == [
        'saccade: a.pdf, page 2: The "prompt" has too many tokens.',
        "saccade: locked.pdf: The PDF is encrypted; send a copy without a password.",
        "saccade: 2 could not be read; the same command asks for these alone, the other answers are in read-a.pdf.jsonl",
    ]
    assert read(server, "a.pdf") == 0
    assert capsys.readouterr().out.split("\n\n")[1:-1:2] == ["Text 1", "Text 4", "Text 3"]
    assert len(server.bodies) == 4
    assert not Path("read-a.pdf.jsonl").exists()


def test_killed_run_goes_on_where_it_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.pdf").write_bytes(pdfs.pdf(*[pdfs.TEXT] * 5))
    children: list[asyncio.subprocess.Process] = []

    def answer(server: ScriptedServer, _: dict[str, Any]) -> tuple[int, str]:
        if len(server.bodies) == 3:
            children[0].kill()
        return 200, stream([f"Text {len(server.bodies)}"])

    async def killed(server: ScriptedServer) -> int:
        async with listening(server):
            flags = ("--url", server.url, "--concurrency", "1")
            command = (sys.executable, "-m", "saccade.cli.main", "read", "a.pdf", *flags)
            children.append(await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL))
            return await children[0].wait()

    server = ScriptedServer(answer)
    assert asyncio.run(killed(server)) == -signal.SIGKILL
    assert read(server, "a.pdf") == 0
    assert capsys.readouterr().out.split("\n\n")[1:-1:2] == ["Text 1", "Text 2", "Text 4", "Text 5", "Text 6"]
    assert os.listdir() == ["a.pdf"]


def test_endless_repetition_is_cut_and_asked_once_more(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.pdf").write_bytes(pdfs.pdf(pdfs.TEXT, pdfs.TEXT))
    endless = stream(["A page. ", *["and on "] * 1000])

    def answer(server: ScriptedServer, body: dict[str, Any]) -> tuple[int, str]:
        return 200, endless if len(server.bodies) != 2 else stream(["A page."])

    server = ScriptedServer(answer)
    assert read(server, "a.pdf") == 1
    output, errors = capsys.readouterr()
    assert output.split("\n\n")[1:-1:2] == ["A page.", "A page. and on"]
    assert [body["temperature"] for body in server.bodies] == [0.0, 0.3, 0.0, 0.3]
    assert f"a.pdf, page 2: {reader.REPEATS}" in errors


def test_answer_that_is_cut_off_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.pdf").write_bytes(pdfs.pdf(pdfs.TEXT))
    end = event() + "data: [DONE]\n\n"
    choice = {"index": 0, "delta": {"content": "A pa"}, "finish_reason": "length"}
    server = ScriptedServer(lambda *_: (200, event(choices=[choice]) + end))
    assert read(server, "a.pdf", "--max-tokens", "2") == 1
    assert "a.pdf, page 1: The answer is cut off: it has as many tokens" in capsys.readouterr().err
    assert server.bodies[0]["max_tokens"] == 2


@table(
    ("words", "sentence"),
    [
        ([], "Name at least one file: `saccade read report.pdf > report.md`."),
        (["nope.pdf"], "There is no file nope.pdf."),
        (["a.pdf", "--pages", "0-3"], "--pages 0-3 must be numbers from 1, such as 3-9, 1,4-6 or 10-."),
        (["a.pdf", "--pages", "9-3"], "--pages 9-3 must be numbers"),
        (["a.pdf", "--form", "chandar"], "There is no form chandar. The forms are chandra"),
        (["empty"], "The folder empty has no PDF and no image."),
        (["a.pdf", "b/a.pdf", "--out", "texts"], "Two files have the name a.pdf"),
        (["a.pdf", "--serve", "x", "--url", "y"], "--serve starts a server of its own"),
        (["a.pdf", "--url", "http://127.0.0.1:9"], "No server answers at http://127.0.0.1:9/v1."),
        (["pipe.pdf"], "pipe.pdf is no file whose pages can be read again, but a pipe or a device."),
        (["/dev/zero"], "/dev/zero is no file whose pages can be read again"),
        (["a.pdf", "--answers", "/dev/zero"], "Cannot use /dev/zero: it is no regular file."),
        (["a.pdf", "--answers", "no/a.jsonl"], "No such file or directory. Name another file for the answers."),
        (["https://example.com/a.pdf"], "is no file. Save the document to a file"),
        (["b", "--out", "./b"], "--out b has the documents themselves"),
    ],
)
def test_what_cannot_be_read_is_explained(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir(exist_ok=True)
    Path("b").mkdir(exist_ok=True)
    if not Path("pipe.pdf").exists():
        os.mkfifo("pipe.pdf")
    for path in ("a.pdf", "b/a.pdf"):
        Path(path).write_bytes(pdfs.pdf(pdfs.TEXT))
    assert run(["read", *words]) == 1
    assert sentence in capsys.readouterr().err
    assert not list(Path().glob("*.jsonl"))


def test_file_that_is_too_large_is_refused_before_it_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    with Path("a.pdf").open("wb") as sparse:
        sparse.truncate(1 << 40)
    assert read(ScriptedServer(), "a.pdf") == 1
    assert capsys.readouterr().err.splitlines() == [
        f"saccade: a.pdf: It has {1 << 40} bytes; at most {64 << 20} are read.",
        "saccade: 1 could not be read",
    ]


def test_names_of_files_do_not_reach_a_terminal_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a\x1b[31m\n.pdf").write_bytes(pdfs.pdf(pdfs.TEXT))
    server = ScriptedServer(lambda *_: (400, json.dumps({"error": {"message": "No.", "code": "x"}})))
    assert read(server, "a\x1b[31m\n.pdf") == 1
    assert capsys.readouterr().err.splitlines() == [
        "saccade: a [31m .pdf, page 1: No.",
        "saccade: 1 could not be read; the same command asks for these alone, "
        "the other answers are in read-a [31m .pdf.jsonl",
    ]


def test_figure_that_cannot_be_written_ends_the_command_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a" * 246  # with .md and .new it is as long as names may be
    Path(name).write_bytes(pdfs.pdf(pdfs.SQUARE))
    figure = '<div data-bbox="0 0 512 512" data-label="Figure"><img alt="x"/></div>'
    server = ScriptedServer(lambda *_: (200, stream([figure])))
    words = (name, "--form", "chandra", "--out", "texts", "--answers", "a.jsonl")
    assert read(server, *words) == 1
    assert capsys.readouterr().err == f"saccade: Cannot write texts/{name}-1-1.png: File name too long.\n"
    assert os.listdir("texts") == []


def test_damaged_page_fails_alone_and_a_huge_one_is_drawn_smaller(capsys: pytest.CaptureFixture[str]) -> None:
    first = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 14400 14400]/Contents 4 0 R>>"
    tree = [b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[3 0 R 9 0 R 3 0 R]/Count 3>>"]
    Path("a.pdf").write_bytes(pdfs.written([*tree, first, pdfs.stream(pdfs.SQUARE)]))
    server = ScriptedServer(answering(str))
    assert read(server, "a.pdf", "--json") == 1
    output, errors = capsys.readouterr()
    pages = [json.loads(line) for line in output.splitlines()]
    kept = [(page["page"], page["width"], page["markdown"]) for page in pages]
    assert kept == [(1, 2048, "0"), (2, 0, ""), (3, 2048, "1")]
    assert "a.pdf, page 2: The page is damaged: it has no size." in errors


def test_documents_of_other_kinds_in_a_folder_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("in/texts").mkdir(parents=True)
    Path("in/a.pdf").write_bytes(pdfs.pdf(pdfs.TEXT))
    Image.new("RGB", (30, 20)).save("in/scan.TIF", "TIFF")
    Path("in/texts/a.pdf-1-1.png").write_bytes(images_file((30, 20)))  # of an earlier run
    server = ScriptedServer(answering(str))
    assert read(server, "in", "--out", "in/texts") == 1
    assert "saccade: in/scan.TIF: The image looks like TIFF" in capsys.readouterr().err
    assert len(server.bodies) == 1
    assert sorted(os.listdir("in/texts")) == ["a.pdf-1-1.png", "a.pdf.md"]


def test_figures_of_an_earlier_run_are_replaced() -> None:
    Path("a.pdf").write_bytes(pdfs.pdf(pdfs.SQUARE, box=LETTER))
    sizes = []
    for side in (200, 400):
        text = f'<div data-bbox="0 0 {side} 100" data-label="Figure"><img alt="x"/></div>'
        server = ScriptedServer(lambda *_, text=text: (200, stream([text])))
        assert read(server, "a.pdf", "--form", "chandra", "--out", "o") == 0
        with Image.open("o/a.pdf-1-1.png") as figure:
            sizes.append(figure.width)
    assert sizes[1] == 2 * sizes[0]


def test_python_yields_pages_within_a_running_loop() -> None:
    """As in a notebook."""
    Path("a.pdf").write_bytes(pdfs.pdf(pdfs.TEXT, pdfs.TEXT))

    async def notebook(url: str) -> list[tuple[int, str]]:
        first = saccade.read("a.pdf", url=url)
        assert next(first).page == 1
        first.close()
        return [(page.page, page.fault) for page in saccade.read("a.pdf", url=url, pages="2")]

    async def program() -> list[tuple[int, str]]:
        async with listening(ScriptedServer()) as server:
            return await asyncio.to_thread(lambda: asyncio.run(notebook(server.url)))

    assert asyncio.run(program()) == [(2, "")]


def test_setting_that_there_is_not_is_named() -> None:
    with pytest.raises(StartupError, match="There is no setting page; there are pages, form"):
        next(saccade.read("a.pdf", url="http://127.0.0.1:9", page=3))


@pytest.mark.ci
def test_300_pages_take_bounded_memory(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.pdf").write_bytes(pdfs.pdf(*[pdfs.SQUARE] * 300, box=LETTER))
    process, is_over, peaks = psutil.Process(), threading.Event(), [0]

    def watch() -> None:
        while not is_over.wait(0.05):
            peaks.append(process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    before = process.memory_info().rss
    watcher.start()
    code = read(ScriptedServer(answering(str), model="olmocr"), "a.pdf", "--concurrency", "4", "--json")
    is_over.set()
    watcher.join()
    assert (code, len(capsys.readouterr().out.splitlines())) == (0, 300)
    # A page has 4 MB of pixels, so all of them have 1.1 GB.
    assert max(peaks) - before < 250 << 20


@pytest.mark.ci
def test_bundled_model_reads_printed_capitals(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.cli.served_model.DEFAULT_URL", f"http://127.0.0.1:{free_port()}/v1")
    texts = [b"BT /F 60 Tf %d 40 Td (%s) Tj ET" % (left, text) for left, text in ((90, b"8K"), (90, b"LS"))]
    Path("a.pdf").write_bytes(pdfs.pdf(*texts, box=b"0 0 256 128"))
    assert run(["read", "a.pdf"]) == 0
    output, errors = capfd.readouterr()
    assert output == "<!-- a.pdf, page 1 -->\n\n8K\n\n<!-- a.pdf, page 2 -->\n\nLS\n\n"
    assert ABILITIES in errors


@pytest.mark.ci
def test_program_of_the_page_reads_the_pages_that_it_names() -> None:
    """The bundled model stands in for the release, under a folder of the release's name."""
    [program] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    [release] = re.findall(r'model="(.*?)"', program)
    Path(release).parent.mkdir()
    Path(release).symlink_to(str(bundled("model")))
    text = b"BT /F 60 Tf 90 40 Td (8K) Tj ET"
    Path("report.pdf").write_bytes(pdfs.pdf(*[text] * 9, box=b"0 0 256 128"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 7
