"""What the terminal shows of a start."""

import io
import json
import os
import subprocess
from pathlib import Path

import msgspec
import pytest
from fronts import DESCRIPTION
from rich.console import Console
from waiting import wait_until

from saccade.cli.screen import StartProgress, curl, show_summary
from saccade.protocol.engine_ipc import EngineProgress

PATH = {"PATH": os.environ["PATH"]}


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


@pytest.mark.parametrize("model", ["tiny", 'it\'s "mine"'])
@pytest.mark.parametrize("with_key", [False, True])
def test_line_to_paste_is_one_request(model: str, with_key: bool, tmp_path: Path) -> None:
    picture = tmp_path / "it's one.png"
    picture.write_bytes(b"pixels")
    line = curl("http://127.0.0.1:8000/v1", model, picture, with_key)
    shell = ["bash", "-c", f"curl() {{ printf '%s\\0' \"$@\"; }}\n{line}"]
    done = subprocess.run(shell, capture_output=True, text=True, check=True, env={"SACCADE_API_KEY": "k", **PATH})
    words = done.stdout.split("\0")
    assert words[:3] == ["http://127.0.0.1:8000/v1/chat/completions", "-H", "Content-Type: application/json"]
    assert ("Authorization: Bearer k" in words) is with_key
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == model
    assert body["messages"][0]["content"][0]["image_url"]["url"] == "data:image/png;base64,cGl4ZWxz"
