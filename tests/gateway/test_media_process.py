"""The fork server by itself, and what a decode process takes."""

import asyncio
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pictures
import pytest
from PIL import Image

from saccade.gateway.media_job import PictureAnswer, PictureJob
from saccade.gateway.media_server import DecodeProcess, DecodeServer
from saccade.media.header import PictureLimits, read_header
from saccade.models import load_layout
from saccade.transport.shared_memory import SlotPool

FAMILY = "qwen3_vl"
LAYOUT = load_layout(FAMILY)(
    {"image_token_id": 7},
    {
        "size": {"shortest_edge": 4096, "longest_edge": 1 << 20},
        "patch_size": 16,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    },
)
MEMORY_BYTES = 1 << 30
NOISE_BYTES = 40 << 20
"""What allocators keep for the next picture."""


def test_gateway_that_is_gone_before_the_start_is_no_error() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()
        arguments = ["--fd", str(theirs.fileno()), "--memory-bytes", "1"]
        process = subprocess.run(
            [sys.executable, "-m", "saccade.gateway.media_process", *arguments],
            pass_fds=[theirs.fileno()],
            capture_output=True,
            timeout=60,
            check=False,
        )
    assert (process.returncode, process.stderr) == (0, b"")


@pytest.fixture(scope="module")
def server() -> Iterator[DecodeServer]:
    server = DecodeServer(MEMORY_BYTES)
    server.start()
    yield server
    server.stop()


def worst(kind: str, side: int) -> bytes:
    """Return a square picture of the kind that takes most memory for its pixels: what Pillow keeps, turns and blends."""
    turned = Image.Exif()
    turned[pictures.ORIENTATION] = 6
    slope = Image.linear_gradient("L").resize((side, side))
    match kind.split():
        case ["png", "palette"]:
            return pictures.encode(slope.convert("P"), "PNG", compress_level=1, transparency=3, exif=turned)
        case ["png", "16-bit"]:
            return pictures.encode(slope.convert("I;16"), "PNG", compress_level=1, exif=turned)
        case ["png", mode, "upright"]:
            return pictures.encode(Image.merge("RGBA", [slope] * 4).convert(mode), "PNG", compress_level=1)
        case ["png", mode]:
            return pictures.encode(Image.merge("RGBA", [slope] * 4).convert(mode), "PNG", compress_level=1, exif=turned)
        case ["jpeg", mode]:
            whole = Image.merge(mode, [slope] * (4 if mode == "CMYK" else 3))
            return pictures.encode(whole, "JPEG", quality=30, progressive=True, subsampling=0, exif=turned)
        case ["gif"]:
            return pictures.encode(slope.convert("P"), "GIF", transparency=3)
        case ["webp", mode]:
            return pictures.encode(Image.new(mode, (side, side), "red"), "WEBP", quality=1, method=0, exif=turned)
        case ["webp"]:
            frames = [Image.new("RGBA", (side, side), colour) for colour in ("red", "blue")]
            return pictures.encode(frames[0], "WEBP", quality=1, method=0, save_all=True, append_images=frames[1:])
    mode = kind.split()[1]
    whole = Image.merge("RGBA", [slope] * 4).convert(mode)
    return pictures.encode(whole, "AVIF", speed=10, subsampling="4:4:4", exif=turned, max_threads=1)


KINDS = [
    *("png palette", "png 16-bit", "png RGBA", "png LA", "png RGB upright", "png RGBA upright"),
    *("jpeg RGB", "jpeg CMYK"),
    *("gif", "webp RGBA", "webp", "avif RGB", "avif RGBA"),
]


def peak_bytes(process: DecodeProcess) -> int:
    """The most memory that *process* ever had resident."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10


def decoded(server: DecodeServer, encoded: bytes) -> tuple[PictureAnswer, int]:
    """Return the answer of a new process for *encoded*, and the memory it took for it at most."""

    async def ask() -> tuple[PictureAnswer, int]:
        process, slots = server.fork(), SlotPool(256 << 20)
        try:
            for picture in (pictures.encode(pictures.picture(64, 64), "JPEG"), encoded):
                layout = LAYOUT.picture(*read_header(picture).upright, LAYOUT.settings)
                slot = slots.acquire(layout.num_pixel_bytes)
                assert slot is not None
                before = peak_bytes(process)
                job = PictureJob(picture, FAMILY, dict(LAYOUT.settings), layout, PictureLimits(), slot.ref)
                answer = await asyncio.wait_for(process.exchange(job), 120)
            return answer, peak_bytes(process) - before
        finally:
            process.kill()
            slots.close()

    return asyncio.run(ask())


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_what_the_budget_was_told(server: DecodeServer, kind: str) -> None:  # F6
    encoded = worst(kind, 2800)
    answer, peak = decoded(server, encoded)
    assert answer.failure is None
    assert peak < read_header(encoded).decoded_bytes + 3 * len(encoded) + NOISE_BYTES


@pytest.mark.conformance
@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_accepted_picture_fits_a_process(server: DecodeServer, kind: str) -> None:  # F6
    encoded = worst(kind, 7071)
    answer, peak = decoded(server, encoded)
    assert answer.failure is None
    assert peak < read_header(encoded).decoded_bytes + 3 * len(encoded) + NOISE_BYTES
    assert peak < MEMORY_BYTES
