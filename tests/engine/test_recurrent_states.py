"""A whole Qwen3.5 in the engine: checkpoints, preemption, samples, recycled states and events of what can resume."""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import msgspec
import pytest
import recordings
import torch
from references.networks import ORACLES, Oracle
from tables import table

from saccade.engine.config import EngineConfig
from saccade.engine.core.cache_events import WatchedCaches
from saccade.engine.core.step import StateMove
from saccade.engine.executor import memory
from saccade.engine.loop import Engine
from saccade.identity.blocks import block_keys, root_key
from saccade.models.spec import NETWORK_DTYPE, HeadCut, Paged, Recurrent
from saccade.nn.parallel import ALONE
from saccade.protocol.kv_events import BlockRemoved, BlockStored, KvEvents, StateRemoved, StateStored
from saccade.protocol.request import EngineRequest

pytestmark = pytest.mark.ci

BLOCK = 16
NAMES = ["qwen3_5", "qwen3_5_moe"]
PARTS: list[Any] = [23, ((96, 128), 1), 30]
"""An image of 12 tokens between texts."""


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, network_folder: Callable[[str], Path]) -> Path:
    return network_folder(request.param)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return load_oracle(folder)


@cache
def load_oracle(folder: Path) -> Oracle:
    return ORACLES[folder.name](folder)


def engine(folder: Path, **settings: Any) -> Engine:
    defaults = {"num_blocks": 64, "max_num_seqs": 4, "state_snapshot_blocks": 2, "num_state_snapshots": 16}
    return engines.poison(engines.engine(folder, **{**defaults, **settings}))


def prompt(folder: Path, length: int | None = None, request_id: str = "a", **sampling: Any) -> EngineRequest:
    """The first *length* tokens of one text, or a text with an image."""
    whole = engines.request(folder, PARTS if length is None else [120], request_id, **sampling)
    if length is None:
        return whole
    return msgspec.structs.replace(whole, token_ids=whole.token_ids[:length], request_id=str(length))


def check(oracle: Oracle, subject: Engine, *asked: EngineRequest, **options: Any) -> engines.Outcome:
    """Answer, and compare every token's logits with the reference's."""
    logits = engines.record_logits(subject)
    outcome = engines.drain(subject, *asked, **options)
    never = torch.tensor(oracle.placeholder_token_ids)
    for one in asked:
        for index in range(one.num_samples):
            name = f"{one.request_id}#{index}" if index else one.request_id
            token_ids = outcome.answers[name].token_ids
            assert len(token_ids) == one.sampling.max_tokens
            both = (torch.stack(logits[name]), oracle.logits(one, token_ids))
            ours, reference = (rows.index_fill(1, never, float("-inf")) for rows in both)
            torch.testing.assert_close(ours, reference, atol=oracle.atol, rtol=0)
    assert engines.is_idle(subject)
    return outcome


@pytest.mark.parametrize("chunk", [7, 50, 2048])
def test_prefixes_resume_from_checkpoints(folder: Path, oracle: Oracle, chunk: int) -> None:
    subject = engine(folder, max_num_batched_tokens=chunk)
    check(oracle, subject, prompt(folder, 100))
    asked = [prompt(folder, length) for length in (33, 34, 97, 110)]
    outcome = check(oracle, subject, *asked)
    # Checkpoints are behind every second block, and behind the last whole one of the prompt of 100.
    assert [outcome.answers[one.request_id].num_cached_tokens for one in asked] == [32, 32, 96, 96]


def test_an_image_s_prompt_resumes(folder: Path, oracle: Oracle) -> None:
    subject = engine(folder)
    for request_id in ("fresh", "again"):
        outcome = check(oracle, subject, prompt(folder, request_id=request_id))
    assert outcome.answers["again"].num_cached_tokens == 64


def test_questions_about_one_image_compute_at_most_themselves_and_a_block(folder: Path, oracle: Oracle) -> None:
    """Five questions, with no other state between: --state-snapshot-blocks has its default."""
    subject = engine(folder, state_snapshot_blocks=64, max_num_batched_tokens=30)
    for number in range(5):
        whole = engines.request(folder, [9, ((192, 160), 1), 20 + number], str(number))
        end = whole.media[0].spans[0].start + whole.media[0].spans[0].length
        question = [100 * number + place for place in range(len(whole.token_ids) - end)]
        asked = msgspec.structs.replace(whole, token_ids=[*whole.token_ids[:end], *question])
        answer = check(oracle, subject, asked).answers[str(number)]
        assert answer.num_cached_tokens == (end // 16 * 16 if number else 0)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preemption_changes_no_answer(folder: Path, oracle: Oracle, enable_prefix_caching: bool) -> None:
    subject = engine(folder, num_blocks=9, max_num_batched_tokens=32, enable_prefix_caching=enable_prefix_caching)
    check(oracle, subject, *(prompt(folder, length, max_tokens=40) for length in (30, 40, 50, 60)))
    assert subject.load().preemptions_total > 0


def test_samples_begin_from_the_prompt_s_checkpoint(folder: Path, oracle: Oracle) -> None:
    subject = engine(folder)
    restored: list[StateMove] = []
    engines.steps_of(subject, lambda step: restored.extend(step.restore))
    # Drawn tokens can make rounding grow beyond the tolerance, in the reference more than here; those of this seed do not.
    asked = msgspec.structs.replace(prompt(folder, temperature=1.0, max_tokens=12, seed=1), num_samples=3)
    outcome = check(oracle, subject, asked)
    assert len(restored) == 2
    assert len({move.checkpoint for move in restored}) == 1
    assert len({tuple(answer.token_ids) for answer in outcome.answers.values()}) == 3


def test_a_recycled_state_never_leaks(folder: Path, oracle: Oracle) -> None:  # [eng] 41
    """Rows and blocks that nothing is kept in are spoilt behind every step."""
    subject = engine(folder, max_num_seqs=2, enable_prefix_caching=False, num_blocks=20)
    asked = [prompt(folder, length) for length in (1, 17, 40, 71)]
    check(oracle, subject, *asked, each_step=lambda: engines.spoil_unused(subject))


def test_decodes_of_a_batch_and_chunks_share_a_step(folder: Path, oracle: Oracle) -> None:
    subject = engine(folder, max_num_batched_tokens=24)
    check(oracle, subject, *(prompt(folder, length, max_tokens=12) for length in (5, 61, 2, 90, 33, 18)))


def test_a_recorded_run_with_checkpoints_is_replayed_equal(folder: Path, tmp_path: Path) -> None:
    """The replay makes as many checkpoints as there were, whatever the budget in bytes was."""
    settings = {"state_snapshot_bytes": 1 << 20, "state_snapshot_blocks": 2, "max_num_seqs": 2}
    with recordings.recording_engine(folder, tmp_path, **settings) as subject:
        for length in (100, 40, 110, 33):
            engines.drain(subject, prompt(folder, length))
        engines.drain(subject, prompt(folder))
        assert subject.load().cached_tokens_total == 32 + 96 + 32
    [file] = recordings.segments(tmp_path)
    outcome = recordings.replayed(file)
    assert (outcome.first, outcome.different, outcome.num_tokens) == (None, set(), 5 * 8)


def test_events_have_the_places_where_a_prompt_can_resume(folder: Path) -> None:
    subject = engine(folder, num_state_snapshots=3, num_blocks=16)
    assert subject.description.resumes_at_states
    subject.feed.watch(1, WatchedCaches(blocks=True, images=False))
    blocks: set[bytes] = set()
    states: set[bytes] = set()

    def follow() -> None:
        for message in subject.feed.take_messages():
            for event in msgspec.msgpack.decode(message.payload, type=KvEvents).events:
                match event:
                    case BlockStored(key=key):
                        blocks.add(key)
                    case BlockRemoved(key=key):
                        blocks.remove(key)
                    case StateStored(key=key):
                        states.add(key)
                    case StateRemoved(key=key):
                        states.remove(key)

    root = root_key(subject.description.fingerprint, b"")
    resumed = []
    for length in (100, 40, 110, 33, 100):
        asked = prompt(folder, length)
        follow()
        keys = block_keys(root, asked.token_ids[:-1], [], BLOCK)
        held = next((index for index, key in enumerate(keys) if key not in blocks), len(keys))
        expected = next((count for count in range(held, 0, -1) if keys[count - 1] in states), 0) * BLOCK
        answer = engines.drain(subject, asked).answers[asked.request_id]
        assert answer.num_cached_tokens == expected
        resumed.append(expected)
    assert resumed[0] == 0 < max(resumed)
    follow()
    # A new watcher's snapshot is what the increments have led to.
    subject.feed.watch(2, WatchedCaches(blocks=True, images=False))
    (message,) = subject.feed.take_messages()
    events = msgspec.msgpack.decode(message.payload, type=KvEvents).events
    assert {event.key for event in events if isinstance(event, StateStored)} == states
    assert len(states) <= 3
    subject.scheduler.reset_caches(prefix=True, media=False)
    follow()
    assert not states


SPECS = (
    Paged(2, 8, 8),
    Recurrent(((6, 4, 5), (3, 7)), ("float32", NETWORK_DTYPE)),
    Recurrent(((6, 4, 5), (3, 7)), ("float32", NETWORK_DTYPE)),
)


@table(
    ("settings", "expected"),
    [
        ({}, (1 << 30) // 1128),
        ({"state_snapshot_bytes": 5000}, 4),
        ({"state_snapshot_bytes": 0}, 0),
        ({"state_snapshot_bytes": 1127}, 0),
        ({"num_state_snapshots": 7, "state_snapshot_bytes": 5000}, 7),
        ({"enable_prefix_caching": False}, 0),
    ],
)
def test_checkpoints_have_a_budget(settings: dict[str, Any], expected: int) -> None:
    assert memory.state_bytes(SPECS, torch.float32) == 2 * (480 + 84) == 1128
    config = EngineConfig("", "toy", **settings)
    assert memory.num_state_checkpoints(config, SPECS, torch.float32) == expected
    assert memory.num_state_checkpoints(config, SPECS[:1], torch.float32) == 0


@table(
    ("settings", "share"),
    [
        # A state has 1128 bytes, and a block of 16 tokens 16 * 2 * 16 values.
        ({}, 1128 / 64),
        ({"state_snapshot_blocks": 1, "block_size": 1}, 1 * 2 * 16 * 4),
        ({"state_snapshot_bytes": 5000}, 0),
        ({"kv_cache_bytes": 10**6}, 0),
        ({"enable_prefix_caching": False}, 0),
    ],
)
def test_on_a_gpu_checkpoints_grow_with_the_kv_cache(settings: dict[str, Any], share: float) -> None:
    """A checkpoint for as many blocks as lie between two, but they take no more memory than the blocks."""
    spec = SimpleNamespace(kv_specs=SPECS, max_position_embeddings=10**6, takes_media=True)
    network = SimpleNamespace(spec=spec, device=torch.device("cuda"), dtype=torch.float32)
    model: Any = SimpleNamespace(network=network, ranks=ALONE)
    config = EngineConfig("", "toy", encoder_cache_bytes=0, **settings)
    assert memory.checkpoint_bytes_a_block(config, model) == math.ceil(share)
    block = memory.bytes_of_block(config, model) + math.ceil(share)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"mem_get_info": (10**6, 10**6), "memory_reserved": 0, "max_memory_reserved": 0}.items():
            patch.setattr(torch.cuda, name, lambda _, value=value: value)
        assert memory.fitting_blocks(config, model) == (10**6 if config.kv_cache_bytes else 9 * 10**5) // block


def test_states_in_bfloat16_take_half_but_for_the_float32_part() -> None:
    assert memory.state_bytes(SPECS, torch.bfloat16) == 2 * (480 + 42)


def test_ranks_share_the_heads_of_a_state() -> None:
    spec = Recurrent(
        ((6, 4, 5), (3, 2 * 2 * 4 + 6 * 5)),
        ("float32", NETWORK_DTYPE),
        (HeadCut(0, ((6, 1),)), HeadCut(1, ((2, 4), (2, 4), (6, 5)))),
    )
    assert spec.of_rank(lambda heads: heads) == spec
    assert spec.of_rank(lambda heads: heads // 2).shapes == ((3, 4, 5), (3, 2 * 4 + 3 * 5))
    # With more ranks than key heads, neighbours hold copies of one.
    assert spec.of_rank(lambda heads: max(1, heads // 6)).shapes == ((1, 4, 5), (3, 2 * 4 + 5))
