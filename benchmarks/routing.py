"""What routing costs: the choice of a worker, and keeping up with what workers report: `python -m benchmarks.routing`.

No process is started. Workers are objects in this one that report blocks and never get a request. Choices and ingest
are measured in CPU time of this thread, so that other work on the machine does not count; delays in wall time.
"""

import argparse
import asyncio
import gc
import itertools
import os
import time
import tracemalloc
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from random import Random
from typing import Any

import msgspec
import uvloop

from benchmarks.measured import commit, machine
from saccade.connectors.worker_state import WorkerState
from saccade.fleet.dispatch import Dispatcher
from saccade.fleet.feed import CacheListener
from saccade.fleet.index import BlockIndex, Partition
from saccade.fleet.pool import WorkerPool
from saccade.fleet.prompt import Prompt
from saccade.fleet.router import Router
from saccade.gateway.app import COLLECTOR_THRESHOLDS
from saccade.identity.blocks import MediaRun, block_keys, root_key
from saccade.protocol.description import Description, ModelFiles
from saccade.protocol.exactness import EXACT
from saccade.protocol.kv_events import BlockRemoved, BlockStored, KvEvent, KvEvents

BLOCK_SIZE = 16
NUM_WORKERS = 16
SHARED_TOKENS = 2048
"""Of a system prompt that every worker holds."""

EVENTS_PER_MESSAGE = 1024
PARTITION = Partition(bytes(32), BLOCK_SIZE)
ROOT = root_key(PARTITION.fingerprint, b"")
DESCRIPTION = Description(
    model="m",
    fingerprint=PARTITION.fingerprint,
    files=ModelFiles(files={}),
    max_model_len=1 << 20,
    max_num_seqs=256,
    block_size=BLOCK_SIZE,
    num_blocks=1 << 20,
    dtype="bfloat16",
    device="none",
    shm_namespace="here",
    version="0",
)


class Feed:
    """A worker that reports *frames*, each after the wait in seconds that *waits* names; delays go to *delays_ms*."""

    state = WorkerState(DESCRIPTION, ready=True, exactness=EXACT)

    def __init__(self, url: str, frames: Iterator[bytes], wait_seconds: float) -> None:
        self.url = url
        self.delays_ms: list[float] = []
        self._frames = frames
        self._wait_seconds = wait_seconds

    async def kv_events(self, *, blocks: bool) -> AsyncGenerator[KvEvents, None]:
        """Yield the messages in *frames*, decoded when they are due, and note how long each was under way."""
        decoder = msgspec.msgpack.Decoder(KvEvents)
        due_at = time.perf_counter()
        for frame in self._frames:
            due_at += self._wait_seconds
            await asyncio.sleep(max(0.0, due_at - time.perf_counter()))
            yield decoder.decode(frame)
            if self._wait_seconds:
                # The listener asks for the next message when this one is in the index, and its turn is over.
                self.delays_ms.append(max(0.0, time.perf_counter() - due_at) * 1e3)
        await asyncio.Event().wait()


def percentiles(times: Sequence[float]) -> str:
    """Return the least, the median and the 99th percentile; on a busy machine the least is nearest to an idle one's."""
    ordered = sorted(times)
    return f"{ordered[0]:.2f} | {ordered[len(ordered) // 2]:.2f} | {ordered[len(ordered) * 99 // 100]:.2f}"


def stored(keys: Sequence[bytes]) -> list[KvEvent]:
    """Return the events of a prompt's blocks."""
    parents = [ROOT, *keys]
    return [BlockStored(key, parent, [], [], parent == ROOT) for key, parent in zip(keys, parents, strict=False)]


def fleet_of(workers: Sequence[Feed]) -> tuple[WorkerPool, Router]:
    """Return a fleet of these workers, and a router that knows nothing."""
    fleet = WorkerPool((), lambda _: None)
    for worker in workers:
        fleet.add(worker)  # type: ignore[arg-type]
    return fleet, Router("cost", BlockIndex(1 << 40), Random(0))


def prompts(num_tokens: int, count: int, seed: int) -> list[list[int]]:
    """Return prompts that begin with the shared tokens and go on apart."""
    random = Random(seed)
    shared = list(range(1000, 1000 + SHARED_TOKENS))
    return [shared + random.choices(range(150_000), k=num_tokens - SHARED_TOKENS) for _ in range(count)]


async def choices_ms(dispatcher: Dispatcher, asked: Sequence[list[int]]) -> list[float]:
    """Return the CPU milliseconds of each choice."""
    times = []
    for token_ids in asked:
        # The ids are new objects, as a tokenizer makes them just before.
        fresh = msgspec.msgpack.decode(msgspec.msgpack.encode(token_ids), type=list[int])
        # An image of a thousand tokens stands behind the shared ones.
        prompt = Prompt(fresh, (MediaRun(SHARED_TOKENS, 1000, bytes(32)),))
        begun_at = time.thread_time()
        place = dispatcher.place("m", prompt)
        async with place:
            times.append((time.thread_time() - begun_at) * 1e3)
            # A booking that ends without a token leaves no prediction behind.
    return times


async def choice_rows(num_tokens: int, count: int) -> None:
    """Print what a choice takes where the prompt is held by nobody, one worker or all."""
    run = (MediaRun(SHARED_TOKENS, 1000, bytes(32)),)
    for name, num_holders, num_warm in (
        ("held by none but for its beginning", 0, 0),
        ("held by one, first seen by this gateway", 1, 0),
        ("held by one, seen before", 1, 1),
        ("held by all, seen before", NUM_WORKERS, 1),
    ):
        asked = prompts(num_tokens, count, num_holders + num_warm)
        workers = [Feed(f"w{number:02}", iter(()), 0.0) for number in range(NUM_WORKERS)]
        fleet, router = fleet_of(workers)
        for number, worker in enumerate(workers):
            router.index.begin(worker.url, PARTITION, resumes_at_states=False)
            router.index.take(worker.url, KvEvents(0, [], snapshot=True))
            for index, token_ids in enumerate(asked):
                is_holder = (number - index) % NUM_WORKERS < num_holders
                keys = block_keys(ROOT, token_ids if is_holder else token_ids[:SHARED_TOKENS], run, BLOCK_SIZE)
                router.index.take(worker.url, KvEvents(1, stored(keys)))
        dispatcher = Dispatcher(fleet, router)
        # A gateway is not full of prompts that a collection of garbage would look through.
        gc.collect()
        gc.freeze()
        for _ in range(num_warm):
            await choices_ms(dispatcher, asked)
        print(f"| {num_tokens} | {name} | {percentiles(await choices_ms(dispatcher, asked))} |", flush=True)


def frames(seed: int, events_per_message: int, num_live: int) -> Iterator[bytes]:
    """Yield encoded messages without end: of *num_live* blocks each new one takes the place of the oldest."""
    encoder, keys = msgspec.msgpack.Encoder(), itertools.count(seed << 64)
    live: list[bytes] = []
    parent = ROOT
    for number in itertools.count():
        events: list[KvEvent] = []
        while len(events) < events_per_message:
            key = next(keys).to_bytes(16, "little")
            if len(live) >= num_live:
                events += [BlockRemoved(oldest) for oldest in live[: events_per_message // 2]]
                del live[: events_per_message // 2]
            events.append(BlockStored(key, parent, [], [], parent == ROOT))
            live.append(key)
            parent = key
        yield encoder.encode(KvEvents(number, events, snapshot=number == 0))


def learn(index: BlockIndex, messages: Sequence[bytes]) -> float:
    """Have *index* learn encoded messages; return the thousands of events a second of CPU time."""
    decoder, num_events = msgspec.msgpack.Decoder(KvEvents), 0
    begun_at = time.thread_time()
    for message in messages:
        events = decoder.decode(message)
        index.take("w", events)
        num_events += len(events.events)
    return num_events / (time.thread_time() - begun_at) / 1e3


def ingest_rows(num_blocks: int) -> None:
    """Print how many events a second are decoded and learnt, and the memory of what is held then."""
    messages = list(itertools.islice(frames(1, EVENTS_PER_MESSAGE, 1 << 40), num_blocks // EVENTS_PER_MESSAGE))
    index = BlockIndex(1 << 40)
    index.begin("w", PARTITION, resumes_at_states=False)
    print(f"stored blocks, decoded and learnt: {learn(index, messages):.0f} thousand/s")
    decoder = msgspec.msgpack.Decoder(KvEvents)
    removals = []
    for message in messages:
        removed: list[KvEvent] = [
            BlockRemoved(event.key) for event in decoder.decode(message).events if isinstance(event, BlockStored)
        ]
        removals.append(msgspec.msgpack.encode(KvEvents(1, removed)))
    print(f"removed blocks: {learn(index, removals):.0f} thousand/s")
    tracemalloc.start()
    learn(index, messages)
    num_bytes = tracemalloc.get_traced_memory()[0] / index.num_blocks("w")
    tracemalloc.stop()
    print(f"memory: {num_bytes:.0f} bytes a block, {num_bytes / 1.048576:.0f} MiB a million", flush=True)


async def with_feeds(workers: Sequence[Feed], block: Callable[[Dispatcher], Coroutine[Any, Any, None]]) -> int:
    """Run the block while the feeds of *workers* are followed; return how many events were learnt."""
    fleet, router = fleet_of(workers)
    listener = CacheListener(fleet, router)
    fleet.changed(fleet.clients[0])
    try:
        await block(Dispatcher(fleet, router))
        return sum(listener.feed(worker).num_events for worker in fleet.clients)
    finally:
        await listener.close()


async def delay_row(seconds: float) -> None:
    """Print how long events take from the wire to the index while every worker reports at a steady rate."""
    workers = [Feed(f"w{number:02}", frames(number, 64, 20_000), 0.02) for number in range(NUM_WORKERS)]
    num_events = await with_feeds(workers, lambda _: asyncio.sleep(seconds))
    delays_ms = [delay for worker in workers for delay in worker.delays_ms]
    print(f"| {NUM_WORKERS} workers, {num_events / seconds / 1e3:.0f} thousand events/s | {percentiles(delays_ms)} |")


async def flood_rows(seconds: float) -> None:
    """Print choices, and hops of a request over the event loop, without and with a flood of events."""
    asked = prompts(8192, 64, 7)

    async def measure(dispatcher: Dispatcher) -> None:
        times: list[float] = []
        hops_ms: list[float] = []
        ends_at = time.perf_counter() + seconds
        while time.perf_counter() < ends_at:
            begun_at = time.perf_counter()
            await asyncio.sleep(0.001)
            hops_ms.append((time.perf_counter() - begun_at) * 1e3)
            times += await choices_ms(dispatcher, [asked[len(times) % len(asked)]])
        results.append((times, hops_ms))

    for name, is_flood in (("quiet", False), ("flood", True)):
        results: list[tuple[list[float], list[float]]] = []
        made = [list(itertools.islice(frames(number, EVENTS_PER_MESSAGE, 50_000), 400)) for number in range(4)]
        workers = [
            Feed(f"w{number:02}", itertools.cycle(made[number % 4]) if is_flood else iter(()), 0.0)
            for number in range(NUM_WORKERS)
        ]
        num_events = await with_feeds(workers, measure)
        ((times, hops_ms),) = results
        rate = f"{name}, {num_events / seconds / 1e3:.0f} thousand events/s"
        print(f"| {rate} | {percentiles(times)} | {percentiles(hops_ms)} |", flush=True)


async def main() -> None:
    """Run all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each row of delays")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="that are learnt")
    arguments = parser.parse_args()
    print(f"{machine()}; load {os.getloadavg()[0]:.1f}; {commit()}")
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    ingest_rows(arguments.blocks)
    print("| tokens | prompt | choice, least ms | p50 | p99 |\n|---|---|---|---|---|")
    await choice_rows(8192, 200)
    await choice_rows(131_072, 40)
    print("| event to index | least ms | p50 | p99 |\n|---|---|---|---|")
    await delay_row(arguments.seconds)
    print(
        "| events | choice, least ms | p50 | p99 | a wait of 1 ms, least | p50 | p99 |\n|---|---|---|---|---|---|---|"
    )
    await flood_rows(arguments.seconds)


if __name__ == "__main__":
    uvloop.run(main())
