"""The fork server by itself, and what a decode process takes."""

import asyncio
import os
import re
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import bitmaps
import clips
import images
import pdfs
import pytest
from PIL import Image
from tables import table

from saccade import models
from saccade.gateway.images.decode_pool.job import (
    PID,
    READY,
    ImageAnswer,
    PdfJob,
    PixelJob,
    VideoHeaderJob,
)
from saccade.gateway.images.decode_pool.server import DecodeProcess, DecodeServer
from saccade.media.header import ImageLimits, read_header
from saccade.media.pdf_pages import BYTES_PER_PIXEL, PdfLimits, PdfPage
from saccade.media.video_header import VideoLimits, decoded_bytes
from saccade.models import files, load_layout, load_video_layout
from saccade.models.family import Layout, VideoOptions
from saccade.protocol.media import ImageLayout
from saccade.protocol.model_files import CONFIG
from saccade.transport.shared_memory import SlotPool, open_descriptor

pytestmark = pytest.mark.ci

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
"""What allocators keep for the next image."""


def test_gateway_that_is_gone_before_the_start_is_no_error() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()
        arguments = ["--fd", str(theirs.fileno()), "--memory-bytes", "1"]
        process = subprocess.run(
            [sys.executable, "-m", "saccade.gateway.images.decode_pool.process", *arguments],
            pass_fds=[theirs.fileno()],
            capture_output=True,
            timeout=60,
            check=False,
        )
    assert (process.returncode, process.stderr) == (0, b"")


@pytest.mark.parametrize("unread", ["that it is ready", "that a process is there", "how a process is confined"])
def test_gateway_that_leaves_something_unread_is_no_error(unread: str) -> None:
    """The kernel then resets the connection, as after a start that another process refuses."""
    ours, theirs = socket.socketpair()
    job, its_job = socket.socketpair()
    arguments = ["--fd", str(theirs.fileno()), "--memory-bytes", str(MEMORY_BYTES)]
    command = [sys.executable, "-m", "saccade.gateway.images.decode_pool.process", *arguments]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE) as process, theirs, its_job:
        theirs.close()
        select.select([ours], [], [], 60)
        if unread != "that it is ready":
            assert ours.recv(len(READY)) == READY
            socket.send_fds(ours, [b"f"], [its_job.fileno()])
            its_job.close()
            select.select([ours], [], [], 60)
            select.select([job], [], [], 60)
        if unread == "how a process is confined":
            _, descriptors, _, _ = socket.recv_fds(ours, PID.size, 1)
            job.close()
            select.select(descriptors, [], [], 60)
            os.close(descriptors[0])
        ours.close()
        job.close()
        assert process.stderr is not None
        assert (process.stderr.read(), process.wait(60)) == (b"", 0)


@pytest.fixture(scope="module")
def server() -> Iterator[DecodeServer]:
    server = DecodeServer(MEMORY_BYTES)
    server.start()
    yield server
    server.stop()


def worst(kind: str, side: int) -> bytes:
    """Return a square image of the kind that takes most memory for its pixels: what Pillow keeps, turns and blends."""
    turned = Image.Exif()
    turned[images.ORIENTATION] = 6
    slope = Image.linear_gradient("L").resize((side, side))
    match kind.split():
        case ["png", "palette"]:
            return images.encode(slope.convert("P"), "PNG", compress_level=1, transparency=3, exif=turned)
        case ["png", "16-bit"]:
            return images.encode(slope.convert("I;16"), "PNG", compress_level=1, exif=turned)
        case ["png", mode, "upright"]:
            return images.encode(Image.merge("RGBA", [slope] * 4).convert(mode), "PNG", compress_level=1)
        case ["png", mode]:
            return images.encode(Image.merge("RGBA", [slope] * 4).convert(mode), "PNG", compress_level=1, exif=turned)
        case ["jpeg", mode]:
            whole = Image.merge(mode, [slope] * (4 if mode == "CMYK" else 3))
            return images.encode(whole, "JPEG", quality=30, progressive=True, subsampling=0, exif=turned)
        case ["bmp", "runs", bits]:
            return bitmaps.bmp(int(bits), runs_of(side), size=(side, side), coding={"8": 1, "4": 2}[bits])
        case ["bmp", "RGBA"]:
            masks = (0xFF0000, 0xFF00, 0xFF, 0xFF000000)
            drawn = Image.merge("RGBA", [slope] * 4).tobytes()
            return bitmaps.bmp(32, drawn, size=(side, side), coding=3, header=56, masks=masks)
        case ["bmp", mode]:
            return images.encode(Image.merge("RGB", [slope] * 3).convert(mode), "BMP")
        case ["gif"]:
            return images.encode(slope.convert("P"), "GIF", transparency=3)
        case ["webp", mode]:
            return images.encode(Image.new(mode, (side, side), "red"), "WEBP", quality=1, method=0, exif=turned)
        case ["webp"]:
            frames = [Image.new("RGBA", (side, side), colour) for colour in ("red", "blue")]
            return images.encode(frames[0], "WEBP", quality=1, method=0, save_all=True, append_images=frames[1:])
    mode = kind.split()[1]
    whole = Image.merge("RGBA", [slope] * 4).convert(mode)
    return images.encode(whole, "AVIF", speed=10, subsampling="4:4:4", exif=turned, max_threads=1)


def runs_of(side: int) -> bytes:
    """Return the runs of an image of *side* x *side*, each of 8 pixels."""
    return (b"\x08\x11" * (side // 8 + 1) + b"\0\0") * side + b"\0\1"


KINDS = [
    *("png palette", "png 16-bit", "png RGBA", "png LA", "png RGB upright", "png RGBA upright"),
    *("jpeg RGB", "jpeg CMYK"),
    *("gif", "webp RGBA", "webp", "avif RGB", "avif RGBA"),
    *("bmp P", "bmp RGB", "bmp RGBA", "bmp runs 8", "bmp runs 4"),
]


LARGEST = {"bmp RGB": 4720, "bmp RGBA": 4080}
"""The side of the largest square images of 64 MiB; those of other kinds have the most pixels."""


def peak_bytes(process: DecodeProcess) -> int:
    """The most memory that *process* ever had resident."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10


def decoded(
    server: DecodeServer, encoded: bytes, family: str = FAMILY, layout_of: Layout = LAYOUT, dtype: str = "uint8"
) -> tuple[ImageAnswer, int]:
    """Return the answer of a new process for *encoded*, and the memory it took for it at most."""

    def layout(image: bytes) -> ImageLayout:
        made = layout_of.image(*read_header(image).upright, layout_of.settings)
        return made if dtype == "uint8" else layout_of.external(made, dtype)

    async def ask() -> tuple[ImageAnswer, int]:
        process, slots = server.fork(), SlotPool(1 << 30)
        try:
            for image in (images.encode(images.random_image(64, 64), "JPEG"), encoded):
                expected = layout(image)
                slot = slots.acquire(expected.num_pixel_bytes)
                assert slot is not None
                before = peak_bytes(process)
                job = PixelJob(
                    image, family, dict(layout_of.settings), expected, ImageLimits(), VideoLimits(), slot=slot.ref
                )
                descriptor = open_descriptor(slot.ref)
                answer = await asyncio.wait_for(process.exchange(job, descriptor), 120)
                os.close(descriptor)
                assert answer.inline is None
            return answer, peak_bytes(process) - before
        finally:
            process.kill()
            slots.close()

    return asyncio.run(ask())


@pytest.mark.ci
@table("kind", KINDS)
def test_memory_stays_within_the_announced_bytes(server: DecodeServer, kind: str) -> None:  # F6
    encoded = worst(kind, 2800)
    answer, peak = decoded(server, encoded)
    assert answer.failure is None
    assert peak < read_header(encoded).decoded_bytes + 3 * len(encoded) + NOISE_BYTES


@pytest.mark.conformance
@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_accepted_image_fits_a_process(server: DecodeServer, kind: str) -> None:  # F6
    encoded = worst(kind, LARGEST.get(kind, 7071))
    answer, peak = decoded(server, encoded)
    assert answer.failure is None
    assert peak < read_header(encoded).decoded_bytes + 3 * len(encoded) + NOISE_BYTES
    assert peak < MEMORY_BYTES


SIZES = {"square": (7071, 7071), "wide": (32_768, 1525), "tall": (1525, 32_768)}
"""The pixel limit and the side limit."""

FAMILIES = {
    "qwen2_vl": "qwen2_vl", "qwen2_5_vl": "qwen2_5_vl", "qwen3_vl": "qwen3_vl", "qwen3_5": "qwen3_5",
    "kimi_k25": "kimi_k25", "kimi_k3": "kimi_k3", "phi3_v": "phi3_v", "llava": "llava_next", "smolvlm": "smolvlm", "paddleocr_vl": "paddleocr_vl", "glm4v": "glm4v_moe", "glm_ocr": "glm_ocr", "internvl": "internvl",
    "gemma4": "gemma4", "gemma4_unified": "gemma4_unified", "mistral3": "mistral3", "gemma3": "gemma3",
}  # fmt: skip
"""Every family, and a release of it."""


@cache
def at_the_limit(shape: str) -> bytes:
    slope = Image.linear_gradient("L").resize(SIZES[shape])
    return images.encode(Image.merge("RGB", [slope] * 3), "JPEG", quality=30)


def check_peak(server: DecodeServer, folder: Path, family: str, shape: str, dtype: str) -> None:
    """Beyond the slot itself, an image takes what its header's estimate says, whatever the family does with it."""
    given = files.read_model_files(folder)
    config = files.parse_json(given, CONFIG)
    assert models.family_of(config) == family
    layout = load_layout(family)(config, files.image_processor(given, models.families()[family]))
    encoded = at_the_limit(shape)
    header = read_header(encoded)
    expected = layout.image(*header.upright, layout.settings)
    expected = expected if dtype == "uint8" else layout.external(expected, dtype)
    answer, peak = decoded(server, encoded, family, layout, dtype)
    assert answer.failure is None
    assert peak < header.decoded_bytes + expected.num_pixel_bytes + NOISE_BYTES
    assert peak < MEMORY_BYTES


def test_every_family_is_measured() -> None:  # A12
    # What a library's processors take depends on the checkpoint; the limit holds for them too.
    own = {name for name, family in models.families().items() if family.takes_images and family.library is None}
    assert set(FAMILIES) == own


@pytest.mark.ci
@table("family", FAMILIES)
def test_family_stays_within_the_announced_bytes(
    server: DecodeServer, family: str, checkpoint: Callable[[str], Path]
) -> None:  # A12
    check_peak(server, checkpoint(FAMILIES[family]), family, "square", "uint8")


@pytest.mark.conformance
@pytest.mark.sampled(40)
@pytest.mark.parametrize("dtype", ["uint8", "float32", "bfloat16"])
@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_pixel_form_stays_within_the_announced_bytes(
    server: DecodeServer, family: str, shape: str, dtype: str, checkpoint: Callable[[str], Path]
) -> None:  # A12
    if dtype == "uint8" or models.families()[family].external_grid is not None:
        check_peak(server, checkpoint(FAMILIES[family]), family, shape, dtype)


@pytest.mark.conformance
@pytest.mark.parametrize("codec", ["h264", "hevc", "vp9"])
def test_video_stays_within_the_announced_bytes(server: DecodeServer, codec: str) -> None:  # F6
    encoded = clips.clip(codec, 2048, 1152, 6)
    layout_of = load_video_layout("qwen2_vl")({}, {}, {})
    settings = layout_of.settings_for(VideoOptions(max_pixels=16 << 20))

    async def ask() -> tuple[int, int]:
        process, slots = server.fork(), SlotPool(1 << 30)
        try:
            before = peak_bytes(process)
            header = (await process.exchange(VideoHeaderJob(encoded, VideoLimits()))).video_header
            assert header is not None
            layout = layout_of.video(header, settings)
            slot = slots.acquire(layout.num_pixel_bytes)
            assert slot is not None
            job = PixelJob(
                encoded, "qwen2_vl", dict(settings), layout, ImageLimits(), VideoLimits(), header, slot=slot.ref
            )
            descriptor = open_descriptor(slot.ref)
            answer = await asyncio.wait_for(process.exchange(job, descriptor), 120)
            os.close(descriptor)
            assert answer.failure is None
            return peak_bytes(process) - before - layout.num_pixel_bytes, decoded_bytes(header)
        finally:
            process.kill()
            slots.close()

    taken, told = asyncio.run(ask())
    assert taken < told + 3 * len(encoded)


@pytest.mark.conformance
def test_page_of_a_pdf_stays_within_the_announced_bytes(server: DecodeServer) -> None:  # F6
    encoded = pdfs.pdf(pdfs.TEXT, box=b"0 0 3500 3500")

    async def ask() -> tuple[int, PdfPage]:
        process, slots = server.fork(), SlotPool(1 << 30)
        try:
            before = peak_bytes(process)
            [page] = (await process.exchange(PdfJob(encoded, PdfLimits(ImageLimits())))).pages or []
            layout = LAYOUT.image(page.width, page.height, LAYOUT.settings)
            slot = slots.acquire(layout.num_pixel_bytes)
            assert slot is not None
            settings, limits = dict(LAYOUT.settings), (ImageLimits(), VideoLimits())
            job = PixelJob(encoded, FAMILY, settings, layout, *limits, page=page, slot=slot.ref)
            descriptor = open_descriptor(slot.ref)
            answer = await asyncio.wait_for(process.exchange(job, descriptor), 120)
            os.close(descriptor)
            assert answer.failure is None
            return peak_bytes(process) - before, page
        finally:
            process.kill()
            slots.close()

    peak, page = asyncio.run(ask())
    assert (page.width, page.height) == (7000, 7000)
    assert peak < page.width * page.height * BYTES_PER_PIXEL + NOISE_BYTES
