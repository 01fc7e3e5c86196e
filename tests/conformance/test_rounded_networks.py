"""Every network in int8 and int4, rounded by --quantization: kernels, batches, chunks, the prefix cache and drafts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from oracle_checks import PROMPTS

from saccade.engine.executor import unpacking
from saccade.nn import layers, ops
from saccade.nn.formats import cpu_int4

pytestmark = [pytest.mark.aspect("formats"), pytest.mark.conformance, pytest.mark.sampled(1)]
NOISE = {"int8": 5, "int4": 3}
"""How much farther than by bfloat16 a kernel may move logits: it rounds activations to eight bits, or to bfloat16."""

LEAST_NOISE = 0.015
"""Of the norm of a token's logits. Rounded weights may make a network more sensitive than it was, and than others."""

TIE = 0.02
"""Of the largest logit: what the rounding of one activation to another number may change."""

DTYPES = ("float32", "bfloat16")
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4}'


@pytest.fixture(autouse=True)
def small_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most layers of tiny networks have less than 128 inputs."""
    monkeypatch.setattr(layers, "LEAST_ROUNDED", 32)


def logits_of(folder: Path, parts: list[Any], **settings: Any) -> tuple[list[int], torch.Tensor]:
    subject = engines.engine(folder, **settings)
    logits = engines.record_logits(subject)
    answer = engines.drain(subject, engines.request(folder, parts)).answers["a"]
    return answer.token_ids, torch.stack(logits["a"])


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference, as a part of that of *expected*. Some tokens have a logit of -inf."""
    finite = expected.isfinite()
    return float((found[finite] - expected[finite]).norm() / expected[finite].norm())


def check_same(found: engines.Answer, known: engines.Answer, logits: list[torch.Tensor]) -> None:
    """The same tokens; if one differs, the *logits* that *known* was chosen from were near a tie."""
    for ours, theirs, row in zip(found.token_ids, known.token_ids, logits, strict=True):
        if ours != theirs:
            assert row[theirs] - row[ours] <= TIE * row[row.isfinite()].abs().max()
            return


def without_kernels(folder: Path, parts: list[Any], choice: str) -> tuple[torch.Tensor, float]:
    """The first token's logits of the rounded weights in float32, and how far bfloat16 moves them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "KERNELS", {})
        patch.setattr(unpacking, "free_bytes", lambda: 0)
        exact, noisy = (logits_of(folder, parts, quantization=choice, dtype=dtype)[1][0].float() for dtype in DTYPES)
    return exact, max(distance(noisy, exact), LEAST_NOISE)


@pytest.mark.parametrize("choice", ["int8", "int4"])
@pytest.mark.parametrize("name", ["text", "one image"])
def test_kernels_compute_the_rounded_network(folder: Path, name: str, choice: str) -> None:
    """The first token's logits are near those of the same rounded weights without a kernel."""
    _, found = logits_of(folder, PROMPTS[name], quantization=choice)
    expected, noise = without_kernels(folder, PROMPTS[name], choice)
    assert distance(found[0], expected) <= NOISE[choice] * noise


def test_int4_on_both_sides_of_the_crossing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ by at most twice of what bfloat16 changes in the rounded network."""
    parts = PROMPTS["one image"]
    _, noise = without_kernels(folder, parts, "int4")
    _, by_kernel = logits_of(folder, parts, dtype="bfloat16", quantization="int4")
    monkeypatch.setattr(cpu_int4, "crossing", lambda _: 1)
    _, by_unpacking = logits_of(folder, parts, dtype="bfloat16", quantization="int4")
    assert distance(by_unpacking[0].float(), by_kernel[0].float()) <= 2 * noise


@pytest.mark.parametrize("choice", ["int8", "int4"])
def test_batches_chunks_the_prefix_cache_and_drafts_change_no_answer(folder: Path, choice: str) -> None:
    """Attention may round the last bit otherwise, which may change a code of an activation, or the better of a tie."""
    asked = [engines.request(folder, parts, name, max_tokens=20) for name, parts in PROMPTS.items()]
    alone = engines.engine(folder, quantization=choice, enable_prefix_caching=False)
    kept = engines.record_logits(alone)
    known = {one.request_id: engines.drain(alone, one).answers[one.request_id] for one in asked}
    together, cached, chunked = (engines.engine(folder, quantization=choice) for _ in range(3))
    chunked.scheduler.budgets = replace(chunked.scheduler.budgets, max_num_batched_tokens=17)
    for one in asked:
        engines.drain(cached, one)
    drafting = engines.engine(folder, quantization=choice, speculative_config=NGRAM, state_snapshot_blocks=1)
    for subject in (together, cached, chunked, engines.speculating(drafting, known, 3)):
        found = engines.drain(subject, *asked).answers
        for name, answer in known.items():
            check_same(found[name], answer, kept[name])
