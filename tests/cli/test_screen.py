"""What the terminal shows of a start."""

import base64
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import scripted
from chats import data_url, random_image
from fronts import DESCRIPTION
from rich.console import Console
from tables import table
from waiting import wait_until

from saccade.cli.client import DEFAULT_URL
from saccade.cli.costs import EXAMPLE
from saccade.cli.screen import StartProgress, ask_command, curl, open_host, shared_memory_problem, show_summary, warn
from saccade.gateway.config import GatewayConfig, MediaSettings, ServerSettings, TlsSettings
from saccade.models.bundled_model import BUNDLED_NAME
from saccade.models.files import read_model_files
from saccade.protocol.description import ModelFiles
from saccade.protocol.engine_ipc import EngineProgress
from saccade.protocol.output import FinishReason, TokenDelta

START = Path(__file__).parents[2] / "docs" / "start.md"


def test_percentage_is_shown_once_the_total_is_known() -> None:
    shown = io.StringIO()
    with StartProgress(Console(file=shown, force_terminal=True, width=100)) as progress:
        progress.show(EngineProgress("warming up", 0, 0))
        wait_until(lambda: "warming up" in shown.getvalue())
        progress.show(EngineProgress("loading weights", 1, 3))
        wait_until(lambda: "33 %" in shown.getvalue())
    assert "? %" not in shown.getvalue()


@pytest.mark.parametrize(
    ("dtype", "shown"), [("float8_e4m3fn", "(64 tokens), float8_e4m3fn"), ("float32", "(64 tokens)")]
)
def test_summary_names_the_number_format_of_the_cache_if_it_is_another(dtype: str, shown: str) -> None:
    written = io.StringIO()
    description = msgspec.structs.replace(
        DESCRIPTION, num_blocks=4, block_size=16, dtype="float32", kv_cache_dtype=dtype
    )
    show_summary(Console(file=written, width=100), description, "http://127.0.0.1:8000")
    (line,) = (line.rstrip() for line in written.getvalue().splitlines() if "KV cache" in line)
    assert line.endswith(shown)


@table(
    ("fields", "shown"),
    [
        ({"weight_formats": "rounded by --quantization int8", "rounding_saves": 0}, "rounded by --quantization int8"),
        (
            {"rounding_saves": 3 << 29},
            "plain. With --quantization int8 they would take 1.5 GiB less; `saccade quantize`",
        ),
        ({"rounding_saves": 1 << 28}, None),
        ({}, None),
    ],
)
def test_summary_names_the_format_of_the_weights(fields: dict[str, Any], shown: str | None) -> None:
    """Or what int8 would save, if that is much."""
    written = io.StringIO()
    show_summary(Console(file=written, width=200), msgspec.structs.replace(DESCRIPTION, **fields), "")
    found = [line.strip() for line in written.getvalue().splitlines() if line.startswith("weights")]
    assert len(found) == (shown is not None)
    assert shown is None or found[0].removeprefix("weights").lstrip().startswith(shown)


@pytest.mark.parametrize(("implementation", "shown"), [("transformers", True), ("saccade", False)])
def test_summary_says_which_library_computes_the_network(implementation: str, shown: bool) -> None:
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_impl": implementation}
    files = ModelFiles(files={"config.json": json.dumps(config).encode()})
    written = io.StringIO()
    show_summary(Console(file=written, width=100), msgspec.structs.replace(DESCRIPTION, files=files), "")
    assert ("computed by the classes of the library transformers" in written.getvalue()) is shown


def test_summary_has_the_note_of_the_worker() -> None:
    written = io.StringIO()
    show_summary(Console(file=written, width=100), msgspec.structs.replace(DESCRIPTION, note="It [b]guesses."), "")
    assert "It [b]guesses. " in written.getvalue()


def test_summary_says_how_many_tokens_fit_in_layers_with_a_window() -> None:
    written = io.StringIO()
    sizes = {"num_blocks": 40, "block_size": 16, "window": 1024, "num_window_blocks": 30}
    description = msgspec.structs.replace(DESCRIPTION, **sizes)
    show_summary(Console(file=written, width=100), description, "http://127.0.0.1:8000")
    assert "40 blocks of 16 (640 tokens)" in written.getvalue()
    assert "30 blocks (480 tokens) in layers with a window of 1024 tokens" in written.getvalue()


def test_summary_says_what_an_image_costs(network_folder: Callable[[str], Path]) -> None:
    written = io.StringIO()
    files = read_model_files(network_folder("qwen3_5"))
    description = msgspec.structs.replace(DESCRIPTION, files=files, dtype="bfloat16", num_state_checkpoints=7)
    show_summary(Console(file=written, width=200), description, "http://127.0.0.1:8000")
    shown = written.getvalue()
    assert re.search(
        r"an image +of 1280x960: \d+ tokens, \d+ patches, [\d.]+ [KM]iB of KV cache, [\d.]+ [KM]iB of", shown
    )
    assert re.search(r"a checkpoint of the recurrent states: [\d.]+ [KM]iB; 7 fit", shown)


@pytest.mark.ci
@table(
    "name, processor_kwargs",
    [
        ("qwen3_vl", None),
        ("qwen3_vl", '{"max_pixels": 100000}'),
        ("qwen3_vl", '{"size": {"longest_edge": 200000}}'),
        ("qwen2_5_vl", '{"min_pixels": 2000000, "max_pixels": 3000000}'),
        ("qwen3_5", '{"resized_height": 320, "resized_width": 640}'),
        ("gemma4", '{"max_soft_tokens": 560}'),
        ("kimi_k25", '{"max_pixels": 100000, "max_soft_tokens": 560}'),
        ("paddleocr_vl", '{"max_pixels": 100000}'),
    ],
)
def test_cost_of_an_image_in_the_summary_is_that_of_its_usage(
    name: str, processor_kwargs: str | None, network_folder: Callable[[str], Path]
) -> None:
    config = GatewayConfig(mm_processor_kwargs=processor_kwargs)
    with scripted.running(network_folder(name), config, max_model_len=1 << 16) as gateway:
        gateway.worker.script = [TokenDelta("r", [300], FinishReason.LENGTH)]
        url = data_url(random_image(*EXAMPLE, 1))
        answer = gateway.chat([{"type": "image_url", "image_url": {"url": url}}]).json
        description, written = gateway.worker.state.description, io.StringIO()
        assert description is not None
        show_summary(Console(file=written, width=200), description, "", media=config)
    [image] = answer["usage"]["prompt_tokens_details"]["images"]
    assert f"of 1280x960: {image['tokens']} tokens" in written.getvalue()


@table(
    "name, settings, shown",
    [
        ("qwen3_vl", MediaSettings(max_image_pixels=1000), "of 1280x960: refused, since --max-image-pixels is 1000"),
        ("kimi_k25", MediaSettings(mm_processor_kwargs='{"min_pixels": 9}'), "of 1280x960: refused. min_pixels: this"),
        ("qwen3_vl", None, "of encoder cache, unless its gateway has --mm-processor-kwargs"),
    ],
)
def test_summary_does_not_promise_an_image_that_is_refused(
    name: str, settings: MediaSettings | None, shown: str, network_folder: Callable[[str], Path]
) -> None:
    written = io.StringIO()
    description = msgspec.structs.replace(DESCRIPTION, files=read_model_files(network_folder(name)))
    show_summary(Console(file=written, width=200), description, "", media=settings)
    assert shown in written.getvalue()


def test_warnings_of_an_open_host_and_of_little_shared_memory(tmp_path: Path) -> None:
    written = io.StringIO()
    console = Console(file=written, width=100)
    warn(console, open_host(ServerSettings()), open_host(ServerSettings(host="::", api_keys=("k",))))
    warn(console, shared_memory_problem(1, tmp_path))
    assert written.getvalue() == ""
    little = shared_memory_problem(1 << 60, tmp_path), shared_memory_problem(1 << 30, tmp_path / "none")
    warn(console, open_host(ServerSettings(host="::")), *little)
    host, small, missing = written.getvalue().splitlines()
    assert host.startswith("saccade: with --host :: and no key, everybody who reaches this machine")
    assert " free, less than --shared-memory-bytes (1.07e+09 GiB)." in small
    assert "none is not writable. Pixels that do not fit travel inside messages" in missing
    assert missing.endswith("--shm-size=2048m.")


@pytest.fixture
def posted(tmp_path: Path) -> Callable[[str], tuple[list[str], Any]]:
    """Runs a line of shell in tmp_path; returns what its `curl` was called with, and the JSON that it would send."""
    program = tmp_path / "bin" / "curl"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\0" "$@" > arguments\ncat > body\n')
    program.chmod(0o755)

    def run(line: str) -> tuple[list[str], Any]:
        path = f"{program.parent}:{os.environ['PATH']}"
        subprocess.run(["bash", "-c", line], check=True, cwd=tmp_path, env={"SACCADE_API_KEY": "k", "PATH": path})
        words = (tmp_path / "arguments").read_text().split("\0")[:-1]
        assert words[-2:] == ["-d", "@-"]  # the body is what the pipe has
        return words, json.loads((tmp_path / "body").read_bytes())

    return run


PHOTO = bytes(2_000_000)
"""More than fits an argument."""


@pytest.mark.parametrize("model", ["tiny", 'it\'s "mine"'])
@pytest.mark.parametrize("with_key", [False, True])
def test_line_to_paste_is_one_request(
    model: str, with_key: bool, tmp_path: Path, posted: Callable[[str], tuple[list[str], Any]]
) -> None:
    photo = tmp_path / "it's one.png"
    photo.write_bytes(PHOTO)
    words, body = posted(
        curl("http://127.0.0.1:8000/v1", model, photo, ServerSettings(api_keys=("k",) if with_key else ()))
    )
    assert words[:3] == ["http://127.0.0.1:8000/v1/chat/completions", "-H", "Content-Type: application/json"]
    assert ("Authorization: Bearer k" in words) is with_key
    assert body["model"] == model
    head, _, payload = body["messages"][0]["content"][0]["image_url"]["url"].partition(",")
    assert (head, base64.b64decode(payload)) == ("data:image/png;base64", PHOTO)


def test_line_to_paste_connects_as_the_server_listens(
    tmp_path: Path, posted: Callable[[str], tuple[list[str], Any]]
) -> None:
    photo = tmp_path / "one.png"
    photo.write_bytes(PHOTO)
    words, _ = posted(
        curl("https://localhost/v1", "m", photo, ServerSettings(uds=Path("/a b"), tls=TlsSettings(photo)))
    )
    assert words[3:7] == ["--unix-socket", "/a b", "--cacert", "AUTHORITY.pem"]
    words, _ = posted(curl("https://a/v1", "m", photo, ServerSettings(tls=TlsSettings(photo, cert_reqs=2))))
    assert words[5:9] == ["--cert", "CLIENT.pem", "--key", "CLIENT.key"]


def test_line_to_try_names_the_program_as_the_shell_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Path(sys.executable).with_name("saccade")
    monkeypatch.setenv("PATH", str(program.parent))
    assert ask_command(DEFAULT_URL, Path("a.png")).startswith("saccade ask a.png ")
    monkeypatch.setenv("PATH", "/nowhere")
    assert ask_command(DEFAULT_URL, Path("a.png")).startswith(f"{program} ask a.png ")


def test_line_of_the_tutorial_is_one_request(tmp_path: Path, posted: Callable[[str], tuple[list[str], Any]]) -> None:
    (tmp_path / "photo.jpg").write_bytes(PHOTO)
    _, line = START.read_text().split("    { printf", 1)
    _, body = posted("{ printf" + line.partition("\n\n")[0])
    assert body["model"] == BUNDLED_NAME
    payload = body["messages"][0]["content"][0]["image_url"]["url"].partition(",")[2]
    assert base64.b64decode(payload) == PHOTO


def test_commands_for_a_model_of_texts_have_no_image() -> None:
    assert "image" not in curl("http://127.0.0.1:8000/v1", "m", None, ServerSettings())
    assert ask_command(DEFAULT_URL, None).endswith('ask "What can you do?"')
