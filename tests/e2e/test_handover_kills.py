"""An engine is killed at each step of a handover from prefill to decode: no answer is wrong, none hangs. # B2, F25

A step is a piece of the connection between the two engines, in either direction. Both engines are real processes.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import engines
import psutil
import pytest
from breaking_proxy import BreakingProxy, breaking
from echo_worker import WAIT_SECONDS, connected, running
from streams import generate
from waiting import until

from saccade.connectors.native.client import WorkerClient
from saccade.errors import SaccadeError
from saccade.fleet.legs import legs_of
from saccade.protocol.request import EngineRequest
from saccade.worker.service import WorkerConfig, WorkerFront

pytestmark = pytest.mark.conformance

SETTINGS = {
    "model": "tiny",
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "device": "cpu",
}
PROMPT = [150]
"""Tokens of the prompt: three chunks."""

NUM_TOKENS = 12
MAX_PIECES = 60
"""More than a handover passes on."""


@dataclass(frozen=True)
class Worker:
    """A worker in this process with an engine in another, and a gateway's client of it."""

    front: WorkerFront
    client: WorkerClient

    @property
    def pid(self) -> int:
        """The engine's process."""
        pid = self.front.relay.engine.pid
        assert pid is not None
        return pid

    def is_idle(self) -> bool:
        """Nothing of any request or transfer is left."""
        load = self.client.load
        return (
            load is not None and load.num_running == load.num_waiting == 0 and load.num_free_blocks == load.num_blocks
        )


@asynccontextmanager
async def worker_of(model: Path, folder: Path, **settings: object) -> AsyncIterator[Worker]:
    config = json.dumps({"model_dir": str(model), **SETTINGS, **settings})
    command = (sys.executable, "-m", "saccade.engine", "--config", config)
    async with running(WorkerConfig(f"unix:{folder}/w.sock", command)) as front, connected(front) as client:
        yield Worker(front, client)


@dataclass(frozen=True)
class Pair:
    """Two workers by role; the decode engine gets state through *proxy*, which listens at *source*."""

    workers: dict[str, Worker]
    proxy: BreakingProxy
    source: str

    async def answer(self, request: EngineRequest) -> list[int] | None:
        """The tokens of the decode leg, or None if a leg failed with an error for its client; that ends the other."""
        legs = zip(self.workers.values(), legs_of(request, self.source), strict=True)
        prefill, decode = (asyncio.create_task(tokens_of(worker.client, leg)) for worker, leg in legs)
        async with asyncio.timeout(WAIT_SECONDS):
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if prefill.done() and await prefill is None:
                decode.cancel()
            await asyncio.wait((decode,))
            prefill.cancel()
            await asyncio.wait((prefill,))
        return None if decode.cancelled() else await decode


@asynccontextmanager
async def pair_of(model: Path, folder: Path) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        settings = {"prefill": {"role": "prefill", "kv_transfer_bind": "127.0.0.1:0"}, "decode": {"role": "decode"}}
        for role in settings:
            (folder / role).mkdir(parents=True)
        started = [stack.enter_async_context(worker_of(model, folder / role, **settings[role])) for role in settings]
        workers = dict(zip(settings, [await one for one in started], strict=True))
        description = workers["prefill"].client.description
        assert description is not None
        assert description.kv_transfer_address is not None
        host, _, port = description.kv_transfer_address.rpartition(":")
        proxy, listening_at = await stack.enter_async_context(breaking((host, int(port))))
        yield Pair(workers, proxy, f"127.0.0.1:{listening_at}")


async def tokens_of(client: WorkerClient, leg: EngineRequest) -> list[int] | None:
    try:
        return [token for delta in [one async for one in generate(client, leg)] for token in delta.token_ids]
    except SaccadeError:
        return None


def asked(model: Path, name: str) -> EngineRequest:
    return engines.request(model, PROMPT, name, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS)


async def outcome_of_kill(pair: Pair, role: str, place: int, request: EngineRequest) -> list[int] | None:
    """What a request gets whose engine of *role* is killed at the piece *place*; both workers are idle afterwards."""
    worker = pair.workers[role]
    dead = psutil.Process(worker.pid)
    pair.proxy.arm(place, dead.kill)
    told = await pair.answer(request)
    if pair.proxy.has_struck:
        await until(lambda: worker.front.relay.engine.pid not in (None, dead.pid))
        await until(lambda: all(each.client.ready for each in pair.workers.values()))
        assert not dead.is_running()
    await until(lambda: all(each.is_idle() for each in pair.workers.values()))
    return told


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_engine_dies_at_each_piece_of_a_handover(role: str, tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    """New workers for each place: an engine that dies again and again is started more and more slowly."""
    right = None
    for place in range(-1, MAX_PIECES):
        async with pair_of(tiny_qwen3_vl, tmp_path / str(place)) as pair:
            told = await outcome_of_kill(pair, role, place, asked(tiny_qwen3_vl, "victim"))
            right = right or told
            assert told in (right, None), place
            if place >= 0 and not pair.proxy.has_struck:
                break
            for worker in pair.workers.values():
                assert await tokens_of(worker.client, asked(tiny_qwen3_vl, "later")) == right, place
    assert right is not None
    assert len(right) == NUM_TOKENS
    assert 3 < place < MAX_PIECES - 1
