"""The rows as a table for people, with ours over SMG's."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gateway.cases import CASES, Case
from benchmarks.gateway.systems import SMG, SYSTEMS

Rows = Sequence[Mapping[str, Any]]

COLUMNS = {
    "requests_per_second": "req/s",
    "receipt_p50_ms": "receipt p50 ms",
    "receipt_p90_ms": "p90",
    "receipt_p99_ms": "p99",
    "gateway_cpu_ms": "gateway CPU ms/req",
    "gateway_cpu_us_per_token": "gateway CPU us/token",
    "tokens_per_second": "tok/s",
    "worker_cpu_ms": "worker CPU",
    "client_cpu_ms": "client CPU",
    "foreign_cpu": "foreign CPU",
    "idle_pss_mib": "idle PSS MiB",
    "peak_pss_mib": "peak PSS MiB",
    "peak_shm_mib": "peak /dev/shm MiB",
    "text_receipt_p50_ms": "text p50 ms",
    "text_receipt_p99_ms": "text p99 ms",
    "loop_lag_p99_ms": "loop lag p99 ms",
}


def markdown(facts: Mapping[str, str], rows: Rows) -> str:
    """Return the whole page."""
    head = ["# Gateway: Saccade beside SMG", "", *(f"{name}: {value}  " for name, value in facts.items()), ""]
    head += [
        "Receipt is the time from the moment before the request is written to the moment at which the worker has it.",
        "CPU counts all processes of each side, per answered request. Two values are two repeats; a ratio is of means,",
        "Saccade's over SMG's. Foreign CPU is the part of the machine that others used.",
        "",
    ]
    return "\n".join([*head, *(line for case in CASES for line in _table(case, rows))])


def _table(case: Case, rows: Rows) -> list[str]:
    """Return the case's table, [] where it was not run."""
    own = [row for row in rows if row["case"] == case.name]
    if not own:
        return []
    columns = [column for column in COLUMNS if any(row.get(column) is not None for row in own)]
    lines = [f"## {case.name}, {case.num_clients} clients{', caches on' if case.caches else ''}", ""]
    lines += [
        "| | " + " | ".join(COLUMNS[column] for column in columns) + " | errors |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for system in SYSTEMS:
        repeats = [row for row in own if row["system"] == system]
        if repeats:
            cells = [" / ".join(_shown(row.get(column)) for row in repeats) for column in columns]
            errors = sum(sum(row.get("errors", {}).values()) for row in repeats)
            lines.append(f"| {system} | " + " | ".join(cells) + f" | {errors} |")
    return [*lines, "", *_ratios(case, own), ""]


def _ratios(case: Case, own: Rows) -> list[str]:
    lines = []
    for system in SYSTEMS[1:]:
        ratios = {column: _ratio(own, system, column) for column in COLUMNS}
        phrases = [f"{COLUMNS[column]} {ratio:.2f}x" for column, ratio in ratios.items() if ratio and _compared(column)]
        goals = [
            f"{COLUMNS[goal.metric]} {'>=' if goal.at_least else '<='} {goal.ratio}x: "
            + ("met" if goal.met(ratio) else f"MISSED, {ratio:.2f}x")
            for goal in case.goals.get(system, ())
            if (ratio := ratios[goal.metric]) is not None
        ]
        if phrases:
            lines.append(f"- {system}: " + ", ".join(phrases) + (f". Goals: {'; '.join(goals)}" if goals else ""))
    return [*lines, *_limits(case, own)]


def _limits(case: Case, own: Rows) -> list[str]:
    """Return whether each system kept its most CPU per token, by the best of its repeats: noise only adds."""
    lines = []
    for system, limit in case.max_us_per_token.items():
        if spent := [row["gateway_cpu_us_per_token"] for row in own if row["system"] == system]:
            verdict = "kept" if min(spent) <= limit else "MISSED"
            lines.append(f"- {system}: gateway CPU <= {limit} us a token: {verdict}, {min(spent)}")
    return lines


def _compared(column: str) -> bool:
    return column not in ("foreign_cpu", "loop_lag_p99_ms", "client_cpu_ms")


def _ratio(own: Rows, system: str, column: str) -> float | None:
    """Return the mean of *system* over SMG's; None where one of them has none."""
    ours, theirs = ([row[column] for row in own if row["system"] == name and row.get(column)] for name in (system, SMG))
    return statistics.mean(ours) / statistics.mean(theirs) if ours and theirs else None


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:g}"
