"""Bytes are held before they are read, and waiting for that is not the server's slowness."""  # A6

import asyncio
from pathlib import Path

import pytest
from tables import table
from web import IMAGE, Handler, answer, fetching, serving

from saccade.errors import ImageTooLarge, InvalidImageUrl, QueueFull
from saccade.media.fetch import BUFFER_BYTES, HOLD_STEP_BYTES

HERE = ("127.0.0.1/32",)
MIB = 1 << 20


class Budget:
    """Allows *limit_bytes*, and raises QueueFull for more; *calls* are what was asked for."""

    def __init__(self, limit_bytes: int = 1 << 40) -> None:
        self.calls: list[int] = []
        self.limit_bytes = limit_bytes

    async def __call__(self, nbytes: int) -> None:
        self.calls.append(nbytes)
        if sum(self.calls) > self.limit_bytes:
            raise QueueFull("Too many bytes.")


def sending(num_bytes: int) -> Handler:
    """Return a server's reply of so many bytes, of which it does not say how many they are."""

    async def send(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + bytes(num_bytes))

    return send


@table(
    ("reply", "calls"),
    [
        (answer(), [BUFFER_BYTES]),
        (answer(bytes(BUFFER_BYTES)), [BUFFER_BYTES]),
        (answer(bytes(3 * MIB)), [BUFFER_BYTES, 3 * MIB - BUFFER_BYTES]),
        (sending(0), [BUFFER_BYTES, HOLD_STEP_BYTES - BUFFER_BYTES]),
        (sending(BUFFER_BYTES + 1), [BUFFER_BYTES, HOLD_STEP_BYTES - BUFFER_BYTES, HOLD_STEP_BYTES]),
        (sending(3 * MIB), [BUFFER_BYTES, HOLD_STEP_BYTES - BUFFER_BYTES, *[HOLD_STEP_BYTES] * 3]),
    ],
)
async def test_budget_is_charged_for_received_bytes(reply: bytes | Handler, calls: list[int]) -> None:
    budget = Budget()
    async with serving(reply) as web, fetching(allowed_networks=HERE) as fetcher:
        encoded = (await fetcher.fetch(f"http://127.0.0.1:{web.port}/", hold=budget)).encoded
        assert budget.calls == calls
        assert len(encoded) <= sum(calls)


async def test_redirects_hold_once_and_an_image_that_is_too_large_not_at_all() -> None:
    budget = Budget()
    async with serving() as web, fetching(allowed_networks=HERE, max_bytes=MIB) as fetcher:
        web.reply = {"/": answer(b"", 302, Location="/a"), "/a": answer(b"", length=MIB + 1)}
        with pytest.raises(ImageTooLarge):
            await fetcher.fetch(f"http://127.0.0.1:{web.port}/", hold=budget)
        assert budget.calls == [BUFFER_BYTES]


@pytest.mark.parametrize("limit_bytes", [BUFFER_BYTES - 1, 2 * MIB])
@pytest.mark.parametrize("reply", [answer(bytes(8 * MIB)), sending(8 * MIB)])
async def test_fetch_that_gets_no_more_bytes_ends_and_gives_its_turn_back(
    reply: bytes | Handler, limit_bytes: int
) -> None:
    async with serving(reply) as web, fetching(allowed_networks=HERE, max_concurrent=1) as fetcher:
        for _ in range(2):
            with pytest.raises(QueueFull, match="Too many bytes"):
                await fetcher.fetch(f"http://127.0.0.1:{web.port}/", hold=Budget(limit_bytes))
        assert web.num_connects == (2 if limit_bytes > BUFFER_BYTES else 0)


@pytest.mark.parametrize("reply", [answer(bytes(2 * MIB)), sending(2 * MIB)])
async def test_waiting_for_room_does_not_count_as_the_servers_time(reply: bytes | Handler) -> None:
    budget = Budget()

    async def hold(nbytes: int) -> None:
        await budget(nbytes)
        if len(budget.calls) == 2:
            await asyncio.sleep(1.6)

    async with serving(reply) as web, fetching(allowed_networks=HERE, timeout_seconds=1.5) as fetcher:
        assert len((await fetcher.fetch(f"http://127.0.0.1:{web.port}/", hold=hold)).encoded) == 2 * MIB


async def test_time_limit_of_the_server_continues_after_a_wait() -> None:
    async def hold(nbytes: int) -> None:
        await asyncio.sleep(0)

    async def stay_silent(path: str, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with serving(stay_silent) as web, fetching(allowed_networks=HERE, timeout_seconds=0.2) as fetcher:
        with pytest.raises(InvalidImageUrl, match=r"0\.2 seconds"):
            await fetcher.fetch(f"http://127.0.0.1:{web.port}/", hold=hold)


async def test_file_bytes_are_charged_before_reading(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(IMAGE)
    budget = Budget()
    async with fetching(local_root=tmp_path) as fetcher:
        assert (await fetcher.fetch(f"file://{tmp_path}/a.png", hold=budget)).encoded == IMAGE
        assert budget.calls == [len(IMAGE)]
        with pytest.raises(QueueFull):
            await fetcher.fetch(f"file://{tmp_path}/a.png", hold=Budget(len(IMAGE) - 1))
