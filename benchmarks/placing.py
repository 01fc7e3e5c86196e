"""What placing a request costs by the number of workers, and the end of one: `python -m benchmarks.placing`.

No process is started: workers are objects that report empty caches and never get a request. All figures are CPU
milliseconds of this thread, the median and the least, so that other work on the machine counts little.
"""

import argparse
import asyncio
import contextlib
import gc
import os
import time
from collections.abc import AsyncGenerator, Sequence
from random import Random

import msgspec
import uvloop

from benchmarks.measured import commit, machine
from saccade.connectors.worker_state import WorkerState
from saccade.fleet.dispatch import Dispatcher
from saccade.fleet.index import BlockIndex, Partition
from saccade.fleet.pool import WorkerPool
from saccade.fleet.prompt import Prompt
from saccade.fleet.router import Router
from saccade.fleet.settings import DispatchLimits
from saccade.identity.blocks import MediaRun
from saccade.protocol.description import Description, ModelFiles
from saccade.protocol.exactness import EXACT
from saccade.protocol.kv_events import KvEvents

NUM_TENANTS = 64
"""Tenants with a request that waits, for the cost of an end."""

NUM_LONG = 4
"""Workers that take the prompts which wait."""

LONG_TOKENS = 1 << 16
SMALL = Description(
    model="m",
    fingerprint=bytes(32),
    files=ModelFiles(files={}),
    max_model_len=1 << 20,
    max_num_seqs=256,
    block_size=16,
    num_blocks=1 << 20,
    dtype="bfloat16",
    device="none",
    shm_namespace="here",
    version="0",
)


class Silent:
    """A worker that never gets a request, and reports an empty cache."""

    def __init__(self, url: str, description: Description) -> None:
        self.url = url
        self.state = WorkerState(description, ready=True, exactness=EXACT)

    async def start(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """Nothing to close."""

    async def kv_events(self, *, blocks: bool) -> AsyncGenerator[KvEvents, None]:
        """No feed is asked for."""
        yield KvEvents(0, [], snapshot=True)

    def generate(self, *_: object) -> None:
        """It gets no request."""

    def reset_caches(self, **_: bool) -> bool:
        """It has no caches."""
        return False


def fleet_of(descriptions: Sequence[Description], limits: DispatchLimits) -> Dispatcher:
    """Return a dispatcher to a worker for each of *descriptions*, all of which are known to hold nothing."""
    worker_pool, index = WorkerPool((), lambda _: None), BlockIndex(1 << 40)
    for number, description in enumerate(descriptions):
        worker_pool.add(Silent(f"unix:/{number}", description))  # type: ignore[arg-type]
        index.begin(f"unix:/{number}", Partition(SMALL.fingerprint, SMALL.block_size), resumes_at_states=False)
        index.take(f"unix:/{number}", KvEvents(0, [], snapshot=True))
    return Dispatcher(worker_pool, Router("auto", index, Random(0)), limits=limits)


def prompt_of(num_tokens: int, num_images: int, seed: int) -> Prompt:
    """Return a prompt whose tokens and images no other seed has."""
    random = Random(seed)
    images = [MediaRun(100 + 1500 * number, 1000, random.randbytes(32), 0) for number in range(num_images)]
    return Prompt([random.randrange(1 << 15) for _ in range(num_tokens)], tuple(images))


async def placing(dispatcher: Dispatcher, prompts: Sequence[Prompt]) -> str:
    """Place each of *prompts* and return the median and the least time."""
    times = []
    for prompt in prompts:
        begun_at = time.thread_time()
        async with dispatcher.place("m", prompt):
            times.append(time.thread_time() - begun_at)
    return figures(times)


async def ends(num_workers: int, count: int) -> str:
    """End *count* requests while NUM_TENANTS wait, and return the median and the least time of the call."""
    one_row = msgspec.structs.replace(SMALL, max_num_seqs=1)
    short = msgspec.structs.replace(one_row, max_model_len=LONG_TOKENS)
    descriptions = [one_row] * NUM_LONG + [short] * (num_workers - NUM_LONG)
    dispatcher = fleet_of(descriptions, DispatchLimits(worker_queue=0, wait_seconds=600.0, client_share=0.75))
    token_ids, times = [1] * LONG_TOKENS, list[float]()
    held: asyncio.Queue[tuple[asyncio.Event, asyncio.Event]] = asyncio.Queue()

    async def hold(tenant: int) -> None:
        async with contextlib.AsyncExitStack() as placed:
            await placed.enter_async_context(dispatcher.place("m", Prompt(token_ids, tenant=bytes([tenant]))))
            may_end, has_ended = asyncio.Event(), asyncio.Event()
            held.put_nowait((may_end, has_ended))
            await may_end.wait()
            begun_at = time.thread_time()
            await placed.aclose()
            times.append(time.thread_time() - begun_at)
            has_ended.set()

    tasks = [asyncio.create_task(hold(number % NUM_TENANTS)) for number in range(NUM_LONG + NUM_TENANTS + count)]
    for _ in range(count):
        may_end, has_ended = await held.get()
        may_end.set()
        await has_ended.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return figures(times)


def figures(times: Sequence[float]) -> str:
    """Return the median and the least of *times* in seconds as milliseconds."""
    return f"{1e3 * sorted(times)[len(times) // 2]:.3f} ({1e3 * min(times):.3f})"


async def main() -> None:
    """Print a row for each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 16, 1000])
    parser.add_argument("--count", type=int, default=100, help="requests for each figure")
    arguments = parser.parse_args()
    print(f"{machine()}; load {os.getloadavg()[0]:.1f}; {commit()}")
    short, images, long = (
        [prompt_of(num_tokens, num_images, seed) for seed in range(arguments.count // part + 1)]
        for num_tokens, num_images, part in ((200, 0, 1), (8192, 4, 4), (131_072, 0, 20))
    )
    # A gateway is not full of prompts that a collection of garbage would look through.
    gc.freeze()
    print("| workers | 200 tokens | 8k, 4 images, first | seen | 128k, first | seen | end, 64 tenants wait |")
    print("|---|---|---|---|---|---|---|")
    for num_workers in arguments.workers:
        dispatcher = fleet_of([SMALL] * num_workers, DispatchLimits())
        await placing(dispatcher, short[:3])
        cells = [await placing(dispatcher, prompts) for prompts in (short, images, images, long, long)]
        cells.append(await ends(max(num_workers, NUM_LONG), arguments.count // 2))
        print(f"| {num_workers} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    uvloop.run(main())
