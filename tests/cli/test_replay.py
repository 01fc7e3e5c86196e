"""`saccade replay` from outside: exit status, and what it shows."""

from dataclasses import replace
from pathlib import Path

import engines
import msgspec
import pytest
import recordings

from saccade.cli.main import run
from saccade.engine.recording import Record, Recording, StepCollected


@pytest.fixture
def recorded(tiny_qwen3_vl: Path, tmp_path: Path) -> Path:
    """A segment with an image and its pixels."""
    return record(tiny_qwen3_vl, tmp_path)


def record(model: Path, folder: Path, record_pixels: bool = True) -> Path:
    with recordings.recording_engine(model, folder, threads=1, record_pixels=record_pixels) as subject:
        engines.drain(subject, engines.request(model, [5, ((1, 4, 6), 1), 9]))
    [file] = recordings.segments(folder)
    return file


def test_an_equal_replay_ends_with_0(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(recorded)]) == 0
    shown = capsys.readouterr().out
    assert "to the last bit" in shown
    assert "8 steps with 8 tokens were compared; 0 of 1 sequences differ." in shown


def test_a_difference_is_shown_and_ends_with_1(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def tamper(record: Record) -> Record:
        if not isinstance(record, StepCollected) or record.output.number != 3:
            return record
        return StepCollected(msgspec.structs.replace(record.output, token_ids=[0]))

    [got] = [
        record.output.token_ids[0]
        for record in Recording(recorded).records()
        if isinstance(record, StepCollected) and record.output.number == 3
    ]
    recordings.rewrite(recorded, tamper)
    assert run(["replay", str(recorded), "--device", "cpu"]) == 1
    shown = capsys.readouterr().out
    assert "First difference: step 3, row 0, sequence 1\n  expected token 0\n  got      token " + str(got) in shown
    assert "1 of 1 sequences differ" in shown


def test_missing_images_are_listed_and_end_with_2(
    tiny_qwen3_vl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["replay", str(record(tiny_qwen3_vl, tmp_path, record_pixels=False))]) == 2
    shown = capsys.readouterr().err
    assert "1 images:\nstep 1, encoder output 1: grid 1x4x6, 18432 bytes, blake3 " in shown


@pytest.mark.parametrize(("content", "words"), [(b"abc", "not a recording"), (None, "Cannot read")])
def test_file_that_is_no_recording_ends_with_2(
    content: bytes | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    assert run(["replay", str(tmp_path / "file")]) == 2
    assert words in capsys.readouterr().err


def test_a_moved_model_is_named(
    recorded: Path, tiny_qwen3_vl: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recording = Recording(recorded)
    recordings.rewrite(recorded, config=replace(recording.header.config, model_dir="/nowhere/at/all"))
    assert run(["replay", str(recorded)]) == 2
    assert "Name another with --model." in capsys.readouterr().err


def test_another_machine_is_named_and_compared_by_tokens(
    recorded: Path, tiny_qwen3_vl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Recording(recorded).header.machine
    recordings.rewrite(recorded, machine=msgspec.structs.replace(machine, processor="an abacus"))
    assert run(["replay", str(recorded), "--model", str(tiny_qwen3_vl)]) == 0
    shown = capsys.readouterr().out
    assert f"processor: recorded with an abacus, here {machine.processor}" in shown
    assert "Compared are token ids only." in shown
