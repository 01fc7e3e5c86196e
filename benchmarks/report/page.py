"""The measured sections of docs/figures.md, from the rows of the parts, with plots as SVG files."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report.parts import TTFT_SYSTEMS
from saccade.bench.page import STYLE, WIDTH, plot

BEGIN, END = "<!-- measured: begin (python -m benchmarks.report) -->", "<!-- measured: end -->"
SMG, TOKENSPEED, NATIVE = "smg", "saccade, TokenSpeed wire", "saccade, native wire"
GATEWAYS = {SMG: "SMG", TOKENSPEED: "Saccade, TokenSpeed's wire", NATIVE: "Saccade, its own wire"}

TTFT = """A tiny Qwen3-VL with random weights in float32 on one thread, 8 sequences at a time. Every request has a new
PNG of 448 x 448 and asks for 16 tokens; clients wait for their answer before they ask again. Times are in ms, and all
servers and the clients share the machine."""
ACCURACY = """The bundled model answers four questions about images that were never drawn in training. Saccade gets PNG
files over HTTP, transformers the pixels; both compute in float32, greedily. The numbers are of exact answers."""
GATEWAY = """Both gateways have the same stand-in workers, which run no model, the same 32 JPEGs and the same load.
Gateway, worker and load share the machine. Each system runs twice, in turn; values are means."""
STREAMING = """32 clients stream answers of 256 tokens without images, of stand-in workers that send a token to each
every 10 ms. Receipt is the time until the worker has the request."""
MEMORY = """Proportional set sizes in MiB: shared pages count once. Gateways while 32 clients send JPEGs of 1280x960;
whole servers, engine included, at the end of the row with most clients of the [first
table](#time-to-the-first-token)."""
FLEET = """Four workers of a tiny Qwen3-VL with one gateway. 16 clients ask for 200 images about five times in a
shuffle; rates are over the repeats. What is best follows from the lengths of the prompts: the last token is always
computed, and only whole blocks are kept."""
PEERS = """Two real vLLM workers with each gateway. A repeat lands on the holder if its whole image is cached there.
*blocks* is the size of each worker's cache."""


def write_page(state: Mapping[str, Any], page: Path) -> None:
    """Replace the measured sections of *page*, and write its plots to the folder `images` beside it."""
    text = page.read_text() if page.exists() else f"# Figures\n\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    (page.parent / "images").mkdir(exist_ok=True)
    page.write_text("\n".join([before + BEGIN, "", *_sections(state, page.parent / "images"), END + after]))


def _sections(state: Mapping[str, Any], images: Path) -> Iterator[str]:
    ttft = [state[f"ttft: {system}"] for system in TTFT_SYSTEMS if f"ttft: {system}" in state]
    gateway = [part for name, part in state.items() if name.startswith("gateway: ")]
    if ttft:
        yield from _section("Time to the first token", TTFT, ttft, _ttft(_rows(ttft), images))
    if "accuracy" in state:
        yield from _section("Accuracy", ACCURACY, [state["accuracy"]], _accuracy(state["accuracy"]["rows"]))
    if gateway:
        yield from _section("The gateway compared with SMG", GATEWAY, gateway, _gateway(_rows(gateway)))
    if "streaming" in state:
        yield from _section("Streaming", STREAMING, [state["streaming"]], _streaming(state["streaming"]["rows"]))
    if "routing: four workers" in state:
        part = state["routing: four workers"]
        yield from _section("Routing over four workers", FLEET, [part], _fleet(part["rows"]))
    if "routing: two vLLM" in state:
        part = state["routing: two vLLM"]
        yield from _section("Routing over two vLLM", f"{PEERS}\n{_needs(part)}", [part], _peers(part["rows"]))
    if gateway and ttft:
        yield from _section("Memory", MEMORY, (), _memory(_rows(gateway), _rows(ttft)))


def _section(title: str, text: str, parts: Iterable[Mapping[str, Any]], lines: Iterable[str]) -> Iterator[str]:
    yield from (f"## {title}", "", text, "", *lines, "")
    places = dict.fromkeys(f"{part['machine']}; commit {part['commit']}; {part['date']}" for part in parts)
    if places:
        commands = dict.fromkeys(f"    {part['command']}" for part in parts)
        yield from (f"Measured on {'; '.join(places)}:", "", *commands, "")


def _rows(parts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [row for part in parts for row in part["rows"]]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(one)} |" for one in (head, ["---"] * len(head), *rows)]


def _best(values: Sequence[float | None], *, more: bool) -> list[str]:
    """Return *values* as cells, the best one in bold."""
    known = [value for value in values if value is not None]
    best = (max if more else min)(known, default=None)
    words = ["-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in values]
    return [
        f"**{word}**" if value is not None and value == best else word
        for value, word in zip(values, words, strict=True)
    ]


def _ttft(rows: Sequence[Mapping[str, Any]], images: Path) -> Iterator[str]:
    systems = list(dict.fromkeys(row["system"] for row in rows))
    values = {(row["system"], row["clients"]): row for row in rows}
    clients = sorted({row["clients"] for row in rows})
    for name, title, more in (
        ("ttft_p50_ms", "TTFT p50, ms", False),
        ("ttft_p99_ms", "TTFT p99, ms", False),
        ("tokens_per_second", "output tokens a second", True),
    ):
        cells = {n: [values.get((system, n), {}).get(name) for system in systems] for n in clients}
        yield from _table(
            [f"{title}; clients", *systems], ([str(n), *_best(line, more=more)] for n, line in cells.items())
        )
        lines = [
            (system, [(float(n), float(cells[n][at])) for n in clients if cells[n][at] is not None])
            for at, system in enumerate(systems)
        ]
        file = f"figures-{name.replace('_', '-')}.svg"
        (images / file).write_text(_svg(plot(title, "clients", lines)))
        yield from ("", f"![{title}, by clients](images/{file})", "")
    few, many = (choose(row["requests"] for row in rows) for choose in (min, max))
    yield f"A row has {many if few == many else f'{few} to {many}'} requests; the best value of each row is bold."


def _svg(figure: str) -> str:
    """Return the plot in *figure* as a file of its own, with room for long names."""
    svg = figure[figure.index("<svg") : figure.index("</figure>")].replace(
        f'width="{WIDTH}"', f'width="{WIDTH + 60}"', 1
    )
    return svg.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1).replace(">", f"><style>{STYLE}</style>", 1)


def _accuracy(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    head = ["question", "images", "Saccade", "transformers", "equal answers"]
    return _table(
        head,
        (
            [row["question"], *(str(row[name]) for name in ("images", "saccade", "transformers", "equal"))]
            for row in rows
        ),
    )


def _mean(rows: Sequence[Mapping[str, Any]], case: str, system: str, name: str) -> float | None:
    values = [row[name] for row in rows if (row["case"], row["system"]) == (case, system) and row.get(name) is not None]
    return statistics.mean(values) if values else None


def _compared(rows: Sequence[Mapping[str, Any]], names: Mapping[str, tuple[str, bool]]) -> Iterator[str]:
    """Yield a table for each of *names*: its title, and whether more is better."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    for name, (title, more) in names.items():
        cells = {case: [_mean(rows, case, system, name) for system in GATEWAYS] for case in cases}
        known = [[case, *_best(line, more=more)] for case, line in cells.items() if any(line)]
        if known:
            yield from (*_table([title, *GATEWAYS.values()], known), "")


def _gateway(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    names = {
        "requests_per_second": ("requests a second", True),
        "gateway_cpu_ms": ("the gateway's CPU for a request, ms", False),
        "receipt_p50_ms": ("time to the worker's receipt, p50, ms", False),
        "text_receipt_p99_ms": ("the same at p99 of a text request among images, ms", False),
    }
    return _compared(rows, names)


def _streaming(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    names = {
        "tokens_per_second": ("tokens a second", True),
        "gateway_cpu_us_per_token": ("the gateway's CPU for a token, µs", False),
        "receipt_p50_ms": ("time to the worker's receipt, p50, ms", False),
    }
    return _compared(rows, names)


def _memory(gateway: Sequence[Mapping[str, Any]], servers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    names = {
        "idle_pss_mib": ("at rest", False),
        "peak_pss_mib": ("peak", False),
        "peak_shm_mib": ("/dev/shm, peak", False),
    }
    yield from _compared(gateway, names)
    most = max(row["clients"] for row in servers)
    rows = {row["system"]: row.get("pss_mib") for row in servers if row["clients"] == most}
    yield from _table([f"{most} clients", *rows], [["whole server", *_best(list(rows.values()), more=False)]])


def _fleet(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    policies = {"gate": "by cost", "round_robin": "workers take turns"}
    names = ("rate", "cached_rate", "best_rate")
    head = ["policy", "repeats", "hit rate of the router", "cached tokens of the workers", "best possible"]
    return _table(
        head, ([policies[row["part"]], str(row["repeats"]), *(f"{row[name]:.4f}" for name in names)] for row in rows)
    )


def _needs(part: Mapping[str, Any]) -> str:
    best = part["best possible cached tokens"]
    facts = f"All images need {part['needed blocks']} blocks, and at best {best} of the tokens are cached."
    return "\n".join([facts, *([part["remark"]] if "remark" in part else ())])


def _peers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return _table(list(rows[0]), ([str(cell) for cell in row.values()] for row in rows))
