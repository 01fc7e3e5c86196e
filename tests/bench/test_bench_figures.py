"""Figures of given records: nothing here takes time, so nothing depends on it."""

import math

import pytest

from saccade.bench.client import Record
from saccade.bench.figures import answers, figures, ratios, tpot
from saccade.bench.load import Run
from saccade.bench.report import tables
from saccade.bench.settings import Load

CLOSED = Load("concurrency", 2)


def record(ttft: float, gap: float = 10.0, num_tokens: int = 5, started: float = 0.0) -> Record:
    """Return an answer of 20 prompt tokens, 5 of them cached, and a token every *gap* ms."""
    times = [ttft + gap * index for index in range(num_tokens)]
    return Record(0, 0, started, times[-1] + 1, times, times[-1], 20, num_tokens, 5)


def failed(kind: str = "HTTP 503", example: str = "busy") -> Record:
    return Record(0, 0, 0.0, 3.0, error=kind, example=example)


def run_of(*records: Record, wall: float = 2.0, side: int = 0, alternation: int = 0, cpu: float = 0.1) -> Run:
    return Run(CLOSED, alternation, side, wall, cpu, {"saccade_stage_seconds decode": (0.5, 10.0)}, records)


def test_latencies_and_rates() -> None:
    run = run_of(*(record(ttft) for ttft in (100, 200, 300, 400)), failed())
    values = figures([answers(run, {})])
    assert (values["ttft_mean"], values["ttft_p50"], values["ttft_p90"]) == (250, 250, pytest.approx(370))
    assert values["itl_mean"] == values["itl_p99"] == values["tpot_p50"] == 10
    assert values["e2el_mean"] == 291
    assert (values["requests_per_second"], values["tokens_per_second"]) == (2, 10)


def test_runs_of_several_alternations_count_together() -> None:
    values = figures([answers(run_of(record(100)), {}), answers(run_of(record(300), wall=3), {})])
    assert (values["ttft_mean"], values["requests_per_second"]) == (200, pytest.approx(0.4))


def test_tokens_without_text_count_for_tpot() -> None:
    """The last event of the choice ends the answer, though its last tokens were no text."""
    assert tpot(Record(0, 0, 0.0, 500.0, [100.0, 110.0], 480.0, 5, 20)) == 20
    assert math.isnan(tpot(record(100, num_tokens=1)))


def test_goodput_counts_answers_that_keep_all_limits() -> None:
    run = run_of(record(100), record(600), record(100, gap=60), record(100, num_tokens=1), failed())
    assert figures([answers(run, {"ttft": 500, "tpot": 50})])["goodput"] == 1
    assert figures([answers(run, {"e2el": 150})])["goodput"] == 1
    assert figures([answers(run, {"ttft": 50})])["goodput"] == 0


def test_nothing_answered_has_no_latencies() -> None:
    values = figures([answers(run_of(failed()), {})])
    assert values == {"requests_per_second": 0, "tokens_per_second": 0, "goodput": 0}


def test_ratio_of_a_real_difference_excludes_one() -> None:
    a = [answers(run_of(*(record(100 + index % 7) for index in range(40))), {}) for _ in range(3)]
    b = [answers(run_of(*(record(150 + index % 7) for index in range(40)), wall=2.5), {}) for _ in range(3)]
    measured = ratios(a, b)
    assert measured["ttft_mean"].ratio == pytest.approx(153 / 103, rel=0.01)
    assert measured["ttft_mean"].is_distinguishable
    assert measured["ttft_mean"].low > 1.4
    assert not measured["itl_mean"].is_distinguishable
    assert measured["requests_per_second"].ratio == pytest.approx(0.8)


def test_difference_that_changes_with_the_alternation_is_not_distinguishable() -> None:
    slow, fast = ([record(ttft + index % 5) for index in range(40)] for ttft in (200, 100))
    a = [answers(run_of(*rows), {}) for rows in (slow, fast, fast)]
    b = [answers(run_of(*rows), {}) for rows in (fast, slow, slow)]
    assert not ratios(a, b)["ttft_mean"].is_distinguishable


def test_figure_without_answers_has_no_ratio() -> None:
    assert ratios([answers(run_of(record(1)), {})], [answers(run_of(failed()), {})]) == {}


def test_table_of_one_server_has_a_column_for_each_load() -> None:
    other = Run(Load("concurrency", 8), 0, 0, 1.0, 0.9, {}, [record(50), failed()])
    (table,) = tables([run_of(record(100), failed(example="one"), failed(example="two")), other], {}, {})
    lines = {line[0]: line[1:] for line in table.lines()}
    assert lines["times in ms"] == ["2", "8"]
    assert lines["TTFT p50"] == ["100", "50"]
    assert lines["requests"] == ["3", "2"]
    assert lines["failed requests"] == ["2", "1"]
    assert lines["cached prompt tokens, %"] == ["25", "25"]
    assert lines["saccade_stage_seconds decode"] == ["50", "-"]
    assert "goodput, requests/s" not in lines
    assert list(table.notes()) == [
        "2: 2 x HTTP 503, such as: two",
        "8: 1 x HTTP 503, such as: busy",
        "8: this client was the limit, with its one core busy: the server may do more.",
    ]


def test_table_of_two_servers_compares_them() -> None:
    sides = [run_of(record(100 * (side + 1)), side=side) for side in (1, 0)]
    (table,) = tables(sides, {"ttft": 150}, {1: 12.0})
    lines = {line[0]: line[1:] for line in table.lines()}
    assert lines["times in ms"] == ["A", "B", "B / A", "95 %"]
    assert lines["TTFT mean"] == ["100", "200", "2.00", "2.00 to 2.00"]
    assert lines["ITL mean"] == ["10", "10", "1.00", "1.00 to 1.00, not distinguishable"]
    assert lines["goodput, requests/s"] == ["0.5", "0", "", ""]
    assert lines["limit of TPOT: memory"] == ["-", "12", "", ""]
    assert lines["requests"] == ["1", "1", "", ""]
    assert list(table.notes()) == ["With one alternation, the intervals do not include what changes from run to run."]
