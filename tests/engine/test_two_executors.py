"""Two executors that get the same serialised steps give the same outputs and hold the same things."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import msgspec
import pytest
import recordings
import torch

from saccade.engine.core.step import StepOutput
from saccade.engine.executor.local import LocalExecutor
from saccade.engine.loop import Engine
from saccade.engine.recording import Record, Recording, StepCollected, StepLaunched
from saccade.engine.startup import fresh_engine
from saccade.nn.context import KvCache
from saccade.protocol.request import EngineRequest

SMALL, WIDE = (1, 4, 6), (1, 6, 16)


def asked(folder: Path) -> list[EngineRequest]:
    """Requests of every kind; one more comes with each step."""
    parts_and_params: list[tuple[list[Any], dict[str, Any]]] = [
        ([6, (WIDE, 1), 9], {"temperature": 0.9, "seed": 3, "top_p": 0.8, "top_k": 40}),
        ([70], {"num_logprobs": 3, "num_prompt_logprobs": 2}),
        (
            [(SMALL, 2), 3, (WIDE, 3), 20],
            {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        ),
        ([4, (WIDE, 1), 2], {"allowed_token_ids": (5, 6, 7, 8), "temperature": 1.0, "seed": 4}),
        ([40], {"logit_bias": {9: 4.0}, "min_tokens": 4, "stop_token_ids": tuple(range(250)), "num_logprobs": 0}),
        ([9, (SMALL, 5), 11], {"min_p": 0.1, "temperature": 1.5, "seed": 5}),
        ([12], {}),
    ]
    found = [
        engines.request(folder, parts, str(index), index, **{"max_tokens": 40, **params})
        for index, (parts, params) in enumerate(parts_and_params)
    ]
    found[3] = msgspec.structs.replace(found[3], num_samples=3)
    return found


def answer(engine: Engine, requests: list[EngineRequest]) -> None:
    """Submit one request with each step, abort one in its midst, and step to the end."""
    coming = iter(requests[1:])

    def between_steps() -> None:
        if (following := next(coming, None)) is not None:
            engine.requests.submit(0, following)
        if engine.load().steps_total == 16:
            engine.requests.abort(0, "5")

    engines.drain(engine, requests[0], each_step=between_steps)


@pytest.fixture
def recorded(tiny_qwen3_vl: Path, tmp_path: Path) -> Path:
    settings = {"num_blocks": 16, "max_num_batched_tokens": 48, "encoder_cache_bytes": 60_000, "max_num_seqs": 6}
    with recordings.recording_engine(tiny_qwen3_vl, tmp_path, **settings) as subject:
        answer(subject, asked(tiny_qwen3_vl))
        load = subject.load()
        assert load.preemptions_total > 0
        assert engines.is_idle(subject)
    [file] = recordings.segments(tmp_path)
    return file


def execute(executor: LocalExecutor, records: list[Record]) -> Iterator[StepOutput]:
    """Send *records* to *executor*; yield what it gives."""
    for record in records:
        match record:
            case StepLaunched(step, sampling):
                executor.launch(step, sampling)
            case StepCollected(output):
                got = executor.collect_output()
                # How long it took is no part of the answer.
                yield msgspec.structs.replace(
                    got,
                    batch_seconds=output.batch_seconds,
                    encode_seconds=output.encode_seconds,
                    network_seconds=output.network_seconds,
                )


def test_executors_with_equal_steps_have_equal_outputs_and_contents(recorded: Path) -> None:
    before = torch.get_num_threads()
    recording = Recording(recorded)
    records = list(recording.records())
    steps = [record.step for record in records if isinstance(record, StepLaunched)]
    samplings = [record.sampling for record in records if isinstance(record, StepLaunched)]
    # Everything that a step can hold is there.
    assert any(chunk.start and chunk.num_tokens > 1 for step in steps for chunk in step.chunks)
    assert any(chunk.media for step in steps for chunk in step.chunks)
    assert any(chunk.token_ids is None for step in steps for chunk in step.chunks)
    assert any(step.images for step in steps)
    assert all(any(getattr(step, name) for step in steps) for name in ("drop", "ended", "started", "tables"))
    assert all(
        any(getattr(one, name) for one in samplings)
        for name in ("uniforms", "num_top", "too_short", "counts", "prompt_scores")
    )
    expected = [record.output for record in records if isinstance(record, StepCollected)]
    executors = [engines.local(fresh_engine(recording.header, {})[0]) for _ in range(2)]
    given = [list(execute(executor, records)) for executor in executors]
    assert given[0] == given[1] == expected
    one, other = (executor.runner for executor in executors)
    for ours, theirs in zip(one.caches.layers, other.caches.layers, strict=True):
        assert isinstance(ours, KvCache)
        assert isinstance(theirs, KvCache)
        assert ours.keys.any()
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
    assert one.encoder_outputs.keys() == other.encoder_outputs.keys() != set()
    for output_id, features in one.encoder_outputs.items():
        assert torch.equal(features, other.encoder_outputs[output_id])
    for name in ("tables", "num_blocks", "position_deltas"):
        assert (getattr(one.rows, name) == getattr(other.rows, name)).all(), name
    assert torch.equal(one.rows.last_token_ids, other.rows.last_token_ids)
    torch.set_num_threads(before)
