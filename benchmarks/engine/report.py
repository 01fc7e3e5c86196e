"""The rows as tables for people, with ours over vLLM's."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.engine.cases import SACCADE, SYSTEMS, VLLM, Case

Rows = Sequence[Mapping[str, Any]]

COLUMNS = {
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p95_ms": "TTFT p95 ms",
    "tpot_mean_ms": "TPOT ms",
    "requests_per_second": "req/s",
    "output_tokens_per_second": "output tok/s",
    "server_cpu_ms": "CPU ms/req",
    "peak_pss_mib": "peak PSS MiB",
    "foreign_cpu": "foreign CPU",
    "load_average": "load average",
}
COMPARED = tuple(column for column in COLUMNS if column not in ("foreign_cpu", "load_average"))

PREFACE = """
Every server is started, warmed up and measured alone, all by one client that streams on the same cores. An image is a
PNG of smooth noise that is new to every cache, unless the row says otherwise; answers are greedy, and equally long in
one row. CPU counts all processes of a server, per request. Two values are two repeats; a ratio is of means, Saccade's
over vLLM's. Foreign CPU is the part of the machine that others used. Aims are hoped for, goals required.
"""


def markdown(facts: Mapping[str, str], cases: Sequence[Case], rows: Rows) -> str:
    """Return the whole page."""
    head = [
        "# Engine: Saccade beside vLLM and transformers",
        "",
        *(f"{name}: {value}  " for name, value in facts.items()),
    ]
    return "\n".join([*head, PREFACE, *(line for case in cases for line in _table(case, rows))])


def summary(cases: Sequence[Case], rows: Rows) -> str:
    """Return one line for each case that both servers have: ours over vLLM's, and what was missed."""
    lines = []
    for case in cases:
        sentence = _ratios(case, _own(case, rows))
        lines += [f"{case.name}, c={case.num_clients}: {sentence}"] if sentence else []
    return "\n".join(lines)


def _own(case: Case, rows: Rows) -> Rows:
    return [row for row in rows if (row["case"], row["clients"]) == (case.name, case.num_clients)]


def _table(case: Case, rows: Rows) -> list[str]:
    """Return the case's table, [] where it was not run."""
    own = _own(case, rows)
    if not own:
        return []
    prompt_tokens = next(row["prompt_tokens"] for row in own)
    lines = [
        f"## {case.name}, {case.num_clients} client{'s'[: case.num_clients - 1]}, {prompt_tokens:g} prompt tokens, "
        f"{case.output_tokens} output tokens",
        "",
    ]
    lines += ["| | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for system in SYSTEMS:
        repeats = [row for row in own if row["system"] == system]
        if repeats:
            cells = [" / ".join(_shown(row.get(column)) for row in repeats) for column in COLUMNS]
            lines.append(f"| {system} | " + " | ".join(cells) + " |")
    sentence = _ratios(case, own)
    return [*lines, "", *([f"- {sentence}", ""] if sentence else [])]


def _ratios(case: Case, own: Rows) -> str:
    ratios = {column: _ratio(own, column) for column in COMPARED}
    sentence = ", ".join(f"{COLUMNS[column]} {ratio:.2f}x" for column, ratio in ratios.items() if ratio is not None)
    if not sentence:
        return ""
    goals = [
        f"{'aim, ' if goal.aim else ''}{COLUMNS[goal.metric]} {'>=' if goal.at_least else '<='} {goal.ratio}x: "
        + ("met" if goal.met(ratio) else f"MISSED, {ratio:.2f}x")
        for goal in case.goals
        if (ratio := ratios[goal.metric]) is not None
    ]
    return f"{sentence}. Goals: {'; '.join(goals)}"


def _ratio(own: Rows, column: str) -> float | None:
    """Return the mean of ours over vLLM's; None where one of them has none."""
    ours, theirs = (
        [row[column] for row in own if row["system"] == name and row.get(column)] for name in (SACCADE, VLLM)
    )
    return statistics.mean(ours) / statistics.mean(theirs) if ours and theirs else None


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:g}"
