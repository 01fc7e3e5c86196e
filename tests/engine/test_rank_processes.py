"""The processes of an engine's ranks: how they start and end, and what becomes of the engine."""

import os
import subprocess
from pathlib import Path
from typing import Any

import engines
import msgspec
import psutil
import pytest
import recordings
from engine_front import Front, config_of

from saccade.errors import StartupError
from saccade.protocol.engine_ipc import EngineReady, EngineStep, Forward

SMALL = (1, 4, 6)
END_SECONDS = 5


def front_of(folder: Path, stderr: int = subprocess.DEVNULL) -> Front:
    return Front({**config_of(folder), "tensor_parallel_size": 2}, stderr=stderr)


def rank_of(parent: int) -> psutil.Process:
    """The process of rank 1 of the engine with this pid."""
    [process] = [child for child in psutil.Process(parent).children() if "--rank=1" in child.cmdline()]
    return process


def test_a_rank_that_dies_takes_the_engine_with_it_though_nobody_reads_the_log(tiny_qwen3_vl: Path) -> None:
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
def test_ranks_end_with_their_engine(tiny_qwen3_vl: Path) -> None:
    front = front_of(tiny_qwen3_vl)
    front.until(EngineReady)
    rank = rank_of(front.process.pid)
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
        subject.submit(0, engines.request(tiny_qwen3_vl, [9]))
        rank = rank_of(os.getpid())
        monkeypatch.setattr(engines.module(subject).language_model, "forward", broken)
        with pytest.raises(RuntimeError, match="rank 0"):
            subject.step()
    assert not rank.is_running()


@pytest.mark.conformance
def test_what_ranks_cannot_share_is_refused_and_nothing_stays(tiny_qwen3_vl: Path) -> None:
    with pytest.raises(StartupError, match="--tensor-parallel-size is 3, but the model has 4 heads"):
        engines.engine(tiny_qwen3_vl, tensor_parallel_size=3)
    assert not [child for child in psutil.Process().children() if "--rank=1" in child.cmdline()]


@pytest.mark.conformance
def test_a_recording_of_two_ranks_is_replayed_by_two(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    with recordings.recording_engine(tiny_qwen3_vl, tmp_path, tensor_parallel_size=2, threads=1) as subject:
        asked = [engines.request(tiny_qwen3_vl, [seed, (SMALL, seed), 3], str(seed), num_logprobs=1) for seed in (1, 2)]
        engines.drain(subject, *asked)
    [file] = recordings.segments(tmp_path)
    outcome = recordings.replayed(file)
    assert (outcome.num_tokens, outcome.num_different, outcome.first) == (16, 0, None)
