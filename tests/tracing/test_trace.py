"""The ids that a request takes from its client, and the times of its stages."""

import math
import time

import pytest
from tables import table

from saccade.tracing.trace import Trace

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def headers(traceparent: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"here"), (b"traceparent", traceparent.encode())]


def test_a_client_s_trace_goes_on() -> None:
    trace = Trace.of_headers(headers(CLIENT), sample=0)
    version, trace_id, span_id, flags = trace.traceparent.split("-")
    assert (version, trace_id, flags) == ("00", CLIENT.split("-")[1], "01")
    assert trace.parent_id == 0xB7AD6B7169203331
    assert span_id != CLIENT.split("-")[2]


@table(
    ("traceparent", "is_sampled"),
    [
        (CLIENT, True),
        (CLIENT.removesuffix("01") + "00", False),
        (CLIENT.removesuffix("01") + "03", True),
        ("cc" + CLIENT.removeprefix("00") + "-what-comes-later", True),
    ],
)
def test_the_client_s_flag_decides(traceparent: str, is_sampled: bool) -> None:
    for sample in (0.0, 1.0):
        trace = Trace.of_headers(headers(traceparent), sample)
        assert trace.parent_id
        assert trace.is_sampled is is_sampled
        assert trace.traceparent.endswith("-01" if is_sampled else "-00")


@table(
    "traceparent",
    [
        "",
        "ff" + CLIENT.removeprefix("00"),
        CLIENT.upper(),
        CLIENT[:-1],
        CLIENT + "\n",
        CLIENT.replace("b7ad6b7169203331", "0" * 16),
        CLIENT.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
    ],
)
def test_a_malformed_header_begins_a_new_trace(traceparent: str) -> None:
    trace = Trace.of_headers(headers(traceparent), sample=1)
    assert trace.trace_id
    assert not trace.parent_id
    assert trace.is_sampled


def test_a_part_of_new_traces_is_sampled() -> None:
    number = sum(Trace.of_headers([], sample=0.25).is_sampled for _ in range(4000))
    assert 800 < number < 1200  # seven standard deviations
    assert not any(Trace.of_headers([], sample=0).is_sampled for _ in range(100))


def test_stages_follow_one_another_and_none_begins_before_the_request() -> None:
    trace = Trace(1, 0, is_sampled=True)
    trace.begun_at -= 10**9
    trace.add_stages({"queue": 0.1, "decode": 0.2})
    (second, start, end), (first, begin, middle) = trace.stages
    assert (first, second) == ("queue", "decode")
    assert middle == start
    assert (end - start, start - begin) == (200_000_000, 100_000_000)
    trace.add_stages({"broken": math.nan, "negative": -1.0, "endless": math.inf, "too long": 1e300})
    assert all(trace.begun_at <= start <= end <= time.time_ns() for _, start, end in trace.stages)


def test_encoding_is_the_first_part_of_the_prefill() -> None:
    trace = Trace(1, 0, is_sampled=True)
    trace.begun_at -= 10**9
    trace.add_engine({"queue": 0.1, "encode": 0.05, "prefill": 0.2, "decode": 0.3})
    spans = {name: (start, end) for name, start, end in trace.stages}
    assert spans["engine.encode"] == (spans["engine.prefill"][0], spans["engine.prefill"][0] + 50_000_000)


def test_a_request_that_is_not_sampled_notes_nothing() -> None:
    trace = Trace(1, 0, is_sampled=False)
    trace.add_stages({"queue": 0.1})
    trace.add_engine({"queue": 0.1, "encode": 0.1, "prefill": 0.1, "decode": 0.1})
    trace.note_first_token()
    assert not trace.stages
    assert not trace.first_tokens


@table("jump", [3600, -3600, 10**9, -(10**9)])
def test_a_clock_that_somebody_sets_turns_no_span_round(jump: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: begun)
    trace = Trace.of_headers([], sample=1)
    monkeypatch.setattr(time, "time_ns", lambda: begun + jump * 10**9)
    trace.add_stages({"tokenize": 0.5})
    trace.note_first_token()
    [(_, start, end)] = trace.stages
    assert begun <= start <= end <= trace.first_tokens[0] <= trace.now() < begun + 600 * 10**9
