"""Honest clients of a siege: streamed chats with fresh images and with text, and mistaken requests."""

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import agents
import aiohttp
import attacks
import images
from server import Server

from benchmarks.reliability import siege_payloads as payloads

ANSWER_TOKENS = 32
THINK_SECONDS = 0.5
"""Mean of the exponential pause of an honest client between two requests."""

PROBE_PAUSE_SECONDS = 0.15
LIVE_PAUSE_SECONDS = 0.05
TIMEOUT_SECONDS = 30.0
SIZE = (320, 240)
NUM_IMAGES = 16


@dataclass
class Seen:
    """What honest clients saw: seconds to the first token and to the end of an answer by kind, failures, seconds to
    refuse by what was wrong, refusals of another status than expected, and seconds of GET /live.
    """

    first: dict[str, list[float]] = field(default_factory=dict)
    whole: dict[str, list[float]] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    refused: dict[str, list[float]] = field(default_factory=dict)
    not_as_expected: Counter[str] = field(default_factory=Counter)
    live: list[float] = field(default_factory=list)

    def add(self, other: "Seen") -> None:
        """Add what was seen at another time."""
        for mine, its in ((self.first, other.first), (self.whole, other.whole), (self.refused, other.refused)):
            for kind, seconds in its.items():
                mine.setdefault(kind, []).extend(seconds)
        self.failures += other.failures
        self.not_as_expected += other.not_as_expected
        self.live += other.live

    @property
    def num_answers(self) -> int:
        """Requests that were answered well."""
        return sum(len(values) for values in self.whole.values())


@dataclass(frozen=True)
class Probe:
    """A request that is refused, and with what; any code if that is ""."""

    body: bytes
    status: int
    code: str = ""
    path: str = payloads.PATH


@dataclass(frozen=True)
class Honest:
    """The honest load: so many clients of each kind, on one server; *keys* are shared out in turn."""

    url: str
    model: str
    keys: tuple[str, ...]
    clients: Mapping[str, int]
    probes: Mapping[str, Probe]
    images: tuple[bytes, ...]
    serial: Iterator[int] = field(default_factory=itertools.count)
    patience_seconds: float = TIMEOUT_SECONDS

    async def run(self, seconds: float) -> Seen:
        """Ask for so long; a request that has begun is waited for."""
        seen = Seen()
        until = time.monotonic() + seconds
        # A connection for each request: a client that comes newly is the first to be shut out.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        timeout = aiohttp.ClientTimeout(total=self.patience_seconds)
        async with aiohttp.ClientSession(self.url, connector=connector, timeout=timeout) as session:
            kinds = [kind for kind, number in self.clients.items() for _ in range(number)]
            clients = [self._client(session, kind, number, until, seen) for number, kind in enumerate(kinds)]
            await asyncio.gather(*clients, self._err(session, until, seen), self._live(session, until, seen))
        return seen

    async def _client(self, session: aiohttp.ClientSession, kind: str, number: int, until: float, seen: Seen) -> None:
        draw = random.Random(number)
        headers = self._headers(number)
        while (pause := draw.expovariate(1 / THINK_SECONDS)) + time.monotonic() < until:
            await asyncio.sleep(pause)
            body = self._body(kind)
            try:
                first, whole = await _ask(session, body, headers)
            except _Failed as error:
                seen.failures[f"{kind}: {error}"] += 1
            except (aiohttp.ClientError, OSError) as error:
                seen.failures[f"{kind}: {type(error).__name__}"] += 1
            else:
                seen.first.setdefault(kind, []).append(first)
                seen.whole.setdefault(kind, []).append(whole)

    async def _err(self, session: aiohttp.ClientSession, until: float, seen: Seen) -> None:
        """Send what is refused, one kind after the other, and time the refusals."""
        for name, probe in itertools.cycle(self.probes.items()):
            await asyncio.sleep(PROBE_PAUSE_SECONDS)
            if time.monotonic() > until:
                return
            headers = self._headers(0) if name != payloads.WRONG_KEY else {"Authorization": "Bearer wrong"}
            began = time.monotonic()
            try:
                async with session.post(probe.path, data=probe.body, headers=JSON_TYPE | headers) as answer:
                    text = await answer.text()
            except (aiohttp.ClientError, OSError) as error:
                seen.not_as_expected[f"{name}: {type(error).__name__}"] += 1
                continue
            seen.refused.setdefault(name, []).append(time.monotonic() - began)
            if answer.status != probe.status or probe.code not in text:
                expected = f"{probe.status} {probe.code}".strip()
                seen.not_as_expected[f"{name}: {answer.status} {_code(text)} instead of {expected}"] += 1

    async def _live(self, session: aiohttp.ClientSession, until: float, seen: Seen) -> None:
        """Ask whether the server lives, as an orchestrator does, and time it."""
        while time.monotonic() < until:
            await asyncio.sleep(LIVE_PAUSE_SECONDS)
            began = time.monotonic()
            try:
                async with session.get("/live") as answer:
                    await answer.read()
            except (aiohttp.ClientError, OSError) as error:
                seen.not_as_expected[f"/live: {type(error).__name__}"] += 1
                continue
            seen.live.append(time.monotonic() - began)
            if answer.status != 200:
                seen.not_as_expected[f"/live: {answer.status} instead of 200"] += 1

    def _headers(self, number: int) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[number % len(self.keys)]}"} if self.keys else {}

    def _body(self, kind: str) -> bytes:
        number = next(self.serial)
        content: object = f"Number {number}. Tell a short story of a red boat, a blue house and a green tree."
        if kind == "images":
            # The comment makes another image of it, which no cache holds.
            comment = attacks.segment(0xFE, f"number {number}".encode())
            jpeg = attacks.jpeg_with(comment, self.images[number % len(self.images)])
            content = payloads.image_parts(payloads.data_url(jpeg, "jpeg"))
        return payloads.chat(self.model, content, max_tokens=ANSWER_TOKENS, ignore_eos=True, stream=True, temperature=0)


JSON_TYPE = {"Content-Type": "application/json"}


class _Failed(Exception):
    """An honest request was not answered well, in words."""


def honest(server: Server, keys: tuple[str, ...], clients: Mapping[str, int], has_probes: bool) -> Honest:
    """Return the load on *server*, with all images drawn; *has_probes*: some requests are mistaken."""
    model = server.name
    crowd = payloads.image_parts(*[payloads.data_url(payloads.small_png())] * payloads.TOO_MANY_IMAGES)
    huge = payloads.image_parts(payloads.data_url(payloads.huge_png()))
    probes = {
        "PNG of 20000 x 20000, 388 KB": Probe(payloads.chat(model, huge), 400),
        "100 images": Probe(payloads.chat(model, crowd), 400),
        "unknown model": Probe(payloads.chat("gpt-9", "hi"), 404),
        **({payloads.WRONG_KEY: Probe(payloads.chat(model, "hi"), 401)} if keys else {}),
        # The bundled model is too small for coding agents. No other bound may touch what they send.
        **{
            agent: Probe(json.dumps({"model": model, **body}).encode(), 400, "context_length_exceeded", path)
            for agent, (path, body, _) in agents.REQUESTS.items()
        },
    }
    album = tuple(images.encode(images.random_image(*SIZE, seed=seed), "JPEG") for seed in range(NUM_IMAGES))
    return Honest(server.url, model, keys, clients, probes if has_probes else {}, album)


async def _ask(session: aiohttp.ClientSession, body: bytes, headers: Mapping[str, str]) -> tuple[float, float]:
    """Return the seconds to the first token and to the end. Raises _Failed."""
    began = time.monotonic()
    first, last = 0.0, b""
    async with session.post(payloads.PATH, data=body, headers={**JSON_TYPE, **headers}) as answer:
        if answer.status != 200:
            raise _Failed(f"{answer.status} {_code(await answer.text())}")
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            last = line
            if b'"error"' in line:
                raise _Failed(f"error event {_code(line[6:].decode())}")
            if not first and b'"content"' in line and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                first = time.monotonic() - began
    if not first or last.strip() != b"data: [DONE]":
        raise _Failed("the stream ended early")
    return first, time.monotonic() - began


def _code(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return "without a code"
