"""Dynamo's router, on the cache events that ours follows: the same overlap for every worker, and the same choice.

Prompts are text: SelectionService of ai-dynamo-runtime 1.6.1 reads no images in vLLM's events, so that two images in
one place of a prompt are the same to it.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
from vllm_publisher import Prompt, Publisher, hashes, publisher, removed, stored
from waiting import until

from saccade.connectors.events.event_source import EventSource
from saccade.connectors.events.named_images import NamedImages
from saccade.connectors.events.published_events import follow
from saccade.connectors.events.reported_cache import KeyContext, ReportedCache
from saccade.fleet.index import BlockIndex, Partition
from saccade.fleet.lookup import LocalLookup, Targets
from saccade.fleet.router import Option, RoutedPrompt, Router
from saccade.identity.blocks import block_keys, root_key

pytestmark = pytest.mark.peers

SIZE = 16
PARTITION = Partition(b"fingerprint", SIZE)
CONTEXT = KeyContext(PARTITION.fingerprint, SIZE, SIZE, max_model_len=4096)
WORKERS = ("0", "1", "2", "3")
TARGETS = Targets(WORKERS, [PARTITION] * len(WORKERS))


@pytest.fixture(scope="module")
def selection_service() -> Any:
    """The class of Dynamo's router without its runtime; scripts/peers installs it."""
    os.environ.setdefault("DYN_LOG", "error")
    sys.path.append(os.environ["SACCADE_ROUTERS"])
    from dynamo._core import SelectionService  # type: ignore[import-not-found]

    return SelectionService


def prompt_of(random: Random, base: Sequence[int], num_tokens: int) -> Prompt:
    """Return a prompt that begins with *base*, whose other tokens are random."""
    return Prompt((*base, *(random.randrange(30_000) for _ in range(num_tokens))))


def keys_of(prompt: Prompt) -> list[bytes]:
    return block_keys(root_key(PARTITION.fingerprint, b""), prompt.token_ids, (), SIZE)


def query(prompt: Prompt) -> dict[str, Any]:
    return {"model_name": "m", "token_ids": list(prompt.token_ids)}


@dataclass
class Fleet:
    """Scripted workers, and the two routers that follow their events."""

    publishers: Sequence[Publisher]
    index: BlockIndex
    dynamo: Any
    held: list[set[int]]
    """The hashes of the blocks that each worker has published and not removed."""

    async def store(self, worker: int, prompt: Prompt) -> None:
        """Publish the full blocks of *prompt* that the worker lacks."""
        names = hashes(prompt, SIZE)
        first = next((i for i, name in enumerate(names) if name not in self.held[worker]), len(names))
        if first < len(names):
            self.held[worker] |= {*names}
            await self.publishers[worker].publish(stored(prompt, SIZE, first=first, count=len(names) - first))

    async def remove_end(self, worker: int, prompt: Prompt, count: int) -> None:
        """Publish that the last *count* blocks of *prompt* left the cache."""
        names = [name for name in reversed(hashes(prompt, SIZE)[-count:]) if name in self.held[worker]]
        self.held[worker] -= {*names}
        await self.publishers[worker].publish(*map(removed, names))

    async def settle(self, marker: Prompt) -> None:
        """Store *marker* everywhere, and wait until both routers know it, and so all that came before."""
        for worker in range(len(WORKERS)):
            await self.store(worker, marker)
        whole = dict.fromkeys(WORKERS, len(marker.token_ids) // SIZE)
        await until(lambda: self.ours(marker) == whole)
        async with asyncio.timeout(20):
            while await self.dynamos(marker) != whole:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    def ours(self, prompt: Prompt) -> Mapping[str, int]:
        overlaps = LocalLookup(self.index).find(TARGETS, {PARTITION: keys_of(prompt)})
        return dict(zip(WORKERS, overlaps.num_blocks.tolist(), strict=True))

    async def dynamos(self, prompt: Prompt) -> Mapping[str, int]:
        answer = await self.dynamo.overlap_scores(query(prompt))
        return {str(row["worker_id"]): row["device_blocks"] for row in answer["workers"]}

    async def listen(self, worker: str, source: EventSource) -> None:
        """Keep our index up to date."""
        self.index.begin(worker, PARTITION, resumes_at_states=False)
        cache = ReportedCache(CONTEXT, NamedImages(frozenset()))
        async with contextlib.aclosing(follow(source, cache)) as messages:
            async for message in messages:
                assert self.index.take(worker, message) == 0


@contextlib.asynccontextmanager
async def fleet_of(selection_service: Any) -> AsyncGenerator[Fleet, None]:
    async with contextlib.AsyncExitStack() as stack:
        publishers = [await stack.enter_async_context(publisher(topic="")) for _ in WORKERS]
        fleet = Fleet(publishers, BlockIndex(1 << 30), selection_service(indexer_threads=1), [set() for _ in WORKERS])
        stack.callback(fleet.dynamo.shutdown)
        for name, each in zip(WORKERS, publishers, strict=True):
            worker = {"worker_id": int(name), "model_name": "m", "endpoint": "http://127.0.0.1:9", "block_size": SIZE}
            await fleet.dynamo.upsert_worker(worker | {"kv_events_endpoint": each.source.endpoint})
            task = asyncio.create_task(fleet.listen(name, each.source))
            stack.callback(task.cancel)
        for each in publishers:
            await each.subscribed()
            await each.subscribed()
        yield fleet


async def test_overlaps_are_those_of_dynamo(selection_service: Any) -> None:  # E8
    random = Random(56)
    async with fleet_of(selection_service) as fleet:
        bases = [prompt_of(random, (), 16 * random.randrange(1, 9)).token_ids for _ in range(6)]
        prompts = [prompt_of(random, random.choice(bases), random.randrange(1, 150)) for _ in range(60)]
        for _ in range(300):
            worker, prompt = random.randrange(len(WORKERS)), random.choice(prompts)
            if random.random() < 0.8:
                await fleet.store(worker, prompt)
            else:
                # A block that others follow stays: vLLM, too, frees the end of a prompt first.
                shared = {name for one in prompts if one is not prompt for name in hashes(one, SIZE)}
                own = [name for name in hashes(prompt, SIZE) if name not in shared]
                if own:
                    await fleet.remove_end(worker, prompt, random.randint(1, len(own)))
        await fleet.settle(prompt_of(random, (), 64))
        overlaps = [fleet.ours(prompt) for prompt in prompts]
        assert overlaps == [await fleet.dynamos(prompt) for prompt in prompts]
        # Most prompts are held in different lengths.
        assert sum(max(found.values()) > min(found.values()) for found in overlaps) > 20


async def test_the_only_holder_is_chosen_by_both_while_all_are_idle(selection_service: Any) -> None:  # E8
    random = Random(57)
    router = Router("cost", BlockIndex(1 << 20), Random(1))
    rows = np.array([router.describe(Option(name, PARTITION)) for name in WORKERS])
    async with fleet_of(selection_service) as fleet:
        prompts = [prompt_of(random, (), random.randrange(40, 400)) for _ in range(30)]
        holders = [random.randrange(len(WORKERS)) for _ in prompts]
        for holder, prompt in zip(holders, prompts, strict=True):
            await fleet.store(holder, prompt)
        await fleet.settle(prompt_of(random, (), 64))
        for holder, prompt in zip(holders, prompts, strict=True):
            keys = {PARTITION: keys_of(prompt)}
            overlaps = LocalLookup(fleet.index).find(TARGETS, keys)
            chosen = router.preview(RoutedPrompt(len(prompt.token_ids), keys).among(rows, overlaps), now=0.0).worker
            selected = await fleet.dynamo.select(query(prompt))
            assert (chosen, str(selected["worker_id"])) == (str(holder), str(holder))
