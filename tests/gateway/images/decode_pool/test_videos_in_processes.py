"""Videos in decode processes: headers and patches, confined and within limits."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import clips
import decode_servers
import numpy as np
import psutil
import pytest
import pytest_asyncio
from clips import clip
from tables import table

from saccade.errors import DeadlineExceeded, InvalidVideo, RequestError, UnsupportedVideoFormat, VideoTooLarge
from saccade.gateway.config import MediaSettings
from saccade.gateway.images.decode_pool.pool import DecodePool, PreparedImage
from saccade.media.video import read_frames, read_header
from saccade.media.video_header import VideoLimits
from saccade.models import load_video_layout, load_video_pixels
from saccade.models.family import VideoOptions
from saccade.protocol.media import ImageLayout
from saccade.transport.shared_memory import read_slot

pytestmark = pytest.mark.asyncio(loop_scope="module")
FAMILY = "qwen2_vl"
LAYOUT = load_video_layout(FAMILY)({}, {}, {})
SETTINGS = LAYOUT.settings_for(VideoOptions(min_pixels=56 * 56, max_pixels=224 * 224))
LIMITS = VideoLimits()
SERVED = clips.served()
BROKEN = clips.broken()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pool() -> AsyncIterator[DecodePool]:
    with decode_servers.shared():
        pool = DecodePool(MediaSettings(num_decode_processes=1, video_timeout_seconds=60, shared_memory_bytes=64 << 20))
    await pool.start()
    yield pool
    await pool.close()


async def prepared(pool: DecodePool, encoded: bytes) -> tuple[PreparedImage, ImageLayout]:
    header = await pool.video_header(encoded)
    layout = LAYOUT.video(header, SETTINGS)
    return await pool.prepare_image(encoded, FAMILY, SETTINGS, layout, video=header), layout


def expected(encoded: bytes, layout: ImageLayout) -> bytes:
    out = np.empty(layout.pixel_shape, np.uint8)
    frames = read_frames(encoded, read_header(encoded, LIMITS), layout.frames, LIMITS)
    load_video_pixels(FAMILY)(SETTINGS).write_pixels(frames, layout, out)
    return out.tobytes()


@table("name", SERVED)
async def test_patches_are_equal_in_a_confined_process(pool: DecodePool, name: str) -> None:
    encoded, before = SERVED[name], pool.pids
    assert await pool.video_header(encoded) == read_header(encoded, LIMITS)
    made, layout = await prepared(pool, encoded)
    assert made.slot is not None
    assert read_slot(made.slot) == expected(encoded, layout)
    assert made.seconds.decode > 0
    pool.release([made.slot.name])
    assert (pool.pids, pool.num_slots, pool.queue.in_flight_bytes) == (before, 0, 0)


@table("name", BROKEN)
async def test_a_broken_video_costs_one_request(pool: DecodePool, name: str) -> None:
    before = pool.pids
    with pytest.raises((InvalidVideo, UnsupportedVideoFormat)):
        await prepared(pool, BROKEN[name])
    assert (pool.pids, pool.num_slots, pool.queue.num_running) == (before, 0, 0)


@table("seed", range(10))
async def test_a_damaged_video_costs_one_request_at_most(pool: DecodePool, seed: int) -> None:
    content, draw = bytearray(clip("vp9")), np.random.default_rng(seed)
    for place in draw.integers(4, len(content), 40):
        content[place] = draw.integers(256)
    try:
        made, _ = await prepared(pool, bytes(content))
    except RequestError:
        pass
    else:
        assert made.slot is not None
        pool.release([made.slot.name])
    good, layout = await prepared(pool, clip())
    assert good.slot is not None
    assert read_slot(good.slot) == expected(clip(), layout)
    pool.release([good.slot.name])


async def test_forged_header_ends_no_process(pool: DecodePool) -> None:
    """What the gateway was told of a video is checked again where it is decoded."""
    header = await pool.video_header(clip())
    other = await pool.video_header(clip(width=96, height=96))
    layout = LAYOUT.video(other, SETTINGS)
    with pytest.raises(InvalidVideo):
        await pool.prepare_image(clip(), FAMILY, SETTINGS, layout, video=other)
    assert await pool.video_header(clip()) == header


@pytest.mark.ci
async def test_limits_of_memory_and_time() -> None:
    # Far over the limit: what reading fonts has left free counts as well.
    large = clip(width=4096, height=2048, num_frames=2)
    pool = DecodePool(MediaSettings(num_decode_processes=1, decode_memory_bytes=8 << 20))
    await pool.start()
    try:
        with pytest.raises((VideoTooLarge, InvalidVideo)):
            await pool.video_header(large)
    finally:
        await pool.close()
    with decode_servers.shared():
        hurried = DecodePool(MediaSettings(num_decode_processes=1, video_timeout_seconds=0.001))
    await hurried.start()
    try:
        with pytest.raises(DeadlineExceeded, match="video"):
            await hurried.video_header(large)
        await asyncio.sleep(0)
        assert (hurried.queue.num_running, hurried.queue.in_flight_bytes) == (0, 0)
    finally:
        await hurried.close()


async def test_cancelled_requests_leave_no_slot(pool: DecodePool) -> None:
    tasks = [asyncio.create_task(prepared(pool, clip())) for _ in range(6)]
    await asyncio.sleep(0.02)
    for task in tasks:
        task.cancel()
    for made in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(made, tuple):  # done before it could be cancelled
            pool.release([made[0].slot.name])
    async with asyncio.timeout(20):
        while pool.queue.num_running or pool.num_slots:  # noqa: ASYNC110  what is waited for happens in other processes
            await asyncio.sleep(0.01)


async def test_the_job_of_a_client_that_left_does_not_hold_the_line(pool: DecodePool) -> None:
    header = await pool.video_header(clip())
    layout = LAYOUT.video(header, SETTINGS)
    jobs: list[Callable[[], Coroutine[Any, Any, object]]] = [
        lambda: pool.video_header(clip(), "evil"),
        lambda: pool.prepare_image(clip(), FAMILY, SETTINGS, layout, "evil", header),
    ]
    for job in jobs:
        (before,) = pool.pids
        psutil.Process(before).suspend()  # as one that works for long
        left = asyncio.create_task(job())
        waits = asyncio.create_task(job())
        async with asyncio.timeout(20):
            while not pool.queue.num_running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            left.cancel()
            made = await waits
            assert before not in pool.pids
            if isinstance(made, PreparedImage):
                assert made.slot is not None
                pool.release([made.slot.name])
            while pool.queue.num_running or pool.num_slots or psutil.pid_exists(before):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
