"""The rows of all runs, as JSON and as a page."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAMES = {
    "qwen3_vl": "Qwen3-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen2_vl": "Qwen2-VL",
    "phi3_v": "Phi-3-vision",
    "kimi_k25": "Kimi-K2.5",
    "qwen3_5": "Qwen3.5",
}
PARTS = {"gate": "by cost", "round_robin": "workers take turns", "broken": "keys of another tenant"}
HEAD = """# Fleet: the gate of exact routing

Tiny random models in float32, real workers, one real gateway. Every image is asked about once; the rates are means
over the repeats, which come in a shuffle. *Hit rate* is the router's histogram `saccade_router_kv_hit_rate`, *cached*
the workers' own `cached_tokens` over prompt tokens, *best* the most that can be cached, since the last token is always
computed. The rows of other policies are controls: workers that take turns stand beside a simulation, and keys that name
no block must give 0. A run fails where anything is not as it must be, or could not be measured.
"""
COLUMNS = ("model", "policy", "workers", "repeats", "hit rate", "cached", "best", "simulated", "result")


def add(path: Path, row: Mapping[str, Any]) -> None:
    """Put *row* into the file at *path*, in the place of an older one of its family and part; rewrite the page."""
    rows = json.loads(path.read_text()) if path.exists() else []
    rows = [old for old in rows if _place(old) != _place(row)] + [row]
    rows.sort(key=_place)
    path.write_text(json.dumps(rows, indent=1) + "\n")
    path.with_suffix(".md").write_text(page(rows))


def page(rows: list[Mapping[str, Any]]) -> str:
    """Return the page about *rows*."""
    lines = [HEAD, "| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|", *map(_line, rows), ""]
    for fact in ("machine", "commit", "command"):
        lines.append(f"- {fact}: {'; '.join(dict.fromkeys(f'`{row[fact]}`' for row in rows))}")
    return "\n".join([*lines, ""])


def _line(row: Mapping[str, Any]) -> str:
    figures = [_shown(row.get(name)) for name in ("rate", "cached_rate", "best_rate", "simulated_rate")]
    result = "passed" if not row["failures"] else "FAILED: " + "; ".join(row["failures"])
    cells = [NAMES[row["family"]], PARTS[row["part"]], str(row["workers"]), str(row.get("repeats", "-")), *figures]
    return "| " + " | ".join([*cells, result]) + " |"


def _shown(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.4f}"


def _place(row: Mapping[str, Any]) -> tuple[int, int]:
    return list(NAMES).index(row["family"]), list(PARTS).index(row["part"])
