"""The processes of an engine's ranks: how they start and end, and what becomes of the engine."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import engines
import msgspec
import psutil
import pytest
import recordings
from echo_worker import connected, running, tokens
from engine_front import Front, config_of
from streams import generate
from waiting import until

from saccade.errors import StartupError, WorkerFailed
from saccade.protocol.engine_ipc import EngineReady, EngineStep, Forward
from saccade.protocol.output import TokenDelta
from saccade.worker.service import WorkerConfig

SMALL = (1, 4, 6)
END_SECONDS = 5


def front_of(folder: Path, stderr: int = subprocess.DEVNULL) -> Front:
    return Front({**config_of(folder), "tensor_parallel_size": 2}, stderr=stderr)


def rank_of(parent: int) -> psutil.Process:
    """The process of rank 1 of the engine with this pid."""
    [process] = [child for child in psutil.Process(parent).children() if "--rank=1" in child.cmdline()]
    return process


@pytest.mark.conformance
def test_dead_rank_ends_the_engine_even_if_the_log_is_full(tiny_qwen3_vl: Path) -> None:
    # [eng] 38: the pipe that all ranks log to is full from the start
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    while True:
        try:
            os.write(writer, bytes(4096))
        except BlockingIOError:
            break
    os.set_blocking(writer, True)
    front = front_of(tiny_qwen3_vl, stderr=writer)
    assert front.until(EngineReady).description.model == "tiny"
    front.send(Forward(7, msgspec.msgpack.encode(engines.request(tiny_qwen3_vl, [9], max_tokens=4000))))
    front.until(EngineStep)
    rank_of(front.process.pid).kill()
    assert front.process.wait(END_SECONDS) == 1
    front.socket.close()
    os.close(reader)
    os.close(writer)


@pytest.mark.conformance
def test_ranks_listen_on_loopback_alone_and_end_with_their_engine(tiny_qwen3_vl: Path) -> None:
    front = front_of(tiny_qwen3_vl)
    front.until(EngineReady)
    rank = rank_of(front.process.pid)
    for process in (psutil.Process(front.process.pid), rank):
        assert {connection.laddr.ip for connection in process.net_connections("inet")} == {"127.0.0.1"}
    front.process.kill()
    front.process.wait()
    rank.wait(END_SECONDS)
    front.socket.close()


@pytest.mark.conformance
def test_a_step_that_fails_on_rank_0_ends_the_engine(tiny_qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank waits in a collective then: no later step could succeed."""

    def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    with engines.on_ranks(tiny_qwen3_vl) as subject:
        subject.requests.submit(0, engines.request(tiny_qwen3_vl, [9]))
        rank = rank_of(os.getpid())
        monkeypatch.setattr(engines.module(subject).language_model, "forward", broken)
        with pytest.raises(RuntimeError, match="rank 0"):
            subject.step()
    assert not rank.is_running()


@pytest.mark.conformance
def test_model_that_ranks_cannot_share_is_refused(tiny_qwen3_vl: Path) -> None:
    with pytest.raises(StartupError, match="--tensor-parallel-size is 3, but the model has 4 heads"):
        engines.engine(tiny_qwen3_vl, tensor_parallel_size=3)
    assert not [child for child in psutil.Process().children() if "--rank=1" in child.cmdline()]


@pytest.mark.conformance
def test_a_recording_of_two_ranks_is_replayed_by_two(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    cache = {"num_blocks": None, "kv_cache_bytes": 1 << 20}
    alone = engines.engine(tiny_qwen3_vl, **cache)
    with recordings.recording_engine(tiny_qwen3_vl, tmp_path, tensor_parallel_size=2, threads=1, **cache) as subject:
        # Each rank has half of every block.
        assert subject.load().num_blocks == 2 * alone.load().num_blocks
        asked = [engines.request(tiny_qwen3_vl, [seed, (SMALL, seed), 3], str(seed), num_logprobs=1) for seed in (1, 2)]
        engines.drain(subject, *asked)
    [file] = recordings.segments(tmp_path)
    outcome = recordings.replayed(file)
    assert (outcome.num_tokens, outcome.different, outcome.first) == (16, set(), None)


async def rest(deltas: AsyncIterator[TokenDelta]) -> list[TokenDelta]:
    """What is still to come."""
    return [delta async for delta in deltas]


@pytest.mark.conformance
async def test_a_worker_that_loses_a_rank_fails_its_requests_and_comes_back(
    tiny_qwen3_vl: Path, tmp_path: Path
) -> None:
    settings = json.dumps({**config_of(tiny_qwen3_vl), "tensor_parallel_size": 2})
    command = (sys.executable, "-m", "saccade.engine", "--config", settings)
    asked = engines.request(tiny_qwen3_vl, [9, (SMALL, 1), 2], max_tokens=4000)
    short = engines.request(tiny_qwen3_vl, [9, (SMALL, 1), 2], "short", max_tokens=5)
    async with running(WorkerConfig(f"unix:{tmp_path}/w.sock", command)) as worker, connected(worker) as client:
        expected = await tokens(client, short)
        deltas = generate(client, asked)
        await anext(deltas)
        first = worker.relay.engine.pid
        assert first is not None
        rank_of(first).kill()
        with pytest.raises(WorkerFailed):
            await asyncio.wait_for(rest(deltas), END_SECONDS)
        await until(lambda: client.ready)
        assert worker.relay.engine.pid != first
        assert await tokens(client, short) == expected


@pytest.mark.conformance
@pytest.mark.parametrize("encoder", ["data", "weights"])
def test_four_ranks_share_two_heads_of_keys(tiny_qwen3_vl: Path, encoder: str) -> None:
    asked = [engines.request(tiny_qwen3_vl, [seed, (SMALL, seed), 9], str(seed), seed) for seed in (1, 2, 3, 4, 5)]
    expected = engines.drain(engines.engine(tiny_qwen3_vl), *asked).answers
    with engines.on_ranks(tiny_qwen3_vl, 4, mm_encoder_tp_mode=encoder) as subject:
        told = engines.drain(subject, *asked).answers
    assert {name: answer.token_ids for name, answer in told.items()} == {
        name: answer.token_ids for name, answer in expected.items()
    }
