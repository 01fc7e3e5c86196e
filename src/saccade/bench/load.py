"""Runs conversations with a server under one load, and measures how much its /metrics grew."""

import asyncio
import itertools
import re
import resource
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from saccade.bench.chats import Chats
from saccade.bench.client import Record, Server
from saccade.bench.settings import BenchSettings, Load

DEFAULT_REQUESTS = 100
RATE_WARMUP = 4
METRICS_SECONDS = 0.5
"""An engine may report what it counted this much later."""

SAMPLE = re.compile(r"^((?:saccade_|vllm:)\w+_seconds)_(sum|count)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
Histograms = Mapping[str, tuple[float, float]]
"""Seconds and count, by the name of a histogram and its label `stage`."""


class Run(msgspec.Struct, frozen=True):
    """The records of one run.

    - side: 0 for the first server, 1 for the second.
    - wall_seconds: from the first request to the last answer.
    - client_cpu: the CPU time of this process, divided by *wall_seconds*.
    - stages: how much the histograms in the server's /metrics grew.
    """

    load: Load
    alternation: int
    side: int
    wall_seconds: float
    client_cpu: float
    stages: Histograms
    records: Sequence[Record]


class Clients:
    """Holds conversations with a server; none begins after --seconds. *records* has their requests."""

    def __init__(self, server: Server, settings: BenchSettings, chats: Chats) -> None:
        self.records: list[Record] = []
        self._server = server
        self._settings = settings
        self._chats = chats
        self._prepared: list[list[msgspec.Raw]] = []
        self._begin = 0.0

    def prepare_conversations(self, count: int) -> None:
        """Make the first *count* conversations before the run, since each takes some milliseconds."""
        self._prepared = [self._chats.messages(number) for number in range(count)]

    async def closed_loop(self, num_clients: int, count: int | None) -> None:
        """Keep *num_clients* conversations open: *count* in all, or as many as begin in time."""
        self._begin = time.perf_counter()
        numbers: Iterable[int] = itertools.count() if count is None else range(count)
        shared = itertools.takewhile(lambda _: not self._is_over(), numbers)

        async def client() -> None:
            for number in shared:
                await self._converse(number)

        await asyncio.gather(*(client() for _ in range(num_clients)))

    async def open_loop(self, arrivals: Sequence[float]) -> None:
        """Begin a conversation at each of *arrivals*, in seconds from now."""
        self._begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number, arrival in enumerate(arrivals):
                await asyncio.sleep(arrival - self._now())
                group.create_task(self._converse(number))

    def _now(self) -> float:
        return time.perf_counter() - self._begin

    def _is_over(self) -> bool:
        return self._settings.seconds is not None and self._now() >= self._settings.seconds

    async def _converse(self, number: int) -> None:
        is_prepared = number < len(self._prepared)
        contents = self._prepared[number] if is_prepared else await asyncio.to_thread(self._chats.messages, number)
        messages: list[dict[str, object]] = []
        for turn, content in enumerate(contents):
            messages.append({"role": "user", "content": content})
            body = self._server.body(messages, self._settings.output_tokens)
            record, text = await self._server.ask(body, Record(number, turn, self._now()))
            self.records.append(record)
            if record.error is not None or self._is_over():
                return
            messages.append({"role": "assistant", "content": text})


def arrivals(per_second: float, random: np.random.Generator, count: int | None, seconds: float | None) -> list[float]:
    """Return the times of a Poisson process: at most *count*, and those within *seconds*, if these are not None."""
    gaps = (random.exponential(1 / per_second) for _ in (itertools.count() if count is None else range(count)))
    return list(itertools.takewhile(lambda now: seconds is None or now < seconds, itertools.accumulate(gaps)))


def histograms(page: str) -> Histograms:
    """Return Saccade's and vLLM's histograms of seconds in the text of /metrics; {} if it has none."""
    totals: dict[str, tuple[float, float]] = {}
    for name, kind, labels, value in SAMPLE.findall(page):
        stage = re.search(r'\bstage="([^"]*)"', labels)
        key = f"{name} {stage[1]}" if stage else name
        seconds, count = totals.get(key, (0.0, 0.0))
        totals[key] = (seconds + float(value), count) if kind == "sum" else (seconds, count + float(value))
    return totals


def growth(before: Histograms, after: Histograms) -> Histograms:
    """Return how much each histogram grew, without histograms that did not grow."""
    pairs = {name: (new, before.get(name, (0.0, 0.0))) for name, new in after.items()}
    return {name: (new[0] - old[0], new[1] - old[1]) for name, (new, old) in pairs.items() if new[1] > old[1]}


async def measure_run(
    server: Server, settings: BenchSettings, seed: int, files: Sequence[Path], load: Load, place: tuple[int, int, int]
) -> Run:
    """Warm up *server* and measure it under *load*. *place* has the numbers of load, alternation and side."""
    is_closed = load.kind == "concurrency"
    num_requests = settings.num_requests or (None if settings.seconds else DEFAULT_REQUESTS)
    count = num_requests and -(-num_requests // settings.turns)
    random = np.random.default_rng([seed, 4, *place[:2]])
    times = [] if is_closed else arrivals(load.value / settings.turns, random, count, settings.seconds)
    clients = Clients(server, settings, Chats(settings, seed, (*place, 0), files))
    clients.prepare_conversations((count or 0) if is_closed else len(times))
    num_clients = int(load.value) if is_closed else RATE_WARMUP
    num_warmup = num_clients if settings.warmup is None else settings.warmup
    await Clients(server, settings, Chats(settings, seed, (*place, 1), files)).closed_loop(num_clients, num_warmup)
    before = await _settled(server)
    cpu, begin = _cpu_seconds(), time.perf_counter()
    await (clients.closed_loop(num_clients, count) if is_closed else clients.open_loop(times))
    wall = time.perf_counter() - begin
    share = (_cpu_seconds() - cpu) / wall
    stages = growth(before, await _settled(server)) if before else {}
    return Run(load, place[1], place[2], wall, share, stages, clients.records)


async def _settled(server: Server) -> Histograms:
    if await server.metrics():
        await asyncio.sleep(METRICS_SECONDS)
    return histograms(await server.metrics())


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
