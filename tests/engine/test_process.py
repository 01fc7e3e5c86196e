"""The engine's process: start, serve, heartbeat, end. Real processes over a real socket pair."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import msgspec
import pytest
import recordings
from engine_front import SOURCES, Front, config_of

from saccade.protocol.engine_ipc import (
    Drain,
    EngineFailed,
    EngineReady,
    EngineStep,
    Forward,
    Shutdown,
)
from saccade.protocol.output import FinishReason, StepFrame, TokenDelta
from saccade.protocol.request import ResetCaches

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def front(tiny_qwen3_vl: Path) -> Iterator[Front]:
    front = Front(config_of(tiny_qwen3_vl), through_stdin=True)
    description = front.until(EngineReady).description
    assert (description.model, description.block_size, description.dtype) == ("tiny", 16, "float32")
    assert "config.json" in description.files.files
    assert description.takes_resets
    yield front
    front.process.kill()
    front.process.wait()
    front.socket.close()


def deltas(front: Front, count: int) -> dict[str, list[TokenDelta]]:
    """Receive until *count* requests have ended."""
    told: dict[str, list[TokenDelta]] = {}
    while sum(bool(each[-1].finish_reason) for each in told.values()) < count:
        for connection, frame in front.until(EngineStep).frames:
            assert connection == 7
            for delta in msgspec.msgpack.decode(frame, type=StepFrame).deltas:
                told.setdefault(delta.request_id, []).append(delta)
    return told


def test_serves_and_survives_bad_commands(front: Front, tiny_qwen3_vl: Path) -> None:
    asked = engines.request(tiny_qwen3_vl, [4, ((1, 4, 4), 1), 3], "good")
    front.send(Forward(7, b"\xc1 no MessagePack"))
    front.send(Forward(7, msgspec.msgpack.encode({"type": "submit", "request_id": "bad", "token_ids": "text"})))
    front.send(Forward(7, msgspec.msgpack.encode(asked)))
    told = deltas(front, 2)
    assert [delta.token_ids for delta in told["good"]] == [
        [token] for delta in told["good"] for token in delta.token_ids
    ]
    assert len(told["good"]) == 8
    assert told["bad"][0].failure is not None
    assert told["bad"][0].failure.code == "invalid_value"


def test_caches_are_reset_between_two_requests(front: Front, tiny_qwen3_vl: Path) -> None:
    for name, reset in (("cold", False), ("warm", False), ("reset", True)):
        if reset:
            front.send(Forward(7, msgspec.msgpack.encode(ResetCaches(prefix=True))))
        asked = engines.request(tiny_qwen3_vl, [40], name, text_seed=9, max_tokens=1)
        front.send(Forward(7, msgspec.msgpack.encode(asked)))
        assert deltas(front, 1)[name][0].num_cached_tokens == (32 if name == "warm" else 0)


def test_heartbeat_and_load(front: Front, tiny_qwen3_vl: Path) -> None:
    front.send(Forward(7, msgspec.msgpack.encode(engines.request(tiny_qwen3_vl, [9], max_tokens=2))))
    steps = [front.until(EngineStep) for _ in range(4)]
    assert [step.iteration for step in steps] == list(range(steps[0].iteration, steps[0].iteration + 4))
    drained = next(step for step in steps if step.frames and b"length" in step.frames[0][1])
    assert drained.load is not None
    assert (drained.load.num_running, drained.load.num_free_blocks) == (0, drained.load.num_blocks)


def test_drain_finishes_running_requests_and_reports(front: Front, tiny_qwen3_vl: Path) -> None:
    front.send(Forward(7, msgspec.msgpack.encode(engines.request(tiny_qwen3_vl, [9], "open", max_tokens=30))))
    front.send(Drain())
    ended, load = False, None
    while load is None or load.num_running + load.num_waiting:
        step = front.until(EngineStep)
        ended = ended or any(b"length" in frame for _, frame in step.frames)
        load = step.load if step.load is not None and step.load.draining else load
    assert ended


def test_interrupt_is_ignored_and_shutdown_obeyed(front: Front, tiny_qwen3_vl: Path) -> None:
    front.process.send_signal(signal.SIGINT)
    front.send(Forward(7, msgspec.msgpack.encode(engines.request(tiny_qwen3_vl, [9], "last"))))
    assert deltas(front, 1)["last"][-1].finish_reason == FinishReason.LENGTH
    front.send(Shutdown())
    assert front.process.wait(60) == 0


def test_recording_is_complete_after_the_process_ends(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    front = Front({**config_of(tiny_qwen3_vl), "record_steps": str(tmp_path)})
    front.until(EngineReady)
    front.send(Forward(7, msgspec.msgpack.encode(engines.request(tiny_qwen3_vl, [9], "last"))))
    deltas(front, 1)
    front.send(Shutdown())
    assert front.process.wait(60) == 0
    front.socket.close()
    [file] = recordings.segments(tmp_path)
    assert recordings.replayed(file).num_tokens == 8


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_dir": "/nonexistent", "model": "x"}, "config.json"),
        pytest.param({"model_dir": 3}, "EngineConfig", marks=pytest.mark.conformance),
        (b'{"model_dir": "\xff", "model": "x"}', "EngineConfig"),
    ],
)
def test_failed_start_is_reported(config: Any, words: str) -> None:
    front = Front(config)
    assert words in front.until(EngineFailed).message
    assert front.process.wait(60) == 1
    front.socket.close()


def test_engine_ends_with_its_front(tiny_qwen3_vl: Path) -> None:
    front = Front(config_of(tiny_qwen3_vl))
    front.until(EngineReady)
    front.socket.close()
    assert front.process.wait(60) == 0


def test_engine_without_a_front_ends_quietly() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    command = [sys.executable, "-m", "saccade.engine", "--fd", str(theirs.fileno()), "--config", "{}"]
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    ended = subprocess.run(command, pass_fds=[theirs.fileno()], env=environment, capture_output=True, timeout=60)
    theirs.close()
    assert ended.returncode == 0
    assert b"Traceback" not in ended.stderr


def test_engine_dies_with_its_parent(tiny_qwen3_vl: Path) -> None:
    # The parent is a process between this one and the engine; the engine's socket stays open when it is killed.
    config = json.dumps(config_of(tiny_qwen3_vl))
    ours, theirs = socket.socketpair()
    program = f"""
import subprocess, sys
command = [sys.executable, "-m", "saccade.engine", "--fd", "{theirs.fileno()}", "--config", sys.argv[1]]
subprocess.Popen(command, pass_fds=[{theirs.fileno()}], stderr=subprocess.DEVNULL).wait()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", program, config], pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": SOURCES}
    )
    theirs.close()
    ours.settimeout(60)
    received = b""
    while b"ready" not in received:
        received += ours.recv(1 << 20)
    parent.kill()
    parent.wait()
    while ours.recv(1 << 20):  # ends only when the engine, the last holder of the other end, is gone
        pass
    ours.close()
