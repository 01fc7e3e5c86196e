"""Recorded steps, replayed on a fresh executor: equal, and what is said where they are not."""

import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import msgspec
import pytest
import recordings
import torch

from saccade.engine.loop import Engine
from saccade.engine.recording import (
    FORMAT,
    Record,
    Recorder,
    Recording,
    StepCollected,
    StepFailed,
    StepLaunched,
)
from saccade.errors import StartupError
from saccade.protocol.request import EngineRequest

pytestmark = pytest.mark.ci

SMALL, WIDE = (1, 4, 6), (1, 6, 16)
MIB = 1 << 20


def with_images(folder: Path, num_requests: int = 5) -> list[EngineRequest]:
    """Requests whose images come while others are being answered."""
    parts: list[Any] = [[6, (WIDE, 1), 9], [9], [(SMALL, 2), 3, (WIDE, 3), 20], [4, (WIDE, 1), 2], [40]]
    return [
        engines.request(folder, parts[index % 5], str(index), index, max_tokens=10, temperature=index % 2, seed=index)
        for index in range(num_requests)
    ]


def one_by_one(engine: Engine, asked: list[EngineRequest], num_steps: int = 1) -> dict[str, list[int]]:
    """Answers to requests of which one comes with every *num_steps* steps."""
    coming = iter(asked[1:])

    def submit_another() -> None:
        is_time = engine.load().steps_total % num_steps == 0
        if is_time and (following := next(coming, None)) is not None:
            engine.requests.submit(0, following)

    answers = engines.drain(engine, asked[0], each_step=submit_another).answers
    return {name: answer.token_ids for name, answer in answers.items()}


def records(file: Path) -> list[Record]:
    return list(Recording(file).records())


@pytest.fixture
def recorded(tiny_qwen3_vl: Path, tmp_path: Path) -> Path:
    """A segment with images."""
    with recordings.recording_engine(tiny_qwen3_vl, tmp_path) as subject:
        one_by_one(subject, with_images(tiny_qwen3_vl))
    [file] = recordings.segments(tmp_path)
    return file


def test_a_recorded_run_with_images_is_replayed_equal(recorded: Path, tiny_qwen3_vl: Path) -> None:
    outcome = recordings.replayed(recorded)
    assert outcome.first is None
    assert not outcome.different
    assert outcome.num_steps == sum(isinstance(record, StepCollected) for record in records(recorded))
    assert outcome.num_tokens == 50
    header = Recording(recorded).header
    assert header.machine.weights == engines.engine(tiny_qwen3_vl).description.fingerprint
    assert (header.machine.device, header.machine.dtype, header.machine.num_threads) == ("cpu", "float32", 2)
    assert (header.config.num_blocks, header.config.block_size, header.config.max_num_seqs) == (256, 16, 8)
    assert header.machine.processor
    assert header.machine.versions.keys() >= {"saccade-vlm", "torch"}


def test_a_backends_package_is_recorded(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    with recordings.recording_engine(tiny_qwen3_vl, tmp_path, attention_backend="triton") as subject:
        engines.drain(subject, engines.request(tiny_qwen3_vl, [30], max_tokens=3))
    [file] = recordings.segments(tmp_path)
    assert "triton" in Recording(file).header.machine.versions
    assert recordings.replayed(file).first is None


def test_recording_changes_no_answer(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    asked = with_images(tiny_qwen3_vl)
    expected = one_by_one(engines.engine(tiny_qwen3_vl), asked)
    with recordings.recording_engine(tiny_qwen3_vl, tmp_path) as subject:
        assert one_by_one(subject, asked) == expected
    assert engines.is_idle(subject)


def test_recording_files_are_private_to_the_user(recorded: Path) -> None:
    assert stat.S_IMODE(recorded.stat().st_mode) == 0o600


def test_a_tampered_token_is_the_first_difference(recorded: Path) -> None:
    outputs = [record.output for record in records(recorded) if isinstance(record, StepCollected)]
    victim = [output for output in outputs if len(output.token_ids) > 1][2]

    def tamper(record: Record) -> Record:
        if not isinstance(record, StepCollected) or record.output.number != victim.number:
            return record
        token_ids = [record.output.token_ids[0], record.output.token_ids[1] + 1, *record.output.token_ids[2:]]
        return StepCollected(msgspec.structs.replace(record.output, token_ids=token_ids))

    recordings.rewrite(recorded, tamper)
    outcome = recordings.replayed(recorded)
    assert outcome.first is not None
    assert (outcome.first.number, len(outcome.different)) == (victim.number, 1)
    assert outcome.first.expected == f"token {victim.token_ids[1] + 1}"
    assert outcome.first.got == f"token {victim.token_ids[1]}"
    [step] = [
        record.step
        for record in records(recorded)
        if isinstance(record, StepLaunched) and record.step.number == victim.number
    ]
    assert outcome.first.row == [chunk.row for chunk in step.chunks if chunk.draws][1]


@pytest.mark.parametrize("is_same_machine", [True, False])
def test_log_probabilities_are_compared_on_the_same_machine(
    is_same_machine: bool, tiny_qwen3_vl: Path, tmp_path: Path
) -> None:
    with recordings.recording_engine(tiny_qwen3_vl, tmp_path) as subject:
        engines.drain(subject, engines.request(tiny_qwen3_vl, [9], num_logprobs=2, num_prompt_logprobs=1))
    [file] = recordings.segments(tmp_path)

    def tamper(record: Record) -> Record:
        if not isinstance(record, StepCollected) or record.output.number != 4:
            return record
        [logprob] = record.output.logprobs
        assert logprob is not None
        changed = msgspec.structs.replace(logprob, logprob=logprob.logprob + 1e-15)
        return StepCollected(msgspec.structs.replace(record.output, logprobs=[changed]))

    machine = Recording(file).header.machine
    machine = machine if is_same_machine else msgspec.structs.replace(machine, processor="another")
    recordings.rewrite(file, tamper, machine=machine)
    first = recordings.replayed(file).first
    assert (first is not None) == is_same_machine
    if first is not None:
        assert (first.number, first.row, first.sequence_id) == (4, 0, 1)
        assert "logprob=" in first.expected


def test_without_pixels_the_missing_images_are_listed(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    with recordings.recording_engine(tiny_qwen3_vl, tmp_path, record_pixels=False) as subject:
        one_by_one(subject, with_images(tiny_qwen3_vl))
    [file] = recordings.segments(tmp_path)
    with pytest.raises(StartupError, match="3 images") as refused:
        recordings.replayed(file)
    lines = refused.value.message.splitlines()[1:]
    assert len(lines) == 3
    assert "grid 1x6x16, 73728 bytes, blake3 " in lines[0]
    assert file.stat().st_size < 20_000


def test_text_alone_needs_no_pixels(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    with recordings.recording_engine(tiny_qwen3_vl, tmp_path, record_pixels=False) as subject:
        engines.drain(subject, engines.request(tiny_qwen3_vl, [30]))
    assert recordings.replayed(recordings.segments(tmp_path)[0]).num_tokens == 8


@pytest.mark.ci
def test_segments_rotate_within_the_bound_and_each_replays_by_itself(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    asked = [
        engines.request(tiny_qwen3_vl, [5, (SMALL if seed % 3 else WIDE, seed), 7], str(seed), seed, max_tokens=12)
        for seed in range(60)
    ]
    asked[::7] = [msgspec.structs.replace(one, num_samples=2) for one in asked[::7]]
    expected = one_by_one(engines.engine(tiny_qwen3_vl), asked, 4)
    with recordings.recording_engine(tiny_qwen3_vl, tmp_path, record_steps_bytes=MIB) as subject:
        recordings.recorder(subject).rest_seconds = 0
        assert one_by_one(subject, asked, 4) == expected
    # No sequence is computed again for more than one segment.
    assert 0 < subject.load().preemptions_total <= len(expected)
    files = recordings.segments(tmp_path)
    assert "-000001" not in files[0].name
    assert sum(file.stat().st_size for file in files) <= MIB
    assert engines.is_idle(subject)
    outcomes = {file: recordings.replayed(file) for file in files}
    assert all(outcome.first is None for outcome in outcomes.values())
    # One may be empty: where the images of its first step do not fit.
    full = [file for file, outcome in outcomes.items() if outcome.num_tokens]
    assert len(full) > len(files) // 2
    middle = records(full[len(full) // 2])
    first = next(record.step for record in middle if isinstance(record, StepLaunched) and record.step.chunks)
    assert first.number > 1
    assert all(chunk.start == 0 for chunk in first.chunks)


def test_segments_are_written_in_the_order_of_their_starts(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    old = [tmp_path / f"20200101T000000Z-1-{number:06}.steps" for number in range(1, 4)]
    for age, file in enumerate(old):
        file.write_bytes(bytes(MIB // 3))
        os.utime(file, (1000 - age, 1000 - age))  # the first one was written last
    with recordings.recording_engine(tiny_qwen3_vl, tmp_path, record_steps_bytes=MIB) as subject:
        recordings.recorder(subject).begin_segment()
        assert [file.exists() for file in old] == [False, True, True]


def test_nothing_is_recorded_between_segments(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    asked = [engines.request(tiny_qwen3_vl, [(WIDE, seed)], str(seed), max_tokens=3) for seed in range(4)]
    with recordings.recording_engine(tiny_qwen3_vl, tmp_path, record_steps_bytes=MIB) as subject:
        one_by_one(subject, asked)  # one segment holds an image, not two; the next may begin seconds later
    [file] = recordings.segments(tmp_path)
    assert recordings.replayed(file).first is None


def test_a_sequence_that_cannot_be_computed_again_puts_a_segment_off(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    asked = engines.request(tiny_qwen3_vl, [4, (SMALL, 1), 30], max_tokens=12)
    by_hash = msgspec.structs.replace(asked, media=(msgspec.structs.replace(asked.media[0], inline=None),))
    with recordings.recording_engine(tiny_qwen3_vl, tmp_path) as subject:
        expected = engines.drain(subject, asked).answers["a"].token_ids
        recordings.recorder(subject).rest_seconds = 0
        recordings.recorder(subject).end_segment("")
        # Until its first token, a segment could begin: its gateway would be asked for the image.
        num_segments = []
        subject.recorder, kept = None, subject.recorder
        subject.requests.submit(0, by_hash)
        subject.step()
        subject.recorder = kept
        told = engines.drain(
            subject, each_step=lambda: num_segments.append(len(recordings.segments(tmp_path)))
        ).answers["a"]
        assert told.failure is None
        assert told.token_ids == expected[1:]
        assert set(num_segments) == {1}
        engines.drain(subject, msgspec.structs.replace(asked, request_id="b"))
    assert len(recordings.segments(tmp_path)) == 2


def test_a_failed_step_ends_its_segment(tiny_qwen3_vl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("a fault")

    asked = with_images(tiny_qwen3_vl, 3)
    with recordings.recording_engine(tiny_qwen3_vl, tmp_path) as subject:
        recordings.recorder(subject).rest_seconds = 0
        engines.drain(subject, asked[0])
        with monkeypatch.context() as patch:
            patch.setattr(engines.module(subject).language_model, "forward", broken)
            assert engines.drain(subject, asked[1]).answers["1"].failure is not None
        engines.drain(subject, asked[2])
    failed, following = recordings.segments(tmp_path)
    assert records(failed)[-1] == StepFailed("RuntimeError: a fault")
    first = recordings.replayed(failed).first
    assert first is not None
    assert (first.expected, first.got) == ("the step fails with RuntimeError: a fault", "the step does not fail")
    assert recordings.replayed(following).first is None


def test_a_slow_disk_ends_the_segment(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    with recordings.recording_engine(tiny_qwen3_vl, tmp_path / "one") as subject:
        asked = with_images(tiny_qwen3_vl)
        header = Recording(first_segment(subject, asked[1], tmp_path / "one")).header
        config = header.config.__class__(**{**vars(header.config), "record_steps": str(tmp_path / "two")})
        executor = engines.local(engines.engine(tiny_qwen3_vl))
        slow = Recorder(executor, msgspec.structs.replace(header, config=config))
        slow.max_queued_bytes = 60_000
        subject.executor = subject.recorder = slow
        one_by_one(subject, asked)
    [file] = recordings.segments(tmp_path / "two")
    assert recordings.replayed(file).first is None
    assert file.stat().st_size < 60_000


def test_a_disk_that_refuses_a_segment_costs_no_sequence_its_state(
    tiny_qwen3_vl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    asked = with_images(tiny_qwen3_vl)
    with recordings.recording_engine(tiny_qwen3_vl, tmp_path) as subject:
        monkeypatch.setattr("saccade.engine.recording.Segment", refuse)
        recordings.recorder(subject).rest_seconds = 0
        assert len(one_by_one(subject, asked)) == 5
        assert subject.load().preemptions_total == 0
    assert recordings.segments(tmp_path) == []


def test_a_write_that_fails_ends_the_segment(
    tiny_qwen3_vl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = threading.Event()

    def refuse(*_: Any) -> int:
        written.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    asked = with_images(tiny_qwen3_vl)
    with recordings.recording_engine(tiny_qwen3_vl, tmp_path) as subject:
        with monkeypatch.context() as patch:
            patch.setattr("saccade.engine.recording.os.write", refuse)
            engines.drain(subject, asked[0])
            assert written.wait(10)
            engines.drain(subject, asked[1])
        assert not recordings.recorder(subject).is_due
        assert len(engines.drain(subject, asked[2]).answers["2"].token_ids) == 10
    [file] = recordings.segments(tmp_path)
    assert file.stat().st_size == 0


def first_segment(engine: Engine, asked: EngineRequest, folder: Path) -> Path:
    """A segment that holds one request."""
    engines.drain(engine, asked)
    recordings.recorder(engine).close()
    [file] = recordings.segments(folder)
    return file


def test_truncated_segment_is_replayed_to_its_end(recorded: Path) -> None:
    whole = recordings.replayed(recorded)
    recorded.write_bytes(recorded.read_bytes()[:-7])
    cut = recordings.replayed(recorded)
    assert cut.first is None
    assert cut.num_steps == whole.num_steps - 1


def garbage(file: Path) -> None:
    file.write_bytes(b"\x03\0\0\0abc")


def damaged(file: Path) -> None:
    content = bytearray(file.read_bytes())
    start = 4 + int.from_bytes(content[:4], "little") + 4
    content[start : start + 4] = b"\xff" * 4
    file.write_bytes(content)


def newer(file: Path) -> None:
    recordings.rewrite(file, format=FORMAT + 1)


def other_weights(file: Path) -> None:
    machine = Recording(file).header.machine
    recordings.rewrite(file, machine=msgspec.structs.replace(machine, weights=bytes(32)))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (garbage, "not a recording"),
        (damaged, "record 1 cannot be read"),
        (newer, f"format {FORMAT + 1}"),
        (other_weights, "other weights"),
        (Path.unlink, "Cannot read"),
    ],
)
def test_invalid_recordings_are_refused(spoil: Callable[[Path], None], words: str, recorded: Path) -> None:
    spoil(recorded)
    with pytest.raises(StartupError, match=words):
        recordings.replayed(recorded)


def test_a_folder_that_others_may_write_to_is_refused(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(StartupError, match="no other user"):
        engines.engine(tiny_qwen3_vl, record_steps=str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match="cannot be made"):
        engines.engine(tiny_qwen3_vl, record_steps=str(tmp_path / "file"))


def test_pixels_are_recorded_with_the_steps_or_not_at_all(tiny_qwen3_vl: Path) -> None:
    with pytest.raises(StartupError, match="needs --record-steps"):
        engines.engine(tiny_qwen3_vl, record_pixels=True)


def test_recorder_leaves_no_thread(recorded: Path) -> None:
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("step recorder")]
