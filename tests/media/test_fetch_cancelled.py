"""Nothing outlives a fetch that is cancelled: no task, no socket, no turn."""  # A6

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Iterator

import pytest
from test_resolver import asked, naming
from web import IMAGE, answer, fetching, serving

from saccade.media.fetch import Fetcher

SETTINGS = {"allowed_networks": ("127.0.0.1/32",), "max_concurrent": 1}


def open_sockets() -> set[str]:
    """Return what this process has open of sockets."""
    links = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.add(os.readlink(f"/proc/self/fd/{number}"))
    return {link for link in links if link.startswith("socket:")}


async def settle() -> None:
    """Let everything run that is about to end."""
    for _ in range(10):
        await asyncio.sleep(0)


async def cancel_under_way(fetcher: Fetcher, url: str, under_way: Awaitable[object]) -> None:
    """Fetch *url*, cancel it once it is *under_way*, and see that no task and no socket of it are left."""
    tasks, sockets = asyncio.all_tasks(), open_sockets()
    fetch = asyncio.create_task(fetcher.fetch(url))
    await under_way
    assert open_sockets() > sockets
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    await settle()
    assert (asyncio.all_tasks() - tasks, open_sockets() - sockets) == (set(), set())


async def see_that_the_turn_is_free(fetcher: Fetcher) -> None:
    async with serving(answer()) as web:
        assert (await fetcher.fetch(f"http://127.0.0.1:{web.port}/")).encoded == IMAGE


async def test_cancelled_in_a_lookup() -> None:
    async with naming() as (server, resolver), fetching(resolver, **SETTINGS) as fetcher:
        await cancel_under_way(fetcher, "http://silent.test:81/", asked(server, 1))
        await see_that_the_turn_is_free(fetcher)


@contextlib.contextmanager
def full_backlog() -> Iterator[int]:
    """Yield the port of a socket that listens, never accepts, and has no room for more connections."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as stack:
        port = listener.getsockname()[1]
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        yield port


async def test_cancelled_while_connecting() -> None:
    with full_backlog() as port:
        async with fetching(**SETTINGS) as fetcher:
            await cancel_under_way(fetcher, f"http://127.0.0.1:{port}/", settle())
            await see_that_the_turn_is_free(fetcher)


@contextlib.asynccontextmanager
async def hanging(sent: bytes) -> AsyncIterator[tuple[int, asyncio.Event, asyncio.Event]]:
    """Yield the port of a server that sends *sent* and no more, and events: it has, and its client has left."""
    entered, left = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        await writer.drain()
        entered.set()
        with contextlib.suppress(OSError):
            await reader.read()
        left.set()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield listener.sockets[0].getsockname()[1], entered, left


@pytest.mark.parametrize(
    "sent",
    [b"", b"HTTP/1.1 200 OK\r\nX: ", answer(b"", length=1000) + b"x", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5"],
)  # fmt: skip
async def test_cancelled_in_headers_and_in_a_body(sent: bytes) -> None:
    async with hanging(sent) as (port, entered, left), fetching(**SETTINGS) as fetcher:
        fetch = asyncio.create_task(fetcher.fetch(f"http://127.0.0.1:{port}/"))
        tasks = asyncio.all_tasks() - {fetch}
        await entered.wait()
        await settle()
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        await left.wait()
        await settle()
        assert asyncio.all_tasks() <= tasks
        await see_that_the_turn_is_free(fetcher)


async def test_cancelled_while_waiting_for_a_turn() -> None:
    async with hanging(b"") as (port, entered, _), fetching(**SETTINGS) as fetcher:
        first, second = (asyncio.create_task(fetcher.fetch(f"http://127.0.0.1:{port}/")) for _ in range(2))
        await entered.wait()
        for task in (second, first):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await see_that_the_turn_is_free(fetcher)


async def test_cancelled_while_waiting_for_room() -> None:
    entered = asyncio.Event()

    async def waiting(nbytes: int) -> None:
        entered.set()
        await asyncio.Event().wait()

    async with fetching(**SETTINGS) as fetcher:
        fetch = asyncio.create_task(fetcher.fetch("http://127.0.0.1:81/", hold=waiting))
        await entered.wait()
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        await see_that_the_turn_is_free(fetcher)
