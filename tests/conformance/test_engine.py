"""The engine's logits and greedy ids against the oracles, for the same tokens and pixels, float32. A10, [eng] 24"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import engines
import msgspec
import pytest
import torch
from checkpoints import NETWORKS
from references.networks import ORACLES, Oracle

from saccade.cli.bundled import bundled
from saccade.engine.loop import Engine
from saccade.protocol.request import EngineRequest

PROMPTS: dict[str, list[Any]] = {
    "text": [37],
    "one picture": [5, ((192, 128), 1), 9],
    "two pictures": [3, ((96, 160), 2), 6, ((320, 64), 3), 8],
    "picture first and last": [((64, 64), 4), 7, ((96, 96), 5)],
    "picture twice": [2, ((160, 96), 6), 3, ((160, 96), 6), 4],
}
LONG: list[list[Any]] = [
    [23],
    [4, ((64, 64), 1), 3, ((128, 96), 2), 1, ((96, 192), 3), 5, ((192, 64), 4), 2, ((160, 160), 5), 6],
]
CHUNKS = (7, 16, 64, 2048)
EVERYDAY = {("two pictures", 16)}
CASES = [
    pytest.param(name, chunk, marks=() if (name, chunk) in EVERYDAY else pytest.mark.conformance)
    for name in PROMPTS
    for chunk in CHUNKS
]
BUNDLED = "bundled"


@pytest.fixture(scope="module", params=[*NETWORKS, BUNDLED])
def checkpoint_name(request: pytest.FixtureRequest) -> str:
    """Checkpoints with random weights, and the trained one that ships, a Qwen3-VL with tied embeddings."""
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(checkpoint_name: str, network_folder: Callable[[str], Path]) -> Path:
    return bundled("model") if checkpoint_name == BUNDLED else network_folder(checkpoint_name)


@pytest.fixture(scope="module")
def oracle(checkpoint_name: str, checkpoint: Path) -> Oracle:
    return ORACLES["qwen3_vl" if checkpoint_name == BUNDLED else checkpoint_name](checkpoint)


def check(oracle: Oracle, asked: EngineRequest, token_ids: list[int], rows: list[torch.Tensor]) -> None:
    """Every logit that may be sampled equals the reference's, and every id is the reference's greedy choice.

    Where the reference's two best logits are closer than the tolerance allows for, either is right.
    """
    assert len(token_ids) == asked.sampling.max_tokens == len(rows)
    both = (torch.stack(rows), oracle.logits(asked, token_ids))
    placeholders = torch.tensor(oracle.placeholder_token_ids)
    ours, reference = (logits.index_fill(1, placeholders, float("-inf")) for logits in both)
    torch.testing.assert_close(ours, reference, atol=oracle.atol, rtol=0)
    chosen = reference.gather(1, torch.tensor(token_ids).unsqueeze(1)).squeeze(1)
    assert (reference.amax(1) - chosen <= 2 * oracle.atol).all()


@pytest.mark.aspect("logits")
@pytest.mark.aspect("cache")
@pytest.mark.parametrize(("name", "chunk"), CASES)
def test_chunks_fresh_and_cached(checkpoint: Path, oracle: Oracle, name: str, chunk: int) -> None:
    subject = engines.engine(checkpoint, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 8))
    logits = engines.record_logits(subject)
    for request_id in ("fresh", "cached"):
        asked = engines.request(checkpoint, PROMPTS[name], request_id, max_tokens=12)
        answer = engines.drain(subject, asked).answers[request_id]
        check(oracle, asked, answer.token_ids, logits[request_id])
    assert answer.num_cached_tokens == 16 * ((len(asked.token_ids) - 1) // 16)


@pytest.mark.aspect("logits")
@pytest.mark.parametrize(
    "chunk", [64, *(pytest.param(chunk, marks=pytest.mark.conformance) for chunk in (7, 16, 2048))]
)
def test_batch_of_eight(checkpoint: Path, oracle: Oracle, chunk: int) -> None:
    subject = engines.engine(checkpoint, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 8))
    logits = engines.record_logits(subject)
    asked = [
        engines.request(checkpoint, list(PROMPTS.values())[number % 5], str(number), number, max_tokens=12)
        for number in range(8)
    ]
    answers = engines.drain(subject, *asked).answers
    for one in asked:
        check(oracle, one, answers[one.request_id].token_ids, logits[one.request_id])


@pytest.mark.aspect("logits")
@pytest.mark.conformance
@pytest.mark.parametrize("parts", LONG, ids=["text", "five pictures"])
def test_long_answers(checkpoint: Path, oracle: Oracle, parts: list[Any]) -> None:
    subject = engines.engine(checkpoint)
    logits = engines.record_logits(subject)
    asked = engines.request(checkpoint, parts, max_tokens=64)
    check(oracle, asked, engines.drain(subject, asked).answers["a"].token_ids, logits["a"])


@pytest.mark.conformance
def test_retracted(checkpoint: Path, oracle: Oracle) -> None:  # B5, [eng] 4: again and again
    asked = [
        engines.request(checkpoint, [seed, ((96, 64), seed)], str(seed), seed, max_tokens=24) for seed in (1, 2, 3)
    ]
    subject = engines.engine(
        checkpoint,
        # Of every eleven steps, after which all state is lost, the prompts may take about three.
        max_num_batched_tokens=max(8, sum(len(one.token_ids) for one in asked) // 3),
        encoder_cache_bytes=0,
        enable_prefix_caching=False,
    )
    logits = engines.record_logits(subject)
    retracted = []

    def retract() -> None:
        if subject.load().steps_total % 11 == 0:
            # Prompts that take longer to compute than the time between retractions would never end otherwise.
            for sequence in [one for one in subject.scheduler.running if retracted.count(one.request_id) < 4]:
                subject.scheduler.retract(sequence)
                retracted.append(sequence.request_id)

    answers = engines.drain(subject, *asked, each_step=retract).answers
    for one in asked:
        assert retracted.count(one.request_id) >= 2
        check(oracle, one, answers[one.request_id].token_ids, logits[one.request_id])


def chunk_sizes(num_tokens: int) -> list[int]:
    """Every size, or of a long prompt, whose pictures take hundreds of tokens, those around blocks and its end."""
    if num_tokens <= 160:
        return list(range(1, num_tokens + 1))
    return [1, 2, 3, 7, 15, 16, 17, 31, 64, 100, num_tokens // 2, num_tokens - 1, num_tokens]


@pytest.mark.aspect("chunks")
@pytest.mark.conformance
@pytest.mark.parametrize("name", PROMPTS)
def test_every_chunk_size(checkpoint: Path, oracle: Oracle, name: str) -> None:  # [eng] 24
    asked = engines.request(checkpoint, PROMPTS[name], max_tokens=4)
    for chunk in chunk_sizes(len(asked.token_ids)):
        subject = engines.engine(checkpoint, max_num_batched_tokens=chunk, max_num_seqs=1)
        logits = engines.record_logits(subject)
        answer = engines.drain(subject, asked).answers["a"]
        check(oracle, asked, answer.token_ids, logits["a"])
        assert subject.load().encoded_items_total == len({item.content_hash for item in asked.media})


def retracting(subject: Engine) -> Callable[[], None]:
    """What to do behind each step of a request: take all state away once in the prompt and once in the answer."""
    due = [0, 2]  # tokens of the answer

    def retract() -> None:
        for sequence in list(subject.scheduler.running):
            if due and sequence.num_generated_tokens >= due[0]:
                due.pop(0)
                subject.scheduler.retract(sequence)

    return retract


@pytest.mark.aspect("chunks")
@pytest.mark.conformance
@pytest.mark.parametrize("name", ["text", "one picture", "two pictures"])
def test_chunks_and_retraction_change_no_token(checkpoint: Path, oracle: Oracle, name: str) -> None:  # B5, [eng] 4, 24
    subject = engines.engine(checkpoint, max_num_seqs=1, enable_prefix_caching=False, encoder_cache_bytes=0)
    logits = engines.record_logits(subject)
    asked = engines.request(checkpoint, PROMPTS[name], max_tokens=5)
    expected = engines.drain(subject, asked).answers["a"].token_ids
    whole = torch.stack(logits["a"])
    check(oracle, asked, expected, logits["a"])
    for chunk in range(1, 65):
        subject.scheduler.budgets = replace(subject.scheduler.budgets, max_num_batched_tokens=chunk)
        for each_step in (lambda: None, retracting(subject)):
            logits["a"].clear()
            answer = engines.drain(subject, asked, each_step=each_step).answers["a"]
            assert answer.token_ids == expected, chunk
            torch.testing.assert_close(torch.stack(logits["a"]), whole, atol=oracle.atol, rtol=0)
    assert subject.load().preemptions_total == 64 * 2


@pytest.mark.aspect("TP")
@pytest.mark.conformance
@pytest.mark.parametrize("encoder", ["data", "weights"])
@pytest.mark.parametrize("chunk", [16, 2048])
def test_two_ranks(checkpoint: Path, oracle: Oracle, encoder: str, chunk: int) -> None:  # [eng] 37
    settings = {"mm_encoder_tp_mode": encoder, "max_num_batched_tokens": chunk}
    with engines.on_ranks(checkpoint, **settings) as subject:
        logits = engines.record_logits(subject)
        asked = [
            engines.request(checkpoint, parts, name, number, max_tokens=12)
            for number, (name, parts) in enumerate(PROMPTS.items())
        ]
        told = engines.drain(subject, *asked).answers
        again = [msgspec.structs.replace(one, request_id=f"{one.request_id}, cached") for one in asked]
        told |= engines.drain(subject, *again).answers
    for one in (*asked, *again):
        check(oracle, one, told[one.request_id].token_ids, logits[one.request_id])
    assert all(told[one.request_id].num_cached_tokens for one in again)
