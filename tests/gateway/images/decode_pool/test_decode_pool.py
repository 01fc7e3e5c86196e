"""The pool of decode processes: good images, bad ones, and processes that die."""

import asyncio
import contextlib
import errno
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import attacks
import clips
import decode_servers
import images
import numpy as np
import pdfs
import psutil
import pytest
import pytest_asyncio
import structlog
from tables import table
from waiting import until

from saccade.errors import (
    DeadlineExceeded,
    Draining,
    ImageTooLarge,
    InternalError,
    InvalidImage,
    RequestError,
    StartupError,
)
from saccade.gateway.config import MediaSettings
from saccade.gateway.confinement import LEFT_OPEN, MEASURES, SECCOMP
from saccade.gateway.images.decode_pool.pool import DecodePool, PreparedImage, log_confinement
from saccade.gateway.images.decode_pool.server import DecodeProcess, DecodeServer
from saccade.media.decode import decode
from saccade.media.header import ImageLimits, read_header
from saccade.models import load_layout, load_pixels
from saccade.transport.shared_memory import FOLDER, read_slot

pytestmark = pytest.mark.asyncio(loop_scope="module")
FAMILY = "qwen3_vl"
LAYOUT = load_layout(FAMILY)(
    {"image_token_id": 7},
    {
        "size": {"shortest_edge": 4096, "longest_edge": 16_777_216},
        "patch_size": 16,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    },
)
JPEG = images.encode(images.random_image(320, 240), "JPEG")
LARGE = (6000, 6000)  # decoding takes a good part of a second


def _open() -> DecodePool:
    return DecodePool(MediaSettings(num_decode_processes=2, decode_timeout_seconds=60, shared_memory_bytes=256 << 20))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared() -> AsyncIterator[DecodePool]:
    pool = _open()
    await pool.start()
    yield pool
    await pool.close()


@pytest.fixture
def pool(shared: DecodePool) -> DecodePool:
    assert (shared.queue.num_running, shared.queue.num_waiting, shared.num_slots, shared.queue.in_flight_bytes) == (
        0,
        0,
        0,
        0,
    )
    return shared


async def _ask(pool: DecodePool, encoded: bytes) -> PreparedImage:
    try:
        layout = LAYOUT.image(*read_header(encoded).upright, LAYOUT.settings)
    except RequestError:
        layout = LAYOUT.image(32, 32, LAYOUT.settings)  # the pool must see for itself
    return await pool.prepare_image(encoded, FAMILY, LAYOUT.settings, layout)


def _expected(encoded: bytes) -> bytes:
    layout = LAYOUT.image(*read_header(encoded).upright, LAYOUT.settings)
    out = np.empty(layout.pixel_shape, np.uint8)
    load_pixels(FAMILY)(LAYOUT.settings).write_pixels(decode(encoded, ImageLimits()), layout, out)
    return out.tobytes()


async def _check(pool: DecodePool, encoded: bytes = JPEG) -> None:
    """Ask for an image, compare its patches, and give its slot back."""
    prepared = await _ask(pool, encoded)
    assert prepared.slot is not None
    assert read_slot(prepared.slot) == _expected(encoded)
    assert prepared.seconds.decode > 0
    assert prepared.seconds.preprocess > 0
    pool.release([prepared.slot.name])


@table("name", ["png 1x1", "avif", "jpeg orientation 6", "png RGBA", "apng", "jpeg CMYK", "webp lossy"])
async def test_patches_lie_in_the_slot(pool: DecodePool, name: str) -> None:  # A7
    avif = {"avif": images.turned(6, "AVIF")}
    await _check(pool, (images.corpus() | avif)[name])


async def test_descriptors_of_slots_are_given_back(pool: DecodePool) -> None:
    await _check(pool)
    gc.collect()  # what other tests left would close meanwhile
    before = set(os.listdir("/proc/self/fd"))
    for encoded in (JPEG, JPEG[:60], JPEG[: len(JPEG) // 2]):
        with contextlib.suppress(RequestError):
            await _check(pool, encoded)
    assert set(os.listdir("/proc/self/fd")) <= before


async def test_many_images_at_once(pool: DecodePool) -> None:
    tasks = [asyncio.create_task(_check(pool)) for _ in range(40)]
    await asyncio.sleep(0)
    assert pool.queue.num_running == 2
    assert pool.queue.num_waiting == 38
    await asyncio.gather(*tasks)


PNG = images.encode(images.random_image(200, 150), "PNG")
BAD = {
    "no bytes": b"",
    "no image": b"this is text, not an image",
    "a page": b"<html><body>404</body></html>",
    "truncated jpeg": JPEG[: len(JPEG) // 2],
    "truncated header": JPEG[:60],
    "truncated png": PNG[: len(PNG) // 2],
    "broken chunk": PNG.replace(b"IDAT", b"IDAX", 1),
    "broken pixels": PNG[:60] + b"\0" * 40 + PNG[100:],
    "20000 x 20000": images.png(20_000, 20_000),
    "1 x 65500": images.png(1, 65_500),
    "zero sides": images.png(0, 0),
}


@table("name", BAD)
async def test_a_bad_image_harms_only_itself(pool: DecodePool, name: str) -> None:
    before = pool.pids
    with pytest.raises(RequestError) as caught:
        await _ask(pool, BAD[name])
    assert caught.value.code in ("invalid_image", "image_too_large", "unsupported_image_format")
    await _check(pool)
    assert pool.pids == before


@pytest.mark.ci
@table("name", attacks.CORPUS)
async def test_an_attack_harms_only_itself(pool: DecodePool, name: str) -> None:  # F6
    make, sound = attacks.CORPUS[name]
    before, replaced = pool.pids, pool.num_replaced
    try:
        prepared = await _ask(pool, make())
    except RequestError as error:
        assert not sound
        assert error.code in ("invalid_image", "image_too_large", "unsupported_image_format")  # noqa: PT017
    else:
        assert sound
        assert prepared.slot is not None
        pool.release([prepared.slot.name])
    await _check(pool)
    assert (pool.pids, pool.num_replaced) == (before, replaced)


async def test_a_layout_of_another_image_is_refused(pool: DecodePool) -> None:
    with pytest.raises(InternalError):
        await pool.prepare_image(JPEG, FAMILY, LAYOUT.settings, LAYOUT.image(240, 320, LAYOUT.settings))
    await _check(pool)


async def test_killed_process_loses_no_answer(pool: DecodePool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    exchange = DecodeProcess.exchange

    def noted(process: DecodeProcess, *arguments: Any) -> Any:
        asked.append(process.pid)
        return exchange(process, *arguments)

    monkeypatch.setattr(DecodeProcess, "exchange", noted)
    replaced, before = pool.num_replaced, pool.pids
    for pid in before:
        os.kill(pid, signal.SIGSTOP)
    task = asyncio.create_task(_ask(pool, JPEG))
    await until(lambda: asked)
    # The idle one must live: killed too, it could still be given the image before its end is seen.
    (busy,) = asked
    for pid in {*before} - {busy}:
        os.kill(pid, signal.SIGCONT)
    os.kill(busy, signal.SIGKILL)
    prepared = await task
    assert prepared.slot is not None
    assert read_slot(prepared.slot) == _expected(JPEG)
    pool.release([prepared.slot.name])
    await until(lambda: not psutil.pid_exists(busy))
    await asyncio.gather(*(_check(pool) for _ in range(4)))
    await until(lambda: pool.num_replaced == replaced + 1 and len(pool.pids) == 2)


async def test_an_image_that_ends_its_processes_costs_two(pool: DecodePool) -> None:
    replaced, ended = pool.num_replaced, set[int]()
    task = asyncio.create_task(_ask(pool, images.bomb(*LARGE)))
    while not task.done():
        if pool.queue.num_running and not ended & set(pool.pids) and len(pool.pids) == 2:
            ended.update(pool.pids)
            for pid in pool.pids:
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.005)
    with pytest.raises(InvalidImage, match="twice"):
        await task
    await asyncio.gather(*(_check(pool) for _ in range(4)))
    await until(lambda: pool.num_replaced >= replaced + 2 and len(pool.pids) == 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_to_the_whole_group_leaves_the_pool_to_drain(pool: DecodePool, number: int) -> None:
    before = pool.pids
    server = psutil.Process(before[0]).ppid()
    for pid in (*before, server):
        os.kill(pid, number)
    await _check(pool)
    assert pool.pids == before


async def test_a_process_killed_while_idle_costs_nothing(pool: DecodePool) -> None:
    before = pool.pids
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    await until(lambda: not any(psutil.pid_exists(pid) for pid in before))
    await _check(pool)
    await until(lambda: len(pool.pids) == 2)
    assert not set(before) & set(pool.pids)


async def test_cancelled_requests_leave_no_slot(pool: DecodePool) -> None:  # [eng] 17
    tasks = [asyncio.create_task(_ask(pool, JPEG)) for _ in range(12)]
    await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert pool.queue.num_waiting == 0
    await until(lambda: pool.queue.num_running == 0)
    assert all(task.cancelled() or task.result().slot for task in tasks)
    pool.release(task.result().slot.name for task in tasks if not task.cancelled())
    await until(lambda: pool.num_slots == 0)
    await _check(pool)


async def test_without_shared_memory_patches_come_inline() -> None:
    with decode_servers.shared():
        pool = DecodePool(MediaSettings(num_decode_processes=1, shared_memory_bytes=0))
    await pool.start()
    try:
        prepared = await _ask(pool, JPEG)
        assert prepared.slot is None
        assert prepared.inline == _expected(JPEG)
    finally:
        await pool.close()


@pytest.mark.ci
async def test_processes_start_and_end_while_the_loops_own_threads_are_busy() -> None:
    loop, done = asyncio.get_running_loop(), threading.Event()
    busy = [loop.run_in_executor(None, done.wait) for _ in range(2 * (os.cpu_count() or 1) + 32)]
    pool = DecodePool(MediaSettings(num_decode_processes=1))
    try:
        async with asyncio.timeout(60):
            await pool.start()
            await _check(pool)
            await pool.close()
    finally:
        done.set()
        await asyncio.gather(*busy)


async def test_start_says_what_confines_the_processes() -> None:
    pool = DecodePool(MediaSettings(num_decode_processes=1))
    with structlog.testing.capture_logs() as lines:
        await pool.start()
    await pool.close()
    (line,) = lines
    assert line["log_level"] == "info"
    assert {*line["by"], *line["missing"]} == set(MEASURES)


async def test_start_warns_where_nothing_confines_the_processes() -> None:
    with structlog.testing.capture_logs() as lines:
        log_confinement(())
    assert [line["log_level"] for line in lines] == ["warning"]


@table("missing, level", [(measure, "warning" if measure == SECCOMP else "info") for measure in MEASURES])
async def test_start_says_what_a_missing_measure_leaves_open(missing: str, level: str) -> None:
    with structlog.testing.capture_logs() as lines:
        log_confinement(tuple(measure for measure in MEASURES if measure != missing))
    [line] = lines
    assert (line["log_level"], line["missing"], line["left_open"]) == (level, [missing], [LEFT_OPEN[missing]])


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def narrow() -> AsyncIterator[DecodePool]:
    """A pool whose limits are easily reached."""
    config = MediaSettings(
        num_decode_processes=2, decode_timeout_seconds=60, decode_in_flight_bytes=1 << 20, decode_memory_bytes=128 << 20
    )
    pool = DecodePool(config)
    await pool.start()
    yield pool
    await pool.close()


@table(
    "ask",
    [
        lambda pool: _ask(pool, JPEG),
        lambda pool: pool.pdf_pages(pdfs.pdf(pdfs.TEXT)),
        lambda pool: pool.video_header(clips.clip()),
    ],
)
async def test_a_pool_that_nobody_started_refuses_its_jobs(ask: Callable[[DecodePool], Awaitable[object]]) -> None:
    pool = _open()
    with pytest.raises(InternalError, match="No process was started"):
        await ask(pool)
    await pool.close()


@pytest.mark.ci
async def test_a_hung_process_costs_one_request() -> None:
    pool = DecodePool(MediaSettings(num_decode_processes=2, decode_timeout_seconds=2))
    await pool.start()
    before = pool.pids
    for pid in before:
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded, match="2 seconds"):
        await _ask(pool, JPEG)
    for pid in set(before) & set(pool.pids):
        os.kill(pid, signal.SIGCONT)
    await _check(pool)
    await until(lambda: len(pool.pids) == 2)
    assert len(set(before) & set(pool.pids)) == 1
    await pool.close()


async def test_jobs_wait_for_the_budget_of_decoded_bytes(narrow: DecodePool) -> None:
    tasks = [asyncio.create_task(_check(narrow)) for _ in range(3)]
    await asyncio.sleep(0)
    assert (narrow.queue.num_running, narrow.queue.num_waiting) == (1, 2)  # two images of 0.9 MB are over 1 MB
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("size", [LARGE, (7000, 7000)], ids=["patches do not fit", "pixels do not fit"])
async def test_an_image_may_not_take_all_memory(narrow: DecodePool, size: tuple[int, int]) -> None:
    before = narrow.pids
    with pytest.raises(ImageTooLarge, match="memory"):
        await _ask(narrow, images.bomb(*size))
    await _check(narrow)
    assert narrow.pids == before


@pytest.mark.ci
async def test_the_fork_server_is_started_again(narrow: DecodePool) -> None:
    before = narrow.pids
    server = psutil.Process(before[0]).parent()
    assert server is not None
    server.kill()
    await until(lambda: not any(psutil.pid_exists(pid) for pid in before))
    await _check(narrow)


async def test_a_fork_server_that_cannot_be_started_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool tries again after a StartupError; any other error would cost it a process for ever."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", fail)
    with pytest.raises(StartupError, match="temporarily"):
        DecodeServer(1 << 30).start()


async def test_close_answers_all_and_leaves_nothing(shared: DecodePool) -> None:
    slots = [(await _ask(shared, JPEG)).slot for _ in range(3)]
    pids = shared.pids
    tasks = [asyncio.create_task(_ask(shared, images.bomb(*LARGE))) for _ in range(4)]
    await asyncio.sleep(0.05)
    assert shared.queue.num_running == 2
    await shared.close()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Draining] * 4
    with pytest.raises(Draining):
        await _ask(shared, JPEG)
    assert not [slot for slot in slots if slot is None or (FOLDER / slot.name).exists()]
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


GATEWAY = """
import asyncio
import logging
from saccade.gateway.images.decode_pool.pool import DecodePool, MediaSettings
from saccade.log_setup import configure_logging
configure_logging(logging.WARNING)
async def main():
    pool = DecodePool(MediaSettings(num_decode_processes=2))
    await pool.start()
    print(*pool.pids, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.ci
async def test_processes_die_with_the_gateway() -> None:
    with subprocess.Popen([sys.executable, "-c", GATEWAY], stdout=subprocess.PIPE) as gateway:  # noqa: ASYNC220
        assert gateway.stdout is not None
        pids = [int(pid) for pid in gateway.stdout.readline().split()]
        assert len(pids) == 2
        pids.append(psutil.Process(pids[0]).ppid())
        gateway.kill()
    await until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
