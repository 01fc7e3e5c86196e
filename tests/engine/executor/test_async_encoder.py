"""Images encoded in the background: who decodes goes on, who waits for an image goes no further, nobody's answer changes."""

import threading
from collections.abc import Iterator
from pathlib import Path

import engines
import msgspec
import pytest
import torch

from saccade.engine.core.step import EncodeJob, StepInput
from saccade.engine.executor.async_encoder import AsyncEncoder, Encoded
from saccade.engine.loop import Engine
from saccade.protocol.output import FinishReason

SMALL = (1, 4, 6)
WIDE = (1, 6, 16)


class Gate:
    """Stands before an engine's lane: it lets jobs through when told to, and spoils the first *spoil* of them."""

    def __init__(self, engine: Engine) -> None:
        self.jobs: list[EncodeJob] = []
        self.spoil = 0
        self._open = threading.Event()
        executor = engines.local(engine)
        self._encode = executor.runner.encoder.encode
        executor.async_encoder = AsyncEncoder(self._pass, 1)

    def open(self) -> None:
        """Let this job and all later ones through."""
        self._open.set()

    def _pass(self, job: EncodeJob) -> Encoded:
        self.jobs.append(job)
        assert self._open.wait(60)
        self.spoil -= 1
        if self.spoil >= 0:
            raise RuntimeError("spoilt")
        return self._encode(job)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """Steps change torch's threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def subject(tiny_qwen3_vl: Path) -> Engine:
    """An engine with a thread for steps and one for images."""
    return engines.engine(tiny_qwen3_vl, threads=2, max_model_len=400)


def tokens(engine: Engine, num_steps: int) -> dict[str, int]:
    """Step, and count the tokens of each request."""
    counts: dict[str, int] = {}
    for _ in range(num_steps):
        for frame in engine.step().values():
            for delta in frame.deltas:
                assert delta.failure is None, delta.failure
                counts[delta.request_id] = counts.get(delta.request_id, 0) + len(delta.token_ids)
    return counts


def test_decodes_go_on_beside_encoding_with_the_same_answers(subject: Engine, tiny_qwen3_vl: Path) -> None:
    text = engines.request(tiny_qwen3_vl, [20], "text", max_tokens=60)
    asked = [
        engines.request(tiny_qwen3_vl, [5, (WIDE, 1), 4, (SMALL, 2), 3], "two", 1),
        engines.request(tiny_qwen3_vl, [7, (WIDE, 1), 4], "shared", 2),
        engines.request(tiny_qwen3_vl, [3, (SMALL, 3), 40], "other", 3),
    ]
    alone = engines.engine(tiny_qwen3_vl, threads=1, max_model_len=400)
    expected = {one.request_id: engines.drain(alone, one).answers[one.request_id].token_ids for one in (text, *asked)}
    gate = Gate(subject)
    subject.requests.submit(0, text)
    assert tokens(subject, 3) == {"text": 3}
    for one in asked:
        subject.requests.submit(0, one)
    # The first image of each waits behind the gate, in one job.
    during = tokens(subject, 20)
    assert during["text"] == 20
    assert "two" not in during
    assert "shared" not in during
    assert "other" not in during
    gate.open()
    told = engines.drain(subject)
    assert len(told.answers["text"].token_ids) == 60 - 23
    assert told.answers["text"].token_ids == expected["text"][23:]
    assert told.answers["two"].token_ids == expected["two"]
    assert told.answers["shared"].token_ids == expected["shared"]
    assert told.answers["two"].times is not None
    assert told.answers["two"].times.encode_seconds > 0
    assert told.answers["other"].token_ids == expected["other"]
    assert subject.load().encoded_items_total == 3
    assert gate.jobs
    assert engines.is_idle(subject)


def test_nothing_is_encoded_in_background_without_decodes(subject: Engine, tiny_qwen3_vl: Path) -> None:
    gate = Gate(subject)
    asked = engines.request(tiny_qwen3_vl, [5, (WIDE, 1), 4, (SMALL, 2), 3])
    assert engines.drain(subject, asked).answers["a"].finish_reason == FinishReason.LENGTH
    assert gate.jobs == []


def test_failed_job_ends_the_requests_that_wait_for_it(subject: Engine, tiny_qwen3_vl: Path) -> None:
    gate = Gate(subject)
    gate.spoil = 1
    subject.requests.submit(0, engines.request(tiny_qwen3_vl, [20], "text", max_tokens=30))
    tokens(subject, 2)
    subject.requests.submit(0, asked := engines.request(tiny_qwen3_vl, [5, (WIDE, 1), 4], "bad"))
    subject.requests.submit(1, msgspec.structs.replace(asked, request_id="bad too"))
    tokens(subject, 2)
    gate.open()
    mine = engines.drain(subject)
    failure = mine.answers["bad"].failure
    assert failure is not None
    assert "image" in failure.message
    assert "spoilt" not in failure.message
    assert mine.answers["text"].finish_reason == FinishReason.LENGTH
    assert engines.is_idle(subject)
    subject.requests.submit(0, engines.request(tiny_qwen3_vl, [20], "text", max_tokens=30))
    tokens(subject, 2)
    again = engines.drain(subject, asked)
    assert again.answers["bad"].finish_reason == FinishReason.LENGTH


def test_an_abort_leaves_nothing_and_the_encoder_output_serves_the_next(subject: Engine, tiny_qwen3_vl: Path) -> None:
    gate = Gate(subject)
    asked = engines.request(tiny_qwen3_vl, [5, (WIDE, 1), 4], "gone")
    subject.requests.submit(0, engines.request(tiny_qwen3_vl, [20], "text", max_tokens=60))
    tokens(subject, 2)
    subject.requests.submit(0, asked)
    tokens(subject, 2)
    subject.requests.abort(0, "gone")
    # By its hash alone: what is under way need not be asked for.
    by_hash = [msgspec.structs.replace(item, inline=None) for item in asked.media]
    subject.requests.submit(0, msgspec.structs.replace(asked, request_id="next", media=tuple(by_hash)))
    assert "next" not in tokens(subject, 3)
    gate.open()
    told = engines.drain(subject)
    assert told.answers["next"].finish_reason == FinishReason.LENGTH
    assert subject.load().encoded_items_total == len(gate.jobs) == 1
    assert engines.is_idle(subject)


def test_idle_engine_waits_for_the_lane(subject: Engine, tiny_qwen3_vl: Path) -> None:
    gate = Gate(subject)
    subject.requests.submit(0, engines.request(tiny_qwen3_vl, [20], "text", max_tokens=4))
    tokens(subject, 2)
    subject.requests.submit(0, engines.request(tiny_qwen3_vl, [5, (WIDE, 1), 4], "image"))
    assert tokens(subject, 6) == {"text": 2}
    gate.open()
    assert engines.drain(subject).answers["image"].finish_reason == FinishReason.LENGTH


def test_a_second_job_stands_ready_and_one_more_image_is_encoded_within_a_step(tiny_qwen3_vl: Path) -> None:
    subject = engines.engine(tiny_qwen3_vl, threads=2, max_model_len=400, encode_budget_patches=96)
    gate = Gate(subject)
    subject.requests.submit(0, engines.request(tiny_qwen3_vl, [20], "text", max_tokens=60))
    tokens(subject, 2)
    for seed, name in enumerate(("first", "second", "within", "later")):
        subject.requests.submit(0, engines.request(tiny_qwen3_vl, [5, (WIDE, seed), 4], name, max_tokens=2))
    during = tokens(subject, 4)
    assert during == {"text": 4, "within": 2}
    # Two are in the background, and the fourth has to wait until the decodes had their time.
    assert len(subject.scheduler.encoder_scheduler.jobs) == 2
    assert subject.load().encoded_items_total == 1
    gate.open()
    told = engines.drain(subject)
    assert {told.answers[name].finish_reason for name in ("first", "second", "later")} == {FinishReason.LENGTH}
    assert len(gate.jobs) >= 2
    assert engines.is_idle(subject)


def test_a_failed_job_leaves_the_next_alone(tiny_qwen3_vl: Path) -> None:
    subject = engines.engine(tiny_qwen3_vl, threads=2, max_model_len=400, encode_budget_patches=96)
    gate = Gate(subject)
    gate.spoil = 1
    subject.requests.submit(0, engines.request(tiny_qwen3_vl, [20], "text", max_tokens=60))
    tokens(subject, 2)
    subject.requests.submit(0, engines.request(tiny_qwen3_vl, [5, (WIDE, 1), 4], "bad"))
    subject.requests.submit(0, engines.request(tiny_qwen3_vl, [5, (WIDE, 2), 4], "good"))
    tokens(subject, 3)
    assert len(subject.scheduler.encoder_scheduler.jobs) == 2
    gate.open()
    told = engines.drain(subject)
    assert told.answers["bad"].failure is not None
    assert told.answers["good"].finish_reason == FinishReason.LENGTH
    assert engines.is_idle(subject)


def test_one_thread_has_no_lane(tiny_qwen3_vl: Path) -> None:
    plain = engines.engine(tiny_qwen3_vl, threads=1)
    gate = Gate(plain)
    plain.requests.submit(0, engines.request(tiny_qwen3_vl, [20], "text", max_tokens=30))
    tokens(plain, 2)
    told = engines.drain(plain, engines.request(tiny_qwen3_vl, [5, (WIDE, 1), 4], "image"))
    assert told.answers["image"].finish_reason == FinishReason.LENGTH
    assert gate.jobs == []


def test_job_is_reported_if_its_step_fails_at_once(
    subject: Engine, tiny_qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = engines.local(subject).runner
    update = runner.update

    def fail(step: StepInput) -> None:
        if step.jobs:
            monkeypatch.setattr(runner, "update", update)
            raise MemoryError
        update(step)

    monkeypatch.setattr(runner, "update", fail)
    subject.requests.submit(0, engines.request(tiny_qwen3_vl, [20], "text", max_tokens=30))
    tokens(subject, 2)
    told = engines.drain(subject, engines.request(tiny_qwen3_vl, [(WIDE, 1), 4], "image"))
    assert told.answers["text"].failure is not None
    assert told.answers["image"].finish_reason == FinishReason.LENGTH
    assert not subject.scheduler.encoder_scheduler.jobs


def test_a_job_whose_thread_cannot_start_fails_once_and_the_next_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ran: list[int] = []

    def encode(job: EncodeJob) -> Encoded:
        ran.append(job.job_id)
        return Encoded({}, 0.0)

    subject = AsyncEncoder(encode, 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        subject.begin(EncodeJob(1, (), background=True))
    subject.begin(EncodeJob(2, (), background=True))
    taken = [subject.take(60) for _ in range(2)]
    (failed, error), (done, result) = (found for found in taken if found is not None)
    assert (failed.job_id, str(error.exception())) == (1, "can't start new thread")
    assert (done.job_id, result.result()) == (2, Encoded({}, 0.0))
    assert subject.take() is None
    assert ran == [2]


def test_request_fails_alone_if_no_thread_can_start(
    subject: Engine, tiny_qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    subject.requests.submit(0, engines.request(tiny_qwen3_vl, [20], "text", max_tokens=30))
    tokens(subject, 2)
    asked = engines.request(tiny_qwen3_vl, [5, (WIDE, 1), 4], "bad")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        told = engines.drain(subject, asked)
    assert told.answers["bad"].failure is not None
    assert told.answers["text"].finish_reason == FinishReason.LENGTH
    assert engines.is_idle(subject)
    again = engines.drain(subject, msgspec.structs.replace(asked, request_id="again"))
    assert again.answers["again"].finish_reason == FinishReason.LENGTH


def test_a_job_keeps_its_threads_whatever_the_steps_set() -> None:
    begun, go_on = threading.Event(), threading.Event()
    found: list[int] = []

    def encode(_: EncodeJob) -> Encoded:
        begun.set()
        assert go_on.wait(60)
        found.append(torch.get_num_threads())
        return Encoded({}, 0.0)

    subject = AsyncEncoder(encode, 2)
    subject.begin(EncodeJob(1, (), background=True))
    assert begun.wait(60)
    torch.set_num_threads(1)
    go_on.set()
    assert subject.take(60) is not None
    assert found == [2]
