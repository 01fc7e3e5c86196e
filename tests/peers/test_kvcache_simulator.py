"""kvcache-simulator on a trace: its least-recently-used cache finds as many prompt tokens as ours, within 1 %."""

import os
import sys
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
from tables import table

from saccade.engine.core.kv.blocks import PagedBlocks
from saccade.engine.core.kv.manager import BlockManager
from saccade.engine.core.sequence import Sequence as EngineSequence
from saccade.identity.blocks import root_key
from saccade.models.positions import MultimodalPositions
from saccade.protocol.request import EngineRequest, SamplingParams

pytestmark = pytest.mark.peers

SIZE = 16
NUM_REQUESTS = 2000
ROOT = root_key(b"fingerprint", b"")

Prompt = Sequence[int]
"""A prompt as the numbers of its blocks: block n of all prompts has the same tokens."""


@pytest.fixture(scope="module")
def simulate() -> Callable[[list[Prompt], int], tuple[int, int]]:
    """Return the simulator: hits and all tokens of the second half of a trace, by the blocks of its cache."""
    sys.path.append(os.environ["SACCADE_ROUTERS"])
    from kvcache_sim.plan import build_execution_plan  # type: ignore[import-not-found]
    from kvcache_sim.policies import simulate_policy  # type: ignore[import-not-found]
    from kvcache_sim.trace import TraceData  # type: ignore[import-not-found]

    def run(prompts: list[Prompt], num_blocks: int) -> tuple[int, int]:
        ids = [block for prompt in prompts for block in prompt]
        starts = [0]
        for prompt in prompts:
            starts.append(starts[-1] + len(prompt))
        num_tokens = SIZE * len(ids)
        tokens = [SIZE] * len(ids)
        trace: Any = TraceData(
            ids, tokens, starts, SIZE, len(prompts), len({*ids}), num_tokens, num_tokens / len(prompts), 0, 0
        )
        result = simulate_policy(build_execution_plan(trace), "lru", num_blocks)
        return result.hitTokens, result.totalTokens

    return run


def chats(random: Random) -> list[Prompt]:
    """Conversations of up to eight turns, in random order, each after one of 20 system prompts."""
    systems = [[1000 * number + block for block in range(random.randrange(2, 30))] for number in range(20)]
    talks = [[*random.choice(systems)] for _ in range(150)]
    fresh = 1_000_000
    prompts = []
    while len(prompts) < NUM_REQUESTS:
        number = random.randrange(len(talks))
        num_more = random.randrange(1, 12)
        talks[number] = [*talks[number], *range(fresh, fresh + num_more)]
        fresh += num_more
        prompts.append(talks[number])
        if len(talks[number]) > 80:
            talks[number] = [*random.choice(systems)]
    return prompts


def documents(random: Random) -> list[Prompt]:
    """Questions about 300 documents, some of them far more popular than others."""
    lengths = [random.randrange(10, 60) for _ in range(300)]
    prompts = []
    for number in range(NUM_REQUESTS):
        document = int(300 * random.random() ** 3)
        prompts.append([*range(1000 * document, 1000 * document + lengths[document]), 1_000_000 + number])
    return prompts


def found_tokens(prompts: list[Prompt], num_blocks: int) -> int:
    """Return how many tokens of the second half of *prompts* our cache finds; requests come one after another."""
    blocks = BlockManager(PagedBlocks(num_blocks, SIZE))
    found = 0
    for number, prompt in enumerate(prompts):
        # The last token of a prompt is always computed, so there is one more.
        token_ids = [token for block in prompt for token in (block, *[0] * (SIZE - 1))] + [0]
        request = EngineRequest(request_id=str(number), token_ids=token_ids, sampling=SamplingParams(max_tokens=1))
        owner = EngineSequence(0, request, number, 0, ROOT, MultimodalPositions([]))
        assert blocks.admit(owner, headroom_blocks=0)
        if number >= NUM_REQUESTS // 2:
            found += owner.num_computed_tokens
        blocks.commit(owner, owner.num_tokens)
        blocks.release_sequence(owner)
    return found


@table("traffic", [chats, documents])
@table("num_blocks", [200, 1000, 3000])
def test_our_cache_finds_as_many_tokens(
    traffic: Callable[[Random], list[Prompt]],
    num_blocks: int,
    simulate: Callable[[list[Prompt], int], tuple[int, int]],
) -> None:  # E8
    prompts = traffic(Random(num_blocks))
    # One of our blocks has the last token of the prompt that runs.
    expected, total = simulate(prompts, num_blocks - 1)
    found = found_tokens(prompts, num_blocks)
    assert 0 < expected < total
    assert abs(found - expected) <= 0.01 * expected, (found, expected, total)
