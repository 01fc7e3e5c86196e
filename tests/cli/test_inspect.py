"""`saccade inspect` shows what the server would do."""

from pathlib import Path

import pytest
from chats import picture, reference_messages
from PIL import Image
from reference import Reference

from saccade.cli.main import run


def test_shows_grids_spans_hashes_keys_and_writes_the_resized_picture(
    tiny_qwen3_vl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = [picture(301, 199, 1), picture(64, 96, 2)]
    paths = [tmp_path / f"{number}.png" for number in range(2)]
    for path, image in zip(paths, pictures, strict=True):
        image.save(path)
    assert run(["inspect", str(tiny_qwen3_vl), *map(str, paths), "--question", "Compare."]) == 0
    shown = capsys.readouterr().out
    messages, _ = reference_messages(*pictures, "Compare.")
    expected = Reference(tiny_qwen3_vl).inputs(messages, pictures)
    for grid in expected["image_grid_thw"].tolist():
        assert " x ".join(map(str, grid)) in shown
    num_tokens = expected["input_ids"].shape[1]
    assert f"prompt: {num_tokens} tokens" in shown
    assert shown.count("content_hash") == 2
    assert f"{16 * (num_tokens // 16) - 16}-{16 * (num_tokens // 16)}" in shown  # the last full block has a key
    with Image.open(tmp_path / "0.288x192.png") as written:
        assert written.size == (288, 192)


@pytest.mark.parametrize("content", [b"", b"no picture"])
def test_bad_picture_is_one_sentence(
    tiny_qwen3_vl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    (tmp_path / "bad.png").write_bytes(content)
    assert run(["inspect", str(tiny_qwen3_vl), str(tmp_path / "bad.png")]) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
