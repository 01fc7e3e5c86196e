"""The attackers of a siege, in a process of their own; its argument is a Plan in JSON.

The program prints "ready" when all bytes are built, begins when a line comes on standard input, and ends when standard
input is closed, or after Plan.seconds. Then it prints what the attackers saw as one JSON object. Every attack has its
own address, a fixed number of workers, and a least time between two starts of a worker, so that no attack depends on
bandwidth or on the machine's cores.
"""

import asyncio
import contextlib
import itertools
import json
import re
import socket
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass, field

from benchmarks.reliability import siege_payloads as payloads
from benchmarks.reliability.siege_hosts import Hosts, hosting

HOST = "127.0.0.1"
HOLD_SECONDS = 120.0
"""After this an attacker gives up by itself."""

CODE = re.compile(rb'"code":\s*"(\w+)"')
ESTABLISHED = 1
RECEIVE_BUFFER_BYTES = 2048


@dataclass(frozen=True)
class Plan:
    """The server under attack: its port, its model, the attackers' key; which attacks run, and for how long at most."""

    port: int
    model: str
    key: str | None
    attacks: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Attack:
    """*workers* repeat *attempt* for ever; each begins at most once in *pause_seconds*."""

    workers: int
    pause_seconds: float
    attempt: Callable[["Attackers", str, int], Awaitable[str]]


@dataclass
class Tally:
    """What one attack saw: seconds of its attempts, by outcome."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, outcome: str, seconds: float) -> None:
        """Take in the end of one attempt."""
        self.seconds.setdefault(outcome, []).append(seconds)

    def summary(self) -> dict[str, dict[str, float]]:
        """Return by outcome: how often, and after how many seconds."""
        return {
            outcome: {"count": len(values), "median": statistics.median(values), "max": max(values)}
            for outcome, values in self.seconds.items()
        }


def status_of(answer: bytes) -> str:
    """Return an answer's status and error code in words."""
    if not answer.startswith(b"HTTP/1.1 "):
        return "closed without an answer"
    code = CODE.search(answer.partition(b"\r\n\r\n")[2][:4096])
    status = answer[9:12].decode("latin-1")
    return f"{status} {code[1].decode()}" if code and status != "200" else status


class Attackers:
    """All attacks on one server: what they send and what they saw."""

    def __init__(self, plan: Plan, hosts: Hosts) -> None:
        self.plan = plan
        self.hosts = hosts
        self.tallies = {name: Tally() for name in plan.attacks}
        self.serial = itertools.count()
        refused = payloads.refused(plan.model)
        self.refused = itertools.cycle([name for name in refused if plan.key or name != payloads.WRONG_KEY])
        self.make_refused = refused
        self.bombs = itertools.cycle(payloads.bombs(plan.model).values() if "bombs" in plan.attacks else ())
        self.encoded_bombs = itertools.cycle(
            payloads.encoded_bombs().items() if "encoded bombs" in plan.attacks else ()
        )
        needs_maximal = not {"maximal bodies", "abandoned bodies"}.isdisjoint(plan.attacks)
        self.maximal = itertools.cycle(payloads.maximal(plan.model).items() if needs_maximal else ())

    async def run(self, name: str, number: int) -> None:
        """Repeat one worker's attempts until cancelled."""
        attack, tally = ATTACKS[name], self.tallies[name]
        address = f"127.0.1.{list(ATTACKS).index(name) + 1}"
        await asyncio.sleep(number * attack.pause_seconds / attack.workers)
        while True:
            began = time.monotonic()
            outcome = "open at the end"
            try:
                async with asyncio.timeout(HOLD_SECONDS):
                    outcome = await attack.attempt(self, address, number)
            except TimeoutError:
                outcome = f"given up after {HOLD_SECONDS:.0f} s"
            except ConnectionRefusedError:
                outcome = "connection refused"
            except OSError:
                outcome = "connection broken"
            finally:
                tally.add(outcome, time.monotonic() - began)
            await asyncio.sleep(max(0.0, began + attack.pause_seconds - time.monotonic()))

    async def ask(self, address: str, content: bytes) -> str:
        """Send *content* at once and read the answer to its end."""
        async with connected(address, self.plan.port) as (reader, writer):
            sending = asyncio.create_task(_send(writer, content))
            try:
                return status_of(await _read(reader))
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    async def ask_chat(self, address: str, body: bytes) -> str:
        """Send a chat with a body of known length."""
        return await self.ask(address, payloads.head(len(body), self.plan.key, port=self.plan.port) + body)

    async def ask_for(self, address: str, *paths: str) -> str:
        """Send a chat that names images at the hosts."""
        urls = [self.hosts.url(path, next(self.serial)) for path in paths]
        return await self.ask_chat(address, payloads.chat(self.plan.model, payloads.image_parts(*urls), max_tokens=1))

    async def drip(self, address: str, start: bytes, pieces: Iterable[bytes], seconds: float) -> str:
        """Send *start*, then a piece every few *seconds*, until the server answers or closes."""
        async with connected(address, self.plan.port) as (reader, writer):
            writer.write(start)
            answer = b""
            for piece in pieces:
                with contextlib.suppress(TimeoutError):
                    data = await asyncio.wait_for(reader.read(4096), seconds)
                    answer += data
                    # The body of an answer may come after its head.
                    if not data or b"}" in answer:
                        return status_of(answer)
                if not answer:
                    writer.write(piece)
                    await writer.drain()
        return "done"


@contextlib.asynccontextmanager
async def connected(address: str, port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect from *address*; the connection is gone when the block ends."""
    reader, writer = await asyncio.open_connection(HOST, port, local_addr=(address, 0))
    try:
        yield reader, writer
    finally:
        if not writer.is_closing():
            writer.transport.abort()


async def _send(writer: asyncio.StreamWriter, content: bytes) -> None:
    with contextlib.suppress(OSError):
        writer.write(content)
        await writer.drain()


async def _read(reader: asyncio.StreamReader) -> bytes:
    answer = b""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            answer = (answer + data)[:65536]
    return answer


async def tarpit(attackers: Attackers, address: str, number: int) -> str:
    """Name a host that accepts and never answers."""
    return await attackers.ask_for(address, "tarpit")


async def dripping_host(attackers: Attackers, address: str, number: int) -> str:
    """Name a host that sends one byte a second."""
    return await attackers.ask_for(address, "drip")


async def stalling_host(attackers: Attackers, address: str, number: int) -> str:
    """Name a host that stalls behind its headers."""
    return await attackers.ask_for(address, "stall")


async def siblings(attackers: Attackers, address: str, number: int) -> str:
    """Name one image that is missing among slow ones."""
    return await attackers.ask_for(address, "missing", *["tarpit"] * payloads.NUM_SIBLINGS)


async def dripped_head(attackers: Attackers, address: str, number: int) -> str:
    """Send a head of one byte a second."""
    return await attackers.drip(address, b"", payloads.endless_head(), 1.0)


async def dripped_body(attackers: Attackers, address: str, number: int) -> str:
    """Announce a large body and send a byte of it every two seconds."""
    start = payloads.head(payloads.LARGE_BYTES, attackers.plan.key, port=attackers.plan.port) + b"{"
    return await attackers.drip(address, start, itertools.repeat(b" "), 2.0)


async def dripped_chunks(attackers: Attackers, address: str, number: int) -> str:
    """Send a chunked body of one byte every two seconds."""
    start = payloads.head(None, attackers.plan.key, port=attackers.plan.port) + b"1\r\n{\r\n"
    return await attackers.drip(address, start, itertools.repeat(b"1\r\n \r\n"), 2.0)


async def silence(attackers: Attackers, address: str, number: int) -> str:
    """Connect and say nothing."""
    return await attackers.drip(address, b"", itertools.repeat(b""), 1.0)


async def unread_answer(attackers: Attackers, address: str, number: int) -> str:
    """Ask for a long stream and read none of it; the client sees the end only in the socket's state."""
    loop = asyncio.get_running_loop()
    body = payloads.chat(
        attackers.plan.model,
        f"Tell story {next(attackers.serial)}.",
        max_tokens=payloads.READER_TOKENS,
        n=payloads.READER_SAMPLES,
        ignore_eos=True,
        stream=True,
        logprobs=True,
        top_logprobs=20,
    )
    with socket.socket() as connection:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        connection.bind((address, 0))
        await loop.sock_connect(connection, (HOST, attackers.plan.port))
        content = payloads.head(len(body), attackers.plan.key, port=attackers.plan.port) + body
        await loop.sock_sendall(connection, content)
        answer = b""
        while connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == ESTABLISHED:
            await asyncio.sleep(0.5)
            with contextlib.suppress(BlockingIOError):
                answer = connection.recv(12, socket.MSG_PEEK)
    return f"{status_of(answer)}, then cut off" if b" 200" in answer else status_of(answer)


async def flood(attackers: Attackers, address: str, number: int) -> str:
    """Send a request that is refused."""
    name = next(attackers.refused)
    content = attackers.make_refused[name](attackers.plan.key, attackers.plan.port)
    return f"{name}: {await attackers.ask(address, content)}"


async def maximal(attackers: Attackers, address: str, number: int) -> str:
    """Send one of the longest bodies."""
    name, body = next(attackers.maximal)
    return f"{name}: {await attackers.ask_chat(address, body)}"


async def abandoned(attackers: Attackers, address: str, number: int) -> str:
    """Send one of the longest bodies whole, and leave."""
    name, body = next(attackers.maximal)
    async with connected(address, attackers.plan.port) as (_, writer):
        await _send(writer, payloads.head(len(body), attackers.plan.key, port=attackers.plan.port) + body)
        writer.close()
        await writer.wait_closed()
    return f"{name}: left"


async def bomb(attackers: Attackers, address: str, number: int) -> str:
    """Send an image that costs more than it shows."""
    return await attackers.ask_chat(address, next(attackers.bombs))


async def encoded_bomb(attackers: Attackers, address: str, number: int) -> str:
    """Send a small body that its coding makes large."""
    name, (coding, body) = next(attackers.encoded_bombs)
    head = payloads.head(len(body), attackers.plan.key, port=attackers.plan.port, coding=coding)
    return f"{name}: {await attackers.ask(address, head + body)}"


ATTACKS = {
    "tarpit": Attack(64, 1.0, tarpit),
    "dripping hosts": Attack(24, 1.0, dripping_host),
    "stalling hosts": Attack(24, 1.0, stalling_host),
    "failing among slow siblings": Attack(2, 3.0, siblings),
    "dripped heads": Attack(32, 1.0, dripped_head),
    "dripped bodies": Attack(16, 1.0, dripped_body),
    "dripped chunks": Attack(16, 1.0, dripped_chunks),
    "silent connections": Attack(32, 1.0, silence),
    "unread answers": Attack(8, 60.0, unread_answer),
    "refused requests": Attack(20, 0.2, flood),
    "maximal bodies": Attack(2, 2.0, maximal),
    "abandoned bodies": Attack(2, 2.0, abandoned),
    "bombs": Attack(2, 2.0, bomb),
    "encoded bombs": Attack(2, 2.0, encoded_bomb),
}
"""By name. Together they hold fewer places than the default of `--max-requests`, which honest clients need too."""


async def attack(plan: Plan) -> None:
    """Build, wait for the word, attack, and print what was seen."""
    loop = asyncio.get_running_loop()
    began, ended = asyncio.Event(), asyncio.Event()
    async with hosting() as hosts:
        attackers = Attackers(plan, hosts)
        threading.Thread(target=_listen, args=(loop, began, ended), daemon=True).start()
        print("ready", flush=True)
        await began.wait()
        used, began_at = time.process_time(), time.monotonic()
        workers = [
            asyncio.create_task(attackers.run(name, number))
            for name in plan.attacks
            for number in range(ATTACKS[name].workers)
        ]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), plan.seconds)
        failed = [worker.exception() for worker in workers if worker.done()]
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        seen = {
            "attacks": {name: tally.summary() for name, tally in attackers.tallies.items()},
            "fetches": {path: [hosts.seen[path], hosts.open_at_most[path]] for path in hosts.seen},
            "failed": [repr(error) for error in failed],
            "cores": (time.process_time() - used) / (time.monotonic() - began_at),
        }
    print(json.dumps(seen), flush=True)


def _listen(loop: asyncio.AbstractEventLoop, began: asyncio.Event, ended: asyncio.Event) -> None:
    """Turn lines of standard input into events: the first begins, the end of input ends."""
    for _ in sys.stdin:
        loop.call_soon_threadsafe(began.set)
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(began.set)
        loop.call_soon_threadsafe(ended.set)


def encoded(plan: Plan) -> str:
    """Return *plan* as the program's argument."""
    return json.dumps(asdict(plan))


def main() -> None:
    """Attack as the argument says."""
    fields = json.loads(sys.argv[1])
    asyncio.run(attack(Plan(**{**fields, "attacks": tuple(fields["attacks"])})))


if __name__ == "__main__":
    main()
