"""Gemma 3 and 4 with few blocks of layers with a window: every answer is its oracle's, whatever was given back. A10"""

from pathlib import Path
from typing import Any

import engines
import msgspec
import networks
import pytest
from oracle_checks import check
from references.networks import Oracle

from saccade import models
from saccade.engine.executor import memory
from saccade.engine.loop import Engine
from saccade.models.gemma4.spec import Spec

pytestmark = pytest.mark.conformance
PROMPTS: dict[str, list[Any]] = {
    "image larger than the window": [30, ((250, 250), 1), 50],
    "two images in a window": [7, ((50, 50), 2), 4, ((60, 40), 3), 60],
    "two images, the same beginning": [7, ((50, 50), 2), 4, ((60, 40), 3), 21],
    "another image after it": [7, ((50, 50), 2), 4, ((40, 60), 4), 90],
    "text": [150],
    "the same text": [170],
}


@pytest.fixture(scope="module", params=["gemma3", "gemma4", "gemma4_unified", "gemma4_e2b"])
def checkpoint_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def engine(folder: Path, monkeypatch: pytest.MonkeyPatch, num_blocks: int, **settings: Any) -> Engine:
    """An engine whose layers with a window have fewer blocks than the others; images of at most 70 tokens need few."""
    monkeypatch.setattr(Spec, "longest_whole", property(lambda self: 70 if self.text.sees_images else 0))
    subject = engines.poison(engines.engine(folder, num_blocks=num_blocks, **settings))
    window_blocks = subject.scheduler.block_manager.window_blocks
    assert window_blocks is not None
    assert window_blocks.num_blocks < num_blocks
    return subject


def asked(folder: Path, **sampling: Any) -> list[Any]:
    return [engines.request(folder, parts, name, 0, **sampling) for name, parts in PROMPTS.items()]


@pytest.mark.parametrize("chunk", [7, 33, 2048])
def test_hits_and_samples_equal_the_reference(
    folder: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    subject = engine(folder, monkeypatch, 48, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 8))
    logits = engines.record_logits(subject)
    requests = [msgspec.structs.replace(one, num_samples=1 + number % 2) for number, one in enumerate(asked(folder))]
    cached = 0
    for turn in ("", " again", " and again"):
        together = [msgspec.structs.replace(one, request_id=one.request_id + turn) for one in requests]
        for batch in (together[:1], together[1:3], together[3:]):
            answers = engines.drain(subject, *batch).answers
            for one in batch:
                for key in [key for key in answers if key.split("#")[0] == one.request_id]:
                    check(oracle, one, answers[key].token_ids, logits[key])
                    cached += answers[key].num_cached_tokens
    assert cached
    assert engines.is_idle(subject)


@pytest.mark.parametrize("chunk", [16, 64])
def test_no_block_that_was_given_back_is_read(
    folder: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Blocks in which nothing is kept are spoilt after every step, and sequences are preempted."""
    settings = {"max_num_batched_tokens": chunk, "max_num_seqs": 6, "enable_prefix_caching": False}
    subject = engine(folder, monkeypatch, 22, **settings)
    logits = engines.record_logits(subject)
    requests = asked(folder, max_tokens=60)
    answers = engines.drain(subject, *requests, each_step=lambda: engines.spoil_unused(subject)).answers
    for one in requests:
        check(oracle, one, answers[one.request_id].token_ids, logits[one.request_id])
    assert subject.load().preemptions_total > 0
    assert engines.is_idle(subject)


BLOCK = 4
HITS: dict[str, list[Any]] = {
    "image larger than the window": [6, ((250, 250), 1), 9],
    "two images in a window": [7, ((50, 50), 2), 4, ((60, 40), 3), 10],
    "video": [5, ((96, 96), 3, 4), 6],
}


@pytest.mark.parametrize("parts", HITS.values(), ids=HITS)
def test_hit_that_ends_at_any_boundary_equals_the_reference(
    folder: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, parts: list[Any]
) -> None:
    """Another prompt evicts the last blocks, fewer each time, so that hits end before, in and after images."""
    if not models.takes_videos(models.family_of(networks.config_of(folder))) and parts == HITS["video"]:
        pytest.skip("this family takes no videos")
    monkeypatch.setattr(memory, "num_window_blocks", lambda *_: 1000)  # those of windows stay
    asked = engines.request(folder, parts, max_tokens=4)
    num_blocks = len(asked.token_ids) // BLOCK + 2
    settings = {"num_blocks": num_blocks, "block_size": BLOCK, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    subject = engines.poison(engines.engine(folder, **settings))
    logits, cached = engines.record_logits(subject), []
    for kept in range(1, num_blocks):
        subject.scheduler.reset_caches(prefix=True, media=bool(kept % 2))
        engines.drain(subject, asked)
        other = engines.request(folder, [(num_blocks - kept) * BLOCK], "other", text_seed=kept + 1, max_tokens=1)
        engines.drain(subject, other)
        logits.clear()
        answer = engines.drain(subject, asked).answers[asked.request_id]
        check(oracle, asked, answer.token_ids, logits[asked.request_id])
        cached.append(answer.num_cached_tokens)
    assert sorted(set(cached)) == list(range(BLOCK, len(asked.token_ids), BLOCK))
    assert engines.is_idle(subject)
