"""`saccade inspect` shows what the server would do."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pdfs
import pytest
from chats import random_image, reference_messages
from clips import clip
from PIL import Image
from reference import Reference
from server import free_port

from saccade.cli.bundled import bundled
from saccade.cli.main import run


def test_shows_grids_spans_hashes_keys_and_writes_the_resized_image(
    tiny_qwen3_vl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    images = [random_image(301, 199, 1), random_image(64, 96, 2)]
    paths = [tmp_path / f"{number}.png" for number in range(2)]
    for path, image in zip(paths, images, strict=True):
        image.save(path)
    assert run(["inspect", str(tiny_qwen3_vl), *map(str, paths), "--question", "Compare."]) == 0
    shown = capsys.readouterr().out
    messages, _ = reference_messages(*images, "Compare.")
    expected = Reference(tiny_qwen3_vl).inputs(messages, images)
    for grid in expected["image_grid_thw"].tolist():
        assert " x ".join(map(str, grid)) in shown
    num_tokens = expected["input_ids"].shape[1]
    assert f"prompt: {num_tokens} tokens" in shown
    assert shown.count("content_hash") == 2
    assert f"{16 * (num_tokens // 16) - 16}-{16 * (num_tokens // 16)}" in shown  # the last full block has a key
    assert len(list(tmp_path.glob("*.png"))) == 2  # beside the images nothing is written
    with Image.open(here / "0.288x192.png") as written:
        assert written.size == (288, 192)


@pytest.mark.ci
def test_pdfs_and_videos_are_read_in_a_process_that_is_started(
    tiny_qwen3_vl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    random_image(64, 96, 1).save(tmp_path / "a.png")
    (tmp_path / "two.pdf").write_bytes(pdfs.pdf(pdfs.TEXT, pdfs.SQUARE))
    (tmp_path / "clip.mp4").write_bytes(clip())
    assert run(["inspect", str(tiny_qwen3_vl), "a.png", "two.pdf", "clip.mp4"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for line in (
        "image a.png (PNG, 64x96, orientation 1)",
        "page 1 of two.pdf (PDF, 400x200)",
        "page 2 of two.pdf (PDF, 400x200)",
        "video clip.mp4 (64x48, 12 frames, 4 a second, 6 of them taken)",
    ):
        assert line in shown
    assert {path.name for path in tmp_path.glob("*.*x*.png")} == {
        "a.64x96.png",
        "two.1.384x192.png",
        "two.2.384x192.png",
    }
    with Image.open(tmp_path / "two.2.384x192.png") as square, Image.open(tmp_path / "two.1.384x192.png") as text:
        assert square.getpixel((96, 96)) == (255, 0, 0)
        assert min(text.getpixel((96, 96))) > 250


def test_keys_are_summarised_unless_all_are_requested(
    tiny_qwen3_vl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random_image(301, 199, 1).save(tmp_path / "a.png")
    command = ["inspect", str(tiny_qwen3_vl), str(tmp_path / "a.png"), "--out", str(tmp_path)]
    keys = re.compile(r"^ *(\d+) +\d+-\d+ +[0-9a-f]{32} *$", re.MULTILINE)
    assert run(command) == 0
    few = capsys.readouterr().out
    assert run([*command, "--blocks"]) == 0
    every = capsys.readouterr().out
    count = int(re.findall(r"full KV blocks of 16 tokens: (\d+)", few)[0])
    assert keys.findall(few) == ["0", str(count - 1)]
    assert keys.findall(every) == [str(number) for number in range(count)]
    assert "--blocks" in few
    assert "--blocks" not in every


def test_an_image_alone_is_shown_with_the_bundled_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "one.png", tmp_path / "two.png"]
    for path in paths:
        random_image(64, 96, 2).save(path)
    assert run(["inspect", *map(str, paths), "--out", str(tmp_path)]) == 0
    alone = capsys.readouterr().out
    assert run(["inspect", str(bundled("model")), *map(str, paths), "--out", str(tmp_path)]) == 0
    with_model = capsys.readouterr().out
    assert alone.count("content_hash") == 2
    assert alone.splitlines()[:-1] == with_model.splitlines()[:-1]  # the last line has times


@pytest.mark.parametrize("name", ["missing.png", "/nowhere/missing.png", "owner/model"])
def test_missing_image_is_one_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", name]) == 1
    shown = capsys.readouterr().err
    assert f"There is no image {name}." in shown
    assert "[MODEL] IMAGE" in shown


@pytest.mark.parametrize("content", [b"", b"no image"])
def test_bad_image_is_one_sentence(
    tiny_qwen3_vl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    (tmp_path / "bad.png").write_bytes(content)
    assert run(["inspect", str(tiny_qwen3_vl), str(tmp_path / "bad.png")]) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_chat_that_cannot_be_shown_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = tmp_path / "chat.json"
    chat.write_text("{}")
    nowhere = f"http://127.0.0.1:{free_port()}"
    assert run(["inspect", str(chat), "--gateway", nowhere, "--admin-key", "operator"]) == 1
    assert "--admin-port" in capsys.readouterr().err
    assert run(["inspect", str(chat), "--gateway", nowhere]) == 1
    assert "--admin-key" in capsys.readouterr().err
    assert run(["inspect", str(tmp_path / "none.json"), "--gateway", nowhere, "--admin-key", "operator"]) == 1
    assert "Cannot read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "`messages` is missing."}}', "refused with 400: `messages` is missing."),
        (
            b'{"error": {"message": "no", "param": "x-api-key"}}',
            "refused with 400: the caches of tenants are apart. Pass one of its API keys as --api-key",
        ),
        (b'{"error": {"message": "no", "code": "invalid_api_key"}}', "refused with 400: it has no such --admin-key."),
        (b'{"error": "no"}', "is not an answer of Saccade's admin port."),
        (b"<html>", "refused with 400: the body is not an answer of Saccade's admin port."),
    ],
)
def test_refused_request_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: bytes, said: str
) -> None:
    assert inspect_by_gateway_that_answers(tmp_path, 400, body) == 1
    assert said in capsys.readouterr().err


def test_a_route_of_an_earlier_gateway_has_no_weight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    worker = {"worker": "unix:/w", "chosen": True, "exactness": "EXACT", "exactness_reason": "", "overlap_blocks": 0}
    worker |= {"num_blocks": 1, "cost": {"prompt_tokens": 20, "image_tokens": 0, "decode_blocks": 2, "total": 22}}
    route = {"worker": "unix:/w", "reason": "the least cost", "model": "m", "prompt_tokens": 20, "images": []}
    route |= {"policy": "cost", "candidates": [worker], "excluded": []}
    assert inspect_by_gateway_that_answers(tmp_path, 200, json.dumps(route).encode()) == 0
    assert "cost 22 = 1 x (20 prompt tokens + 0 image tokens) + 2 decode blocks" in capsys.readouterr().out


def test_a_workers_weight_and_share_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    worker = {"worker": "unix:/w", "chosen": True, "exactness": "EXACT", "exactness_reason": "", "overlap_blocks": 0}
    worker |= {"num_blocks": 1, "cost": {"prompt_tokens": 20, "image_tokens": 0, "decode_blocks": 2, "total": 16}}
    worker |= {"recompute_weight": 1.5, "weight": 2.0, "share": 0.1}
    route = {"worker": "unix:/w", "reason": "the least cost", "model": "m", "prompt_tokens": 20, "images": []}
    route |= {"policy": "cost", "candidates": [worker], "excluded": [{"worker": "unix:/b", "reason": "it is cordoned"}]}
    assert inspect_by_gateway_that_answers(tmp_path, 200, json.dumps(route).encode()) == 0
    shown = capsys.readouterr().out
    assert "unix:/w, chosen, a canary with 10 % of the conversations" in shown
    assert "cost 16 = (1.5 x (20 prompt tokens + 0 image tokens) + 2 decode blocks) / weight 2" in shown
    assert "unix:/b, not a candidate: it is cordoned" in shown


def inspect_by_gateway_that_answers(folder: Path, status: int, body: bytes) -> int:
    class Answering(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    (folder / "chat.json").write_text("{}")
    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        answering = threading.Thread(target=server.handle_request)
        answering.start()
        url = f"http://127.0.0.1:{server.server_port}"
        returned = run(["inspect", str(folder / "chat.json"), "--gateway", url, "--admin-key", "operator"])
        answering.join()
    return returned
