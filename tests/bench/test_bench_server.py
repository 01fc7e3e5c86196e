"""`saccade bench` against the real server."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server import Server, serving

pytestmark = pytest.mark.ci

FLAGS = ("--image-size", "64x48,96x64", "--input-tokens", "5", "--output-tokens", "4", "--num-requests", "6")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


def measured(file: Path, *arguments: str) -> Any:
    """Return what `saccade bench` wrote to *file*."""
    command = [sys.executable, "-m", "saccade.cli.main", "bench", *arguments, *FLAGS, "--json", str(file)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(file.read_text())


def test_one_server(server: Server, tmp_path: Path) -> None:
    flags = ("--concurrency", "1,3", "--repeat-share", "0.5", "--turns", "2", "--video-seconds", "0.5")
    result = measured(tmp_path / "b.json", server.url, *flags)
    for column in result["tables"][0]["columns"]:
        figures = column["figures"]
        num_answered = figures["num_requests"] - figures["num_failed"]  # an answer of this model may have no text
        assert 0 < num_answered <= figures["num_requests"] <= 6
        assert figures["completion_tokens"] == 4
        assert figures["cached_percent"] > 0
        assert figures["vllm:time_to_first_token_seconds"] <= figures["vllm:e2e_request_latency_seconds"]
        assert figures["saccade_engine_stage_seconds encode"] > 0


def test_two_urls(server: Server, tmp_path: Path) -> None:
    result = measured(tmp_path / "b.json", server.url, f"{server.url}/v1", "--concurrency", "2", "--alternations", "2")
    (table,) = result["tables"]
    assert [column["figures"]["num_requests"] for column in table["columns"]] == [12, 12]
    assert [column["figures"].get("cached_percent") for column in table["columns"]] == [0, 0]
    assert all(ratio["low"] <= ratio["high"] for ratio in table["ratios"].values())
    assert "ttft_p50" in table["ratios"]
