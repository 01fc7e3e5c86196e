"""The result as one self-contained HTML file: tables, and plots as SVG."""

import math
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from saccade.bench.figures import LATENCIES, answers, times
from saccade.bench.report import Column, Result, Table

WIDTH, HEIGHT = 460, 270
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 12, 38
MAX_TICKS = 6
SHARES = np.linspace(0, 99, 199)
"""The percentiles that a distribution shows. The last one in a hundred would leave no room for the others."""

STYLE = """
:root{color-scheme:light dark;--ink:#1f2430;--faint:#7d8494;--line:#d9dce3}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8ee;--faint:#9aa0b0;--line:#3a3f4b}}
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);max-width:1000px;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;margin:1em 0;font-variant-numeric:tabular-nums}
td{padding:2px 14px 2px 0;text-align:right;border-bottom:1px solid var(--line)}td:first-child{text-align:left}
figure{display:inline-block;margin:0 1em 1em 0}svg text{fill:var(--faint);font-size:11px}pre{white-space:pre-wrap}
.axis{stroke:var(--line)}.s{fill:none;stroke-width:2}
.c0{stroke:#2f6fde}.c1{stroke:#e0662b}.c2{stroke:#2e9e6b}.c3{stroke:#a04fc4}.c4{stroke:#c9a227}.c5{stroke:#d04a74}
"""
Points = Sequence[tuple[float, float]]


def _ticks(largest: float) -> list[float]:
    """Return round numbers from 0 to *largest*."""
    power = 10.0 ** math.floor(math.log10(largest / MAX_TICKS))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= largest / MAX_TICKS)
    return [index * step for index in range(int(largest / step) + 1)]


def plot(title: str, x_label: str, lines: Sequence[tuple[str, Points]]) -> str:
    """Return a figure with a named line for each of *lines*. Both axes begin at 0."""
    width, height, bottom = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM, HEIGHT - BOTTOM
    max_x, max_y = (max((point[axis] for _, one in lines for point in one), default=0) or 1.0 for axis in (0, 1))
    parts = [f'<text x="{LEFT + width / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>']
    for tick in _ticks(max_x):
        x = LEFT + width * tick / max_x
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{tick:g}</text>')
    for tick in _ticks(max_y):
        y = bottom - height * tick / max_y
        parts.append(f'<path class="axis" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for index, (label, points) in enumerate(lines):
        line = " ".join(f"{LEFT + width * x / max_x:.1f},{bottom - height * y / max_y:.1f}" for x, y in points)
        y = bottom - 8 - 15 * (len(lines) - 1 - index)
        parts.append(f'<polyline class="s c{index % 6}" points="{line}"/>')
        parts.append(f'<path class="s c{index % 6}" d="M{WIDTH - 130} {y}h18"/>')
        parts.append(f'<text x="{WIDTH - 107}" y="{y + 4}">{escape(label)}</text>')
    svg = f'<svg width="{WIDTH}" height="{HEIGHT}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>"


def _distributions(table: Table) -> Iterator[str]:
    parts = {column.label: times([answers(run, {}) for run in column.runs]) for column in table.columns}
    for name in ("ttft", "itl"):
        known = {label: np.percentile(one[name], SHARES).tolist() for label, one in parts.items() if len(one[name])}
        lines = [(label, list(zip(numbers, SHARES.tolist(), strict=True))) for label, numbers in known.items()]
        yield plot(f"{LATENCIES[name]}: percent of values below", "ms", lines)


def _over_loads(columns: Sequence[Column]) -> Iterator[str]:
    """Yield plots of figures over the loads."""
    for title, names in {
        "TTFT, ms": {"p50": "ttft_p50", "p99": "ttft_p99"},
        "TPOT, ms": {"p50": "tpot_p50", "p99": "tpot_p99"},
        "output tokens/s": {"": "tokens_per_second"},
    }.items():
        lines: dict[str, list[tuple[float, float]]] = {}
        for column in columns:
            for part, name in names.items():
                if name in column.figures:
                    point = column.runs[0].load.value, column.figures[name]
                    lines.setdefault(f"{'AB'[column.runs[0].side]} {part}", []).append(point)
        yield plot(title, columns[0].runs[0].load.kind, [(label, sorted(line)) for label, line in lines.items()])


def page(result: Result) -> str:
    """Return the whole file."""
    parts = [f"<!doctype html><meta charset=utf-8><title>saccade bench</title><style>{STYLE}</style><h1>Measured</h1>"]
    for label, server in zip("AB", result.servers, strict=False):
        parts.append("<p>" + escape(f"{label}: {server['root']}, {server['model']} {server['version']}") + "</p>")
    columns = [column for table in result.tables for column in table.columns]
    if len({column.runs[0].load for column in columns}) > 1:
        parts += _over_loads(columns)
    for table in result.tables:
        parts += [f"<h2>{escape(table.title)}</h2>", *_distributions(table), "<table>"]
        parts += ["<tr>" + "".join(f"<td>{escape(cell)}" for cell in line) for line in table.lines()]
        parts += ["</table>", *(f"<p>{escape(note)}</p>" for note in table.notes())]
    return "\n".join((*parts, f"<pre>{escape(f'{result.settings} seed={result.seed} {result.versions}')}</pre>"))
