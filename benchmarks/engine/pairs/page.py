"""The page of the pairs: medians of each side, and the median of the ratios round by round."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

PREFACE = """# Engines in pairs

Random Qwen3-VL of the 2B release's shape. Both engines of a pair are up at once and are asked in turn, so noise of the
machine meets both; only ratios within a row mean something. Seconds are medians of the rounds. A ratio is the median of
the ratios round by round: below 1, the engine on the left is faster. Images are PNG and new to every cache, unless the
row says otherwise. Saccade, vLLM and llama.cpp answer over HTTP, OpenVINO GenAI in process. Memory (PSS) is read after
the row. "Start" is until the first answer, with the model's files in the page cache.
"""
COLUMNS = {"whole": "whole, s", "first": "first token, s", "each": "per token, ms"}


def markdown(measured: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of all rows *measured*, a table for each pair and run."""
    lines = [PREFACE]
    runs: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for one in measured:
        runs.setdefault((*one["sides"], one["machine"], one["commit"], one["command"]), []).append(one)
    for (left, right, machine, commit, command), rows in runs.items():
        lines += [f"## {left} and {right}", "", f"{machine}; commit {commit}; `{command}`", ""]
        lines += [f"| row | tokens | {' | '.join(COLUMNS.values())} | ratio of whole | first | per token | MiB |"]
        lines += ["|---" * 9 + "|", *(_line(row, left, right) for row in rows), ""]
        starts = ", ".join(f"{name} {rows[0]['sides'][name]['start_seconds']} s" for name in (left, right))
        lines += [f"Start: {starts}.", ""]
    return "\n".join(lines)


def _line(row: Mapping[str, Any], left: str, right: str) -> str:
    sides = [row["sides"][name] for name in (left, right)]
    cells = [" / ".join(_median(side, column) for side in sides) for column in COLUMNS]
    ratios = [f"{ratio(row, left, right, column):.2f}" for column in COLUMNS]
    memory = " / ".join(f"{side['pss_mib']:,}" for side in sides)
    return f"| {' | '.join([row['row'], str(row['tokens']), *cells, *ratios, memory])} |"


def _median(side: Mapping[str, Any], column: str) -> str:
    seconds = statistics.median(times[column] for times in side["rounds"])
    return f"{1000 * seconds:.0f}" if column == "each" else f"{seconds:.2f}"


def ratio(row: Mapping[str, Any], left: str, right: str, column: str) -> float:
    """Return the median over the rounds of *left*'s seconds over *right*'s."""
    pairs = zip(*(row["sides"][name]["rounds"] for name in (left, right)), strict=True)
    return statistics.median(one[column] / other[column] for one, other in pairs)
