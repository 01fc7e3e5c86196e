"""Runs a whole measurement, and makes its tables."""

import platform
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version

import msgspec

from saccade.bench.client import Server
from saccade.bench.figures import LATENCIES, RATES, STATISTICS, Answers, Ratio, answers, figures, ratios
from saccade.bench.image_files import image_files
from saccade.bench.load import Run, measure_run
from saccade.bench.memory_limit import bandwidth, local_step_bytes
from saccade.bench.settings import BenchSettings
from saccade.release import installed_version

BUSY_CLIENT = 0.85
TITLES = {
    **{f"{name}_{part}": f"{title} {part}" for name, title in LATENCIES.items() for part in STATISTICS},
    **RATES,
    "memory_limit": "limit of TPOT: memory",
    "num_requests": "requests",
    "num_failed": "failed requests",
    "prompt_tokens": "prompt tokens, mean",
    "completion_tokens": "output tokens, mean",
    "cached_percent": "cached prompt tokens, %",
    "client_cpu_percent": "CPU of this client, %",
}
"""The figures in the order of the tables; the server's own histograms follow, with the names that they have."""


class Column(msgspec.Struct, frozen=True):
    """The figures of one server under one load."""

    label: str
    figures: Mapping[str, float]
    runs: Sequence[Run]


class Table(msgspec.Struct, frozen=True):
    """The loads of one server; or two servers under one load, with the ratios of B to A."""

    title: str
    columns: Sequence[Column]
    ratios: Mapping[str, Ratio]

    def lines(self) -> Iterator[list[str]]:
        """Yield the cells of each line, the header first."""
        yield ["times in ms", *(one.label for one in self.columns), *(("B / A", "95 %") if self.ratios else ())]
        for name in dict.fromkeys((*TITLES, *(name for column in self.columns for name in column.figures))):
            cells = [column.figures.get(name) for column in self.columns]
            if any(cell is not None for cell in cells):
                yield [TITLES.get(name, name), *map(_number, cells), *self._words(name)]

    def _words(self, name: str) -> list[str]:
        if (ratio := self.ratios.get(name)) is None:
            return ["", ""] if self.ratios else []
        words = f"{ratio.low:.2f} to {ratio.high:.2f}{'' if ratio.is_distinguishable else ', not distinguishable'}"
        return [f"{ratio.ratio:.2f}", words]

    def notes(self) -> Iterator[str]:
        """Yield sentences about errors, and a warning if the client was the bottleneck."""
        for column in self.columns:
            failed = [one for run in column.runs for one in run.records if one.error is not None]
            examples = {one.error: one.example for one in failed}
            for kind, count in Counter(one.error for one in failed).items():
                yield f"{column.label}: {count} x {kind}, such as: {examples[kind]}"
            if max(run.client_cpu for run in column.runs) > BUSY_CLIENT:
                yield f"{column.label}: this client was the limit, with its one core busy: the server may do more."
        if self.ratios and len(self.columns[0].runs) == 1:
            yield "With one alternation, the intervals do not include what changes from run to run."


class Result(msgspec.Struct, frozen=True):
    """What --json writes."""

    servers: Sequence[Mapping[str, object]]
    settings: BenchSettings
    seed: int
    versions: Mapping[str, str]
    tables: Sequence[Table]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _column(label: str, runs: Sequence[Run], values: dict[str, float]) -> Column:
    """Return a column of *values*, and of the figures that have no ratio.

    These are counts, and the means of the server's histograms in ms.
    """
    records = [record for run in runs for record in run.records]
    good = [record for record in records if record.error is None]
    prompt, cached = sum(one.prompt_tokens for one in good), [one.cached_tokens for one in good]
    values["num_requests"], values["num_failed"] = len(records), len(records) - len(good)
    if good:
        values["prompt_tokens"] = prompt / len(good)
        values["completion_tokens"] = sum(record.completion_tokens for record in good) / len(good)
    if prompt and any(one is not None for one in cached):
        values["cached_percent"] = 100 * sum(one or 0 for one in cached) / prompt
    values["client_cpu_percent"] = 100 * sum(run.client_cpu for run in runs) / len(runs)
    for name in dict.fromkeys(name for run in runs for name in run.stages):
        seconds, count = map(sum, zip(*(run.stages.get(name, (0.0, 0.0)) for run in runs), strict=True))
        values[name] = 1000 * seconds / count
    return Column(label, values, runs)


def tables(runs: Sequence[Run], limits: Mapping[str, float], memory_limits: Mapping[int, float]) -> list[Table]:
    """Return a single table for one server, or a table for each load of two servers.

    *memory_limits* has the ms that each side's machine takes to read the weights for one token, if that is known.
    """
    sides, columns, compared = sorted({run.side for run in runs}), [], []
    for load in dict.fromkeys(run.load for run in runs):
        parts: list[list[Answers]] = []
        for side in sides:
            own = sorted((one for one in runs if (one.load, one.side) == (load, side)), key=lambda one: one.alternation)
            parts.append([answers(run, limits) for run in own])
            values = figures(parts[-1])
            if not limits:
                values.pop("goodput", None)
            if side in memory_limits:
                values["memory_limit"] = memory_limits[side]
            columns.append(_column("AB"[side] if len(sides) > 1 else f"{load.value:g}", own, values))
        if len(sides) > 1:
            compared.append(Table(f"{load.kind} {load.value:g}", columns[-2:], ratios(parts[0], parts[1])))
    return compared or [Table(runs[0].load.kind, columns, {})]


async def measure(servers: Sequence[Server], settings: BenchSettings, tell: Callable[[str], None]) -> Result:
    """Measure one server, or two in turn. *tell* gets a line before each run. Raises StartupError."""
    loads, limits, runs = settings.loads(), settings.limits(), []
    seed = secrets.randbits(31) if settings.seed is None else settings.seed
    files = image_files(settings.images) if settings.images else ()
    known = [await server.explored() for server in servers]
    for number, load in enumerate(loads):
        for alternation in range(settings.alternations if len(known) > 1 else 1):
            for side in range(len(known)) if alternation % 2 == 0 else reversed(range(len(known))):
                tell(f"{load.kind} {load.value:g}, {known[side].root}")
                place = number, alternation, side
                runs.append(await measure_run(known[side], settings, seed, files, load, place))
    num_bytes = {side: local_step_bytes(one.root, await one.metrics()) for side, one in enumerate(known)}
    # After the runs, when the servers are idle.
    rate = bandwidth() if any(num_bytes.values()) else 1.0
    memory_limits = {side: 1000 * count / rate for side, count in num_bytes.items() if count}
    return Result(
        [{name: getattr(one, name) for name in ("root", "model", "version", "takes_ignore_eos")} for one in known],
        settings,
        seed,
        {"python": platform.python_version(), "saccade": installed_version(), "aiohttp": version("aiohttp")},
        tables(runs, limits, memory_limits),
    )
