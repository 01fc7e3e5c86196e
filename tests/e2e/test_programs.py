"""What the README promises a newcomer, run: its code, the examples, `saccade demo`. # F8"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server import Server, free_port, serving
from waiting import wait_until

pytestmark = pytest.mark.ci
ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "src/saccade/cli/bundled/images"
TEXTS = sorted(IMAGES.glob("texts/*.png"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ONE_EVERY_DAY = [
    pytest.param(path, id=path.name, marks=() if path.name == "chat.py" else pytest.mark.conformance)
    for path in EXAMPLES
]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`saccade serve` without a model: the bundled one. What it prints is kept."""
    with serving(log=tmp_path_factory.mktemp("reader") / "stderr") as server:
        yield server


@pytest.fixture(scope="module")
def demo() -> str:
    """What `saccade demo` prints."""
    return run("-m", "saccade.cli.main", "demo")


def finished(*command: str, folder: Path = ROOT, url: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "120"} | ({"SACCADE_URL": url} if url else {})
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def run(*command: str, folder: Path = ROOT, url: str = "") -> str:
    done = finished(*command, folder=folder, url=url)
    assert done.returncode == 0, done.stderr
    return done.stdout


def expected(image: Path) -> tuple[str, str]:
    """What a bundled image shows and its colour, as its file name says: texts/K7Q-red.png."""
    shown, colour = image.stem.split("-")
    return shown, colour


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example(reader: Server, example: Path) -> None:
    text, colour = expected(TEXTS[0])
    output = run(str(example), url=f"{reader.url}/v1")
    assert text in output or colour in output


@pytest.mark.parametrize("example", ONE_EVERY_DAY)
def test_example_without_a_server_ends_in_one_sentence(example: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    done = finished(str(example), url=url)
    assert done.returncode == 1
    assert done.stderr == f"No server answers at {url}; start one with `saccade serve`.\n"


@pytest.mark.parametrize("example", ONE_EVERY_DAY)
def test_example_with_a_damaged_image_ends_in_the_sentence_of_the_server(
    reader: Server, example: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged.png"
    damaged.write_bytes(TEXTS[0].read_bytes()[:100])
    done = finished(str(example), str(damaged), url=f"{reader.url}/v1")
    assert done.returncode == 1
    assert done.stderr == "The PNG is damaged or truncated: its pixels could not be decoded.\n"


def shown_at_start(server: Server) -> str:
    """What `saccade serve` prints up to the line that a user can paste; what it logs later is not part of it."""

    def shown() -> re.Match[str] | None:
        assert server.log is not None
        assert server.process.poll() is None
        return re.match(r"(?s:.*)\nTry it:\n.*\n", server.log.read_text())

    found = wait_until(shown)
    assert found is not None
    return found[0]


def test_start_prints_stages_and_summary_and_no_line_of_a_library(reader: Server) -> None:
    stages, _, summary = shown_at_start(reader).partition("model      saccade-reader")
    assert stages.splitlines()[-4:] == ["reading the model's files", "loading weights", "packing weights", "warming up"]
    assert "fork" not in stages
    assert "\ndevice     cpu, float32" in summary
    assert re.search(r"\nattention  (torch_sdpa|onednn) \(auto for float32 on cpu", summary)
    assert re.search(r"vision encoder: (torch_sdpa|onednn) \(auto for float32 on cpu", summary)
    assert re.search(r"\nTry it:\n\S*saccade ask ", summary)


def test_line_of_the_summary_works_when_it_is_pasted(reader: Server, tmp_path: Path) -> None:
    """With an image of one's own too, which may be larger than an argument."""
    line = shown_at_start(reader).splitlines()[-1]
    assert str(TEXTS[0]) in line
    large = tmp_path / "large.png"
    large.write_bytes(TEXTS[0].read_bytes() + bytes(2_000_000))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for pasted in (line, line.replace(str(TEXTS[0]), str(large))):
        command = ["bash", "-c", pasted]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.strip() == expected(TEXTS[0])[0]


@pytest.mark.conformance
def test_port_in_use_is_one_sentence(reader: Server) -> None:
    done = finished("-m", "saccade.cli.main", "serve", "--port", str(reader.port))
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("saccade: ")]
    sentence = f"Cannot listen on 127.0.0.1:{reader.port}: Address already in use. Choose another --host or --port."
    assert errors == [f"saccade: {sentence}"]


@pytest.mark.conformance
def test_worker_that_cannot_start_is_one_sentence() -> None:
    done = finished("-m", "saccade.cli.main", "serve", "--port", str(free_port()), "--max-model-len", "999999")
    assert done.returncode == 1
    *stages, error = done.stderr.splitlines()
    assert "loading weights" not in stages
    assert not any("saccade: " in line for line in stages)
    assert error.startswith("saccade: --max-model-len is 999999, but the model has 2048 positions")


def test_readme_code(reader: Server, tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    image = TEXTS[0]
    (tmp_path / "image.png").write_bytes(image.read_bytes())
    assert len(code) == 1
    output = run("-c", code[0].replace("http://127.0.0.1:8000", reader.url), folder=tmp_path)
    assert output.strip() == expected(image)[0]


@pytest.mark.parametrize(
    ("kind", "questions"),
    [
        ("texts", ("What does it say?", "What colour is the text?")),
        ("shapes", ("What shape is it?", "What colour is the shape?")),
    ],
)
def test_demo_answers_about_every_bundled_image(demo: str, kind: str, questions: tuple[str, str]) -> None:
    images = sorted(IMAGES.glob(f"{kind}/*.png"))
    assert images
    for image in images:
        for question, answer in zip(questions, expected(image), strict=True):
            assert f"{question} {answer} " in demo.partition(image.name)[2].partition(".png")[0]


def test_demo_shows_a_structured_answer_and_a_tool_call(demo: str) -> None:
    *_, image = sorted(IMAGES.glob("shapes/*.png"))
    shape, _ = expected(image)
    held = demo.partition(f"{image.name}, answers that a grammar holds")[2]
    assert f"triangle, star, cross: {shape}\n" in held
    assert f'A tool call: file_image({{"shape": "{shape}"}})\n' in held
    assert "the grammar spelled out the call" in held


def test_template_of_the_bundled_model_takes_a_tools_result(reader: Server) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "file_image", "arguments": "{}"}}
    before = [{"role": "user", "content": "File it."}, {"role": "assistant", "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "1", "content": "done"}
    answer = reader.client().chat.completions.create(model=reader.model, messages=[*before, result], max_tokens=1)
    assert answer.choices[0].finish_reason in ("length", "stop")
