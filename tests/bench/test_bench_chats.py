"""What is sent: equal for equal seeds, distinct otherwise, and as the settings say."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from tables import table

from saccade.bench.chats import Chats
from saccade.bench.image_files import image_files
from saccade.bench.images import FPS, Photographer
from saccade.bench.load import arrivals
from saccade.bench.settings import BenchSettings
from saccade.errors import StartupError

SMALL = BenchSettings(image_size=((64, 48),), input_tokens=5)


def contents(chats: Chats, number: int) -> list[Any]:
    return [json.loads(bytes(message)) for message in chats.messages(number)]


def media(chats: Chats, number: int) -> list[bytes]:
    """The images and videos of a conversation."""
    urls = [part[part["type"]]["url"] for part in contents(chats, number)[0] if part["type"] != "text"]
    return [base64.b64decode(url.partition(",")[2]) for url in urls]


def test_a_seed_decides_every_byte() -> None:
    settings = BenchSettings(image_size=((64, 48), (80, 80)), turns=2, video_seconds=0.5, images_per_request=2)
    first, again, other = (
        [Chats(settings, seed, (0, 0)).messages(number) for number in range(3)] for seed in (1, 1, 2)
    )
    assert first == again
    assert all(one != two for one, two in zip(first, other, strict=True))


def test_images_are_distinct_in_and_between_runs() -> None:
    images = [media(Chats(SMALL, 1, run), number)[0] for run in ((0, 0), (0, 1), (1, 0)) for number in range(20)]
    assert len(set(images)) == 60
    with Image.open(io.BytesIO(images[0])) as image:
        assert (image.format, image.size) == ("JPEG", (64, 48))


def test_runs_have_the_same_sizes() -> None:
    settings = BenchSettings(image_size=((16, 16), (24, 16), (32, 16)))
    sizes = [
        [Image.open(io.BytesIO(media(Chats(settings, 1, run), number)[0])).size for number in range(30)]
        for run in ((0,), (1,))
    ]
    assert sizes[0] == sizes[1]
    assert set(sizes[0]) == set(settings.image_size)


def test_files_have_the_size_of_photos() -> None:
    """A photo of this size and quality has some 50 to 150 kB; a drawing has 10, noise has 250."""
    assert 50_000 < len(Photographer(1, 640, 480).jpeg(np.random.default_rng(1))) < 150_000


@table(("share", "num_distinct"), [(0.0, 40), (0.5, 20), (0.75, 10), (1.0, 1)])
def test_repeats(share: float, num_distinct: int) -> None:
    settings = BenchSettings(image_size=((16, 16),), repeat_share=share)
    chats = Chats(settings, 3, (0,))
    assert len({media(chats, number)[0] for number in range(40)}) == num_distinct
    assert len({contents(chats, number)[0][-1]["text"] for number in range(40)}) == 40


def test_parts_of_a_conversation() -> None:
    settings = BenchSettings(image_size=((64, 48),), images_per_request=2, video_seconds=1, turns=3, input_tokens=7)
    first, *others = contents(Chats(settings, 1, ()), 4)
    assert [part["type"] for part in first] == ["image_url", "image_url", "video_url", "text"]
    assert [len(text.split()) for text in (first[-1]["text"], *others)] == [7, 7, 7]
    with av.open(io.BytesIO(media(Chats(settings, 1, ()), 4)[-1])) as clip:
        assert len(list(clip.decode(video=0))) == FPS


def test_a_video_of_odd_sides() -> None:
    with av.open(io.BytesIO(Photographer(1, 65, 33).clip(np.random.default_rng(1), 0.2))) as clip:
        assert (clip.streams.video[0].width, clip.streams.video[0].height) == (64, 32)


def test_text_only() -> None:
    (content,) = contents(Chats(BenchSettings(images_per_request=0), 1, ()), 0)
    assert [part["type"] for part in content] == ["text"]


def test_images_of_a_folder_are_sent_in_turn(tmp_path: Path) -> None:
    for name in ("a.png", "b.jpg", "c.txt"):
        (tmp_path / name).write_bytes(name.encode())
    chats = Chats(BenchSettings(), 1, (), image_files(tmp_path))
    shown = [media(chats, number)[0] for number in range(4)]
    assert set(shown) == {b"a.png", b"b.jpg"}
    assert shown[:2] == shown[2:]
    with pytest.raises(StartupError, match=r"no images: files that end with \.jpg"):
        image_files(tmp_path / "nothing")


def test_arrivals_are_a_poisson_process() -> None:
    times = arrivals(50.0, np.random.default_rng(1), 2000, None)
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.1)
    assert arrivals(50.0, np.random.default_rng(1), None, 1.0) == [one for one in times if one < 1.0]
