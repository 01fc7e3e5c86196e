"""A prefill engine and a decode engine: what ends a request's legs, and that nothing is left then. [eng] 16, 40"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engines
import msgspec
import pytest
import splits
from splits import Pair
from tables import table
from waiting import wait_until

from saccade.engine.config import EngineConfig
from saccade.engine.executor import kv_copies
from saccade.engine.loop import Engine
from saccade.errors import StartupError
from saccade.fleet.legs import legs_of
from saccade.protocol.kv_transfer import ReceiveKv, SendKv, new_key
from saccade.protocol.output import FinishReason
from saccade.protocol.request import EngineRequest, Grammar, MediaPixels, SamplingParams, SupplyPixels

pytestmark = pytest.mark.ci

WIDE = (1, 6, 16)
ONE = SamplingParams(max_tokens=1, temperature=0)
PARTS: list[Any] = [5, (WIDE, 1), 20]


@pytest.fixture(scope="module")
def shared(tiny_qwen3_vl: Path) -> Iterator[Pair]:
    """A pair that moves one block in a piece, so that a transfer has many steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("saccade.engine.core.kv_sender.MAX_PIECE_BYTES", 1)
        patch.setattr("saccade.engine.core.kv_sender.STEP_BYTES", 1)
        with splits.pair_of(tiny_qwen3_vl, num_blocks=64, max_num_seqs=4) as pair:
            yield pair


@pytest.fixture
def pair(shared: Pair) -> Iterator[Pair]:
    """The same pair without anything in its caches; nothing may be left in it after a test."""
    for engine in (shared.prefill, shared.decode):
        engine.scheduler.reset_caches(prefix=True, media=True)
    shared.first, shared.second = engines.Outcome(), engines.Outcome()
    yield shared
    shared.run_until_idle()


@pytest.fixture(scope="module")
def alone(tiny_qwen3_vl: Path) -> Callable[[EngineRequest], list[int]]:
    """The answer of one engine."""
    engine = engines.engine(tiny_qwen3_vl, num_blocks=64, max_num_seqs=4)
    return lambda asked: engines.drain(engine, asked).answers[asked.request_id].token_ids


def legs(pair: Pair, asked: EngineRequest) -> tuple[EngineRequest, EngineRequest]:
    return legs_of(asked, pair.prefill.description.kv_transfer_address or "")


def test_decode_leg_has_no_pixels(tiny_qwen3_vl: Path) -> None:  # A8
    asked = engines.request(tiny_qwen3_vl, PARTS)
    first, second = (len(msgspec.msgpack.encode(leg)) for leg in legs_of(asked, "127.0.0.1:1"))
    pixels = sum(len(item.inline or b"") for item in asked.media)
    assert pixels > 70_000
    assert first > pixels
    assert second < 1_000
    assert legs_of(asked, "127.0.0.1:1")[1].media[0].grid == WIDE


def test_only_missing_blocks_are_sent(pair: Pair, tiny_qwen3_vl: Path) -> None:
    sent: list[int] = []
    transfers, original = splits.transfers_of(pair.prefill), splits.transfers_of(pair.prefill).send_piece
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "send_piece", lambda *a: (sent.append(a[1].start), original(*a)))
        for name, parts, expected in (("a", [48], [0, 1, 2]), ("b", [48, 20], [3, 4]), ("c", [48], [])):
            asked = engines.request(tiny_qwen3_vl, parts, name, max_tokens=3)
            pair.answers(asked)
            assert sent == expected, name
            sent.clear()


def test_prompt_cached_at_the_prefill_engine_counts_as_cached(pair: Pair, tiny_qwen3_vl: Path) -> None:
    told = [pair.answers(engines.request(tiny_qwen3_vl, [40], name, max_tokens=2))[name] for name in "ab"]
    assert [answer.num_cached_tokens for answer in told] == [0, 32]


STAGES = ("submitted", "prefilling", "receiving", "decoding")


def reach(pair: Pair, stage: str, request_id: str) -> None:
    """Step until the request is in *stage*."""
    if stage == "prefilling":
        pair.run(lambda: bool(pair.decode.scheduler.receiving), stage)
    elif stage == "receiving":
        pair.run(
            lambda: any(one.num_computed_tokens == 0 and one.block_table and held(pair) for one in receiving(pair)),
            stage,
        )
    elif stage == "decoding":
        pair.run(lambda: len(pair.second.answers[request_id].token_ids) > 2, stage)


def receiving(pair: Pair) -> list[Any]:
    return list(pair.decode.scheduler.receiving)


def held(pair: Pair) -> bool:
    """The prompt is computed, and waits for the transfer's end."""
    return bool(pair.prefill.scheduler.sending)


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_disconnected_client_leaves_nothing(
    pair: Pair, tiny_qwen3_vl: Path, stage: str, num_samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # If the decode leg connects after the prompt's end, its connection waits so long for the prompt.
    monkeypatch.setattr("saccade.transport.kv_transfer.source.HANDSHAKE_SECONDS", 0.5)
    asked = engines.request(tiny_qwen3_vl, [5, (WIDE, 1), 70], max_tokens=50, temperature=1.0)
    pair.submit(msgspec.structs.replace(asked, num_samples=num_samples))
    reach(pair, stage, "a")
    for engine in (pair.prefill, pair.decode):
        engine.requests.abort(0, "a")
    pair.run_until_idle()
    assert all(answer.failure is None for answer in pair.second.answers.values())


@pytest.mark.parametrize(
    ("stage", "gone"),
    [("submitted", "prefill"), ("prefilling", "prefill"), ("receiving", "prefill"), ("receiving", "decode")],
)
def test_ended_leg_ends_the_other(
    pair: Pair, tiny_qwen3_vl: Path, stage: str, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gateway aborts one leg, or a worker's connection breaks: the other worker fails the request by name."""
    if gone == "prefill":  # the decode leg may wait so long for a prompt that is gone
        monkeypatch.setattr("saccade.transport.kv_transfer.source.HANDSHAKE_SECONDS", 0.5)
    pair.submit(engines.request(tiny_qwen3_vl, [100], max_tokens=5))
    if stage != "submitted":
        reach(pair, stage, "a")
    else:
        pair.step()
    engine, other = (pair.prefill, pair.second) if gone == "prefill" else (pair.decode, pair.first)
    engine.requests.hangup(0)
    pair.run(lambda: other.answers["a"].finish_reason is not None, "ended")
    failure = other.answers["a"].failure
    assert failure is not None
    assert failure.code == "peer_failed"
    pair.run_until_idle()


def test_prompt_without_a_decode_worker_times_out(tiny_qwen3_vl: Path) -> None:
    role = {"role": "prefill", "kv_transfer_bind": "127.0.0.1:0", "kv_transfer_seconds": 0.5}
    engine = engines.engine(tiny_qwen3_vl, **role)
    try:
        first, _ = legs_of(engines.request(tiny_qwen3_vl, [40]), "")
        engine.requests.submit(0, first)
        outcome = engines.Outcome()
        wait_until(lambda: _told(engine, outcome))
        failure = outcome.answers["a"].failure
        assert failure is not None
        assert failure.code == "peer_failed"
        assert splits.is_idle(engine)
    finally:
        engine.close()


def test_prompt_times_out_if_a_sample_never_begins(tiny_qwen3_vl: Path) -> None:
    """Its gateway aborts a sample of the prefill leg alone, so that the state will never be sent."""
    role = {"role": "prefill", "kv_transfer_bind": "127.0.0.1:0", "kv_transfer_seconds": 0.5}
    engine = engines.engine(tiny_qwen3_vl, **role)
    try:
        asked = msgspec.structs.replace(engines.request(tiny_qwen3_vl, [40]), num_samples=2)
        engine.requests.submit(0, legs_of(asked, "")[0])
        engine.requests.abort(0, "a", 1)
        outcome = engines.Outcome()
        wait_until(lambda: _told(engine, outcome))
        failure = outcome.answers["a"].failure
        assert failure is not None
        assert failure.code == "worker_failed"
        assert splits.is_idle(engine)
    finally:
        engine.close()


def test_requests_do_not_deadlock(tiny_qwen3_vl: Path) -> None:
    """They reach the workers in opposite orders, and either takes all rows of one: patience ends one of them."""
    with splits.pair_of(tiny_qwen3_vl, max_num_seqs=2, first={"kv_transfer_seconds": 0.5}) as pair:
        asked = [
            msgspec.structs.replace(engines.request(tiny_qwen3_vl, [20], name, max_tokens=3), num_samples=2)
            for name in "ab"
        ]
        (first_a, second_a), (first_b, second_b) = (legs(pair, one) for one in asked)
        for engine, leg in ((pair.prefill, first_a), (pair.decode, second_b)):
            engine.requests.submit(0, leg)
        pair.run(lambda: held(pair) and bool(receiving(pair)), "each worker is full")
        for engine, leg in ((pair.prefill, first_b), (pair.decode, second_a)):
            engine.requests.submit(0, leg)
        pair.run(lambda: pair.second.answers["b"].finish_reason is not None, "the other is answered")
        failure = pair.first.answers["a"].failure
        assert failure is not None
        assert failure.code == "peer_failed"
        assert pair.second.answers["b"].failure is None
        pair.decode.requests.abort(0, "a")
        pair.run_until_idle()


def _told(engine: Engine, outcome: engines.Outcome) -> bool:
    if engine.has_work and (frame := engine.step().get(0)) is not None:
        engines.collect(outcome, frame)
    return "a" in outcome.answers


def test_engine_that_waits_for_transfers_does_not_spin(tiny_qwen3_vl: Path) -> None:
    engine = engines.engine(tiny_qwen3_vl, role="prefill", kv_transfer_bind="127.0.0.1:0", max_num_seqs=1)
    try:
        for name in "ab":
            engine.requests.submit(0, legs_of(engines.request(tiny_qwen3_vl, [40], name), "")[0])
        while engine.has_work:
            engine.step()
        assert (len(engine.scheduler.sending), len(engine.scheduler.waiting)) == (1, 1)
        engine.requests.submit(0, legs_of(engines.request(tiny_qwen3_vl, [40], "c"), "")[0])
        while engine.has_work:
            engine.step()
        engine.requests.abort(0, "a")
        while engine.has_work:
            engine.step()
        assert [sequence.request_id for sequence in engine.scheduler.sending] == ["b"]
        engine.requests.hangup(0)
        assert engine.load().num_running == 0
    finally:
        engine.close()


def test_prompts_wait_for_room_at_the_decode_engine(
    pair: Pair, tiny_qwen3_vl: Path, alone: Callable[[EngineRequest], list[int]]
) -> None:
    """More requests than rows, and than blocks: all are answered, in turn."""
    asked = [engines.request(tiny_qwen3_vl, [150], str(number), number, max_tokens=20) for number in range(12)]
    told = pair.answers(*asked)
    for one in asked:
        assert told[one.request_id].token_ids == alone(one)


def test_preempted_decode_leg_asks_for_its_pixels(
    pair: Pair, tiny_qwen3_vl: Path, alone: Callable[[EngineRequest], list[int]]
) -> None:
    asked = engines.request(tiny_qwen3_vl, PARTS, max_tokens=12)
    pair.submit(asked)
    reach(pair, "decoding", "a")
    [sequence] = pair.decode.scheduler.running
    pair.decode.scheduler.preempt(sequence)
    pair.decode.scheduler.reset_caches(prefix=True, media=True)
    frame = pair.decode.step()[0]
    assert [wanted.media for wanted in frame.pixels_wanted] == [[0]]
    pair.decode.requests.supply(0, SupplyPixels(request_id="a", media=(MediaPixels(0, inline=asked.media[0].inline),)))
    pair.run_until_idle()
    assert pair.second.answers["a"].token_ids == alone(asked)


def test_prefill_leg_requests_missing_pixels(
    pair: Pair, tiny_qwen3_vl: Path, alone: Callable[[EngineRequest], list[int]]
) -> None:
    asked = engines.request(tiny_qwen3_vl, PARTS)
    media = tuple(msgspec.structs.replace(item, inline=None) for item in asked.media)
    pair.submit(msgspec.structs.replace(asked, media=media))
    frame = pair.prefill.step()[0]
    assert [wanted.media for wanted in frame.pixels_wanted] == [[0]]
    pair.prefill.requests.supply(0, SupplyPixels(request_id="a", media=(MediaPixels(0, inline=asked.media[0].inline),)))
    pair.run_until_idle()
    assert pair.second.answers["a"].token_ids == alone(asked)


def test_first_token_that_ends_the_answer(pair: Pair, tiny_qwen3_vl: Path) -> None:
    asked = engines.request(tiny_qwen3_vl, [40], "a", max_tokens=5)
    [first, *_] = pair.answers(asked)["a"].token_ids
    ending = engines.request(tiny_qwen3_vl, [40], "b", max_tokens=5, stop_token_ids=(first,))
    answer = pair.answers(ending)["b"]
    assert (answer.token_ids, answer.finish_reason) == ([first], FinishReason.STOP)


def test_step_that_fails_fails_its_transfers(pair: Pair, tiny_qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError

    pair.submit(engines.request(tiny_qwen3_vl, [60], max_tokens=5))
    monkeypatch.setattr(kv_copies, "write_blocks", broken)
    pair.run(lambda: pair.second.answers["a"].finish_reason is not None, "failed")
    failure = pair.second.answers["a"].failure
    assert failure is not None
    assert failure.code == "internal_error"
    pair.run_until_idle()


@table(
    ("change", "at", "param"),
    [
        ({"kv_transfer": SendKv(b"short")}, "prefill", "kv_transfer.key"),
        ({"kv_transfer": ReceiveKv(new_key(), "127.0.0.1:1")}, "prefill", "kv_transfer"),
        ({"kv_transfer": SendKv(new_key())}, "decode", "kv_transfer"),
        ({"kv_transfer": SendKv(new_key())}, "prefill", "max_tokens"),
        ({"kv_transfer": SendKv(new_key()), "num_samples": 5, "sampling": ONE}, "prefill", "n"),
        ({"kv_transfer": ReceiveKv(b"short", "127.0.0.1:1")}, "decode", "kv_transfer.key"),
        ({"kv_transfer": ReceiveKv(new_key(), "127.0.0.1:1"), "num_samples": 5}, "decode", "n"),
        ({"kv_transfer": SendKv(new_key())}, "neither", "role"),
    ],
)
def test_legs_that_cannot_be_served_are_refused(
    pair: Pair, tiny_qwen3_vl: Path, change: dict[str, Any], at: str, param: str
) -> None:
    asked = msgspec.structs.replace(engines.request(tiny_qwen3_vl, [40]), **change)
    engine = engines.engine(tiny_qwen3_vl) if at == "neither" else getattr(pair, at)
    answer = engines.drain(engine, asked).answers["a"]
    assert answer.failure is not None
    assert (answer.failure.code, answer.failure.param) == ("invalid_value", param)


def test_a_leg_with_a_grammar_leaves_no_transfer(pair: Pair, tiny_qwen3_vl: Path) -> None:
    asked = engines.request(tiny_qwen3_vl, [40], grammar=Grammar("json_schema", "{}"))
    for engine, leg in zip((pair.prefill, pair.decode), legs(pair, asked), strict=True):
        failure = engines.drain(engine, leg).answers["a"].failure
        assert failure is not None
        assert failure.param == "grammar"
        assert splits.is_idle(engine)


def test_key_serves_one_request(pair: Pair, tiny_qwen3_vl: Path) -> None:
    first, second = legs(pair, engines.request(tiny_qwen3_vl, [40]))
    for engine, leg, outcome in ((pair.prefill, first, pair.first), (pair.decode, second, pair.second)):
        engine.requests.submit(0, msgspec.structs.replace(leg, request_id="one"))
        engine.requests.submit(0, msgspec.structs.replace(leg, request_id="other"))
        pair.run(lambda outcome=outcome: outcome.answers["other"].failure is not None, "refused")  # type: ignore[misc]
        failure = outcome.answers["other"].failure
        assert failure is not None
        assert failure.param == "kv_transfer.key"
    pair.run_until_idle()
    assert pair.second.answers["one"].failure is None


@table(
    "settings",
    [
        {"role": "decode", "tensor_parallel_size": 2},
        {"role": "decode", "record_steps": "/tmp/steps"},
        {"role": "decode", "seed": 1},
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match=r"role|--kv-transfer"):
        EngineConfig("folder", "m", **settings).check()
