"""The page of measured figures is what its state says, and other text of the page stays."""

import json
from pathlib import Path

import pytest

from benchmarks.report import __main__ as program
from benchmarks.report.page import write_page
from benchmarks.report.parts import PARTS, Peers

pytestmark = pytest.mark.ci

FACTS = {"machine": "a machine", "commit": "abc", "date": "2026-01-01", "command": "python -m it"}


def test_committed_page_shows_the_committed_figures(tmp_path: Path) -> None:
    page = tmp_path / "figures.md"
    page.write_text(program.PAGE.read_text())
    write_page(json.loads(program.STATE.read_text()), page)
    assert page.read_text() == program.PAGE.read_text()
    for image in (tmp_path / "images").iterdir():
        assert image.read_text() == (program.PAGE.parent / "images" / image.name).read_text()


def test_best_value_of_a_row_is_bold_whoever_has_it(tmp_path: Path) -> None:
    def rows(system: str, p50: float) -> list[dict[str, object]]:
        figures = {"ttft_p50_ms": p50, "ttft_p99_ms": 2 * p50, "tokens_per_second": 10.0, "pss_mib": 1.0}
        return [{"system": system, "clients": clients, "requests": 200, **figures} for clients in (1, 10)]

    state = {f"ttft: {name}": {"rows": rows(name, p50), **FACTS} for name, p50 in (("Saccade", 20.0), ("vLLM", 10.0))}
    page = tmp_path / "page.md"
    page.write_text(
        "# Figures\n\nmore\n\n<!-- measured: begin (python -m benchmarks.report) -->\nstale\n<!-- measured: end -->\nlast\n"
    )
    write_page(state, page)
    text = page.read_text()
    assert text.startswith("# Figures\n\nmore\n\n<!--")
    assert text.endswith("<!-- measured: end -->\nlast\n")
    assert "stale" not in text
    assert "| 10 | 20 | **10** |" in text
    assert "Measured on a machine; commit abc; 2026-01-01:\n\n    python -m it\n" in text
    assert (tmp_path / "images" / "figures-ttft-p50-ms.svg").read_text().startswith("<svg xmlns=")


def test_parts_without_their_peers_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [part.name for part in PARTS if part.peers]
    files = ["--state", str(tmp_path / "state.json"), "--page", str(tmp_path / "page.md")]
    monkeypatch.setattr("sys.argv", ["report", "--only", *names, *files])
    assert program.main() == 0
    assert capsys.readouterr().out.splitlines()[0] == "ttft: Saccade before vLLM: left out; it needs --vllm"
    assert not (tmp_path / "state.json").exists()


def test_a_part_s_command_has_its_peers() -> None:
    part = next(part for part in PARTS if part.name == "streaming")
    words = part.words(Peers(smg=Path("smg"), turbojpeg=Path("tj")), is_trial=False)
    assert words == ["-m", "benchmarks.gateway", "--only", "streamed answers", "--smg", "smg", "--turbojpeg", "tj"]
