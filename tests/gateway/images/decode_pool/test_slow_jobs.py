"""Slow jobs end when their client leaves, make way for others' images, and pages of a file have their time together."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import decode_servers
import images
import pdfs
import psutil
import pytest
import pytest_asyncio
from tables import table
from waiting import until

from saccade.errors import DeadlineExceeded
from saccade.gateway.config import MediaSettings
from saccade.gateway.images.decode_pool import pool as of_pool
from saccade.gateway.images.decode_pool.pool import DecodePool, PreparedImage
from saccade.gateway.images.decode_pool.queue import FileTime
from saccade.gateway.images.encoded_image import EncodedImage
from saccade.gateway.images.pixels import PixelPreparer
from saccade.gateway.images.processor_cache import ProcessorCache
from saccade.gateway.images.prompt_images import PromptImages
from saccade.media.pdf_pages import PdfPage
from saccade.models import load_layout
from saccade.telemetry import Metrics

pytestmark = pytest.mark.asyncio(loop_scope="module")
FAMILY = "qwen3_vl"
LAYOUT = load_layout(FAMILY)({}, {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3})
SIZE = LAYOUT.image(64, 32, LAYOUT.settings)
IMAGE = images.encode(images.random_image(64, 32), "PNG")
PAGE = PdfPage(0, 64, 32)
PDF = pdfs.pdf(pdfs.SQUARE)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pool() -> AsyncIterator[DecodePool]:
    with decode_servers.shared():
        pool = DecodePool(MediaSettings(num_decode_processes=2, decode_timeout_seconds=60))
    await pool.start()
    yield pool
    await pool.close()


def image(pool: DecodePool, client: str) -> Coroutine[Any, Any, PreparedImage]:
    return pool.prepare_image(IMAGE, FAMILY, LAYOUT.settings, SIZE, client)


def page(pool: DecodePool, client: str, time: FileTime | None = None) -> Coroutine[Any, Any, PreparedImage]:
    return pool.prepare_image(PDF, FAMILY, LAYOUT.settings, SIZE, client, page=PAGE, file_time=time)


JOBS: dict[str, Callable[[DecodePool, str], Coroutine[Any, Any, object]]] = {
    "image": image,
    "page": page,
    "pages": lambda pool, client: pool.pdf_pages(PDF, client),
}


async def let_go(pool: DecodePool, *made: object) -> None:
    pool.release(one.slot.name for one in made if isinstance(one, PreparedImage) and one.slot is not None)
    await until(lambda: not (pool.queue.num_running or pool.num_slots) and len(pool.pids) == 2)


@contextmanager
def suspended(pool: DecodePool) -> Iterator[tuple[int, ...]]:
    """Suspend the processes, as if they worked for long, and resume afterwards those that the pool has not ended."""
    processes = [psutil.Process(pid) for pid in pool.pids]
    for process in processes:
        process.suspend()
    try:
        yield tuple(process.pid for process in processes)
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


@table("job", JOBS.values(), JOBS)
async def test_the_job_of_a_client_that_left_ends(
    job: Callable[[DecodePool, str], Coroutine[Any, Any, object]], pool: DecodePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_pool, "SLOW_SECONDS", 0.01)
    with suspended(pool) as before:
        left = asyncio.create_task(job(pool, "evil"))
        await until(lambda: pool.queue.num_running)
        left.cancel()
        await until(lambda: not pool.queue.num_running)
    await let_go(pool)
    assert len({*before} - {*pool.pids}) == 1


async def test_a_slow_image_makes_way_for_another_client_s(pool: DecodePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_pool, "SLOW_SECONDS", 0.01)
    replaced = pool.num_replaced
    with suspended(pool) as before:
        slow = [asyncio.create_task(image(pool, "evil")) for _ in range(3)]
        await until(lambda: pool.queue.num_running == 2)
        await asyncio.sleep(0.05)
        assert pool.pids == before  # nobody else waits
        made = await image(pool, "lab")
        assert pool.num_replaced >= replaced + 1
    await let_go(pool, made, *await asyncio.gather(*slow))


async def test_pages_without_time_left_are_not_drawn(pool: DecodePool) -> None:
    before, time = pool.pids, FileTime(30.0)
    made = await page(pool, "lab", time)
    assert 0 < time.seconds < 30.0
    time.seconds = 0.0
    with pytest.raises(DeadlineExceeded, match="the PDF takes longer than 30 seconds; send fewer at a time"):
        await page(pool, "lab", time)
    await let_go(pool, made)
    assert pool.pids == before


async def test_a_page_that_uses_up_the_time_of_its_file_ends(pool: DecodePool) -> None:
    encoded, time = pdfs.laughs(), FileTime(0.2)
    with pytest.raises(DeadlineExceeded, match=r"takes longer than 0\.2 seconds"):
        await pool.prepare_image(encoded, FAMILY, LAYOUT.settings, SIZE, page=PAGE, file_time=time)
    await let_go(pool)


class Listening(DecodePool):
    """Notes whose time a page takes."""

    def __init__(self) -> None:
        super().__init__(MediaSettings(num_decode_processes=1))
        self.times: list[FileTime | None] = []

    async def prepare_image(self, *arguments: Any) -> PreparedImage:  # type: ignore[override]
        self.times.append(arguments[-1])
        return PreparedImage(None, b"", 0, of_pool.StageSeconds(), 0.0)


async def test_pages_of_a_file_share_its_time() -> None:
    pool = Listening()
    preparer = PixelPreparer(pool, ProcessorCache(pool, 0), Metrics(), 1.0)
    files = [bytes(PDF), PDF + b" "]
    shown = [
        EncodedImage("f", file, 1, bytes([number, place]) * 16, SIZE, LAYOUT.settings, page=PdfPage(number, 64, 32))
        for place, file in enumerate(files)
        for number in range(3)
    ]
    shown.append(EncodedImage("f", IMAGE, 1, b"i" * 32, SIZE, LAYOUT.settings))
    await preparer.prepare_images(FAMILY, PromptImages(tuple(shown), ((),) * len(shown)), b"", None)
    first, second, no_file = pool.times[:3], pool.times[3:6], pool.times[6]
    assert no_file is None
    assert [len({id(time) for time in times}) for times in (first, second, first + second)] == [1, 1, 2]
