"""A connection that breaks, or an engine that dies, harms the requests that it carries alone, at any step. # B2, F25

Whatever ends a gateway's connection to a worker, another gateway's answer stays. The connection is opened again, slots
come back, and the worker has nothing left.
"""

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from breaking_proxy import BreakingProxy, breaking, reset
from echo_worker import WAIT_SECONDS, ask, command, connected, running
from server import free_port
from streams import generate
from tables import table
from tokenspeed_worker import Slots, TokenSpeedWorker, chunk, complete, context, image, listening
from tokenspeed_worker import ask as ask_tokenspeed
from waiting import until

from saccade.connectors.context import ClientContext
from saccade.connectors.native.client import WorkerClient
from saccade.connectors.smg.tokenspeed import TokenSpeedClient
from saccade.errors import SaccadeError
from saccade.protocol.request import EngineRequest
from saccade.worker.service import WorkerConfig

pytestmark = pytest.mark.ci

MAX_PIECES = 200
"""More than any request passes on."""
PROMPT = list(range(5, 11))


@dataclass
class Rig:
    """A client whose connections go through *proxy*, and another whose do not."""

    proxy: BreakingProxy
    client: Any
    other: Any
    ask: Callable[[str], EngineRequest]
    right: list[int]
    num_open: Callable[[], int]
    """Slots that have not come back, and requests that the worker still has."""
    pid: Callable[[], int | None] = lambda: None
    """The engine's process."""


async def answer(client: Any, request: EngineRequest) -> list[int] | None:
    """The tokens, or None for a request that failed with an error for its client."""
    try:
        return [token for delta in [one async for one in generate(client, request)] for token in delta.token_ids]
    except SaccadeError:
        return None


@asynccontextmanager
async def native(folder: Path, proxied: Callable[[str], Any], bind: str) -> AsyncIterator[Rig]:
    """A worker of Saccade with an echo engine."""
    lent: list[str] = []

    def ask_with_slot(name: str) -> EngineRequest:
        lent.append(f"slot-{name}")
        return ask(name, PROMPT, f"slot-{name}")

    def give_back(names: Iterable[str]) -> None:
        for name in names:
            lent.remove(name)

    def num_open() -> int:
        return len(lent) + (client.load.num_running if client.load else 1)

    async with (
        running(WorkerConfig(bind, command(step_seconds=0.002))) as worker,
        proxied(worker.server.bind) as (proxy, url),
        connected(worker, on_released=give_back) as other,
    ):
        client = WorkerClient(url, ClientContext(give_back))
        await client.start()
        try:
            await until(lambda: client.ready)
            yield Rig(proxy, client, other, ask_with_slot, PROMPT, num_open, lambda: worker.relay.engine.pid)
        finally:
            await client.close()


@asynccontextmanager
async def over_tcp(bind: str) -> AsyncIterator[tuple[BreakingProxy, str]]:
    host, _, port = bind.removeprefix("grpc://").rpartition(":")
    async with breaking((host, int(port))) as (proxy, listening_at):
        yield proxy, f"grpc://127.0.0.1:{listening_at}"


@asynccontextmanager
async def over_unix(bind: str) -> AsyncIterator[tuple[BreakingProxy, str]]:
    """Streams go through the proxy, descriptions do not."""
    path = bind.removeprefix("unix:")
    through = f"{path}.through"
    os.symlink(path, through)
    async with breaking(f"{path}.stream", f"{through}.stream") as (proxy, _):
        yield proxy, f"unix:{through}"


@asynccontextmanager
async def tokenspeed(folder: Path) -> AsyncIterator[Rig]:
    """A TokenSpeed worker of the real contract."""
    worker, slots, lent = TokenSpeedWorker(), Slots(), list[str]()
    worker.script = [chunk(1), 0.002, chunk(2), 0.002, complete(1, 2, reason="length")]

    def ask_with_slot(name: str) -> EngineRequest:
        slot = slots.filled()
        lent.append(slot.name)
        return ask_tokenspeed(image(slot), name=name)

    def num_open() -> int:
        num_running = len(worker.requests) - worker.finished - worker.cancelled
        return num_running + len(lent) - len(slots.released) - len(slots.discarded)

    async with listening(worker) as url, over_tcp(url.removeprefix("tokenspeed://")) as (proxy, through):
        client, other = (TokenSpeedClient(one, context(slots)) for one in (through.replace("grpc", "tokenspeed"), url))
        await client.start()
        await other.start()
        try:
            await until(lambda: client.ready and other.ready)
            yield Rig(proxy, client, other, ask_with_slot, [1, 2], num_open)
        finally:
            await client.close()
            await other.close()


RIGS: dict[str, Callable[[Path], Any]] = {
    "TCP": lambda folder: native(folder, over_tcp, f"127.0.0.1:{free_port()}"),
    "a Unix socket": lambda folder: native(folder, over_unix, f"unix:{folder}/w"),
    "TokenSpeed": tokenspeed,
}


async def struck(rig: Rig, place: int, strike: Callable[[], None]) -> tuple[list[int] | None, list[int] | None]:
    """Answer the victim and another request with a fault at a piece of the victim's connection."""
    rig.proxy.arm(place, strike)
    requests = (rig.client, rig.ask(f"victim-{place}")), (rig.other, rig.ask(f"other-{place}"))
    victim, spared = await asyncio.gather(*(answer(*one) for one in requests))
    assert victim in (rig.right, None), place
    return victim, spared


async def check_later(rig: Rig, place: int) -> None:
    """Both clients get answers again, and nothing is left of the requests before."""
    rig.proxy.place = -1
    for name, client in (("again", rig.client), ("other-again", rig.other)):
        found = None
        async with asyncio.timeout(WAIT_SECONDS):
            for attempt in itertools.count():
                # A client may learn of the loss by its next request.
                if (found := await answer(client, rig.ask(f"{name}-{place}-{attempt}"))) is not None:
                    break
                await asyncio.sleep(0.01)
        assert found == rig.right, place
    await until(lambda: not rig.num_open())


@table("kind", RIGS, ids=RIGS)
async def test_each_piece_meets_a_reset(kind: str, tmp_path: Path) -> None:
    async with RIGS[kind](tmp_path) as rig:
        for place in range(MAX_PIECES):
            _, spared = await struck(rig, place, reset)
            has_struck = rig.proxy.has_struck
            assert spared == rig.right, place
            await check_later(rig, place)
            if not has_struck:
                break
        assert 0 < place < MAX_PIECES - 1


async def test_each_piece_meets_a_dead_engine(tmp_path: Path) -> None:
    """A worker for each place: an engine that dies again and again is started more and more slowly."""
    for place in range(MAX_PIECES):
        folder = tmp_path / str(place)
        folder.mkdir()
        async with native(folder, over_unix, f"unix:{folder}/w") as rig:
            pid = rig.pid()
            assert pid is not None
            await struck(rig, place, partial(os.kill, pid, signal.SIGKILL))
            if not rig.proxy.has_struck:
                break
            await until(lambda: rig.pid() not in (None, pid))  # noqa: B023
            await check_later(rig, place)
    assert 0 < place < MAX_PIECES - 1
