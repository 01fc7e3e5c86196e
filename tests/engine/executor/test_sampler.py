"""The sampler: what may be drawn, how often, and that a draw depends on (seed, index) alone."""

from collections.abc import Sequence as Ordered
from typing import Any

import numpy as np
import pytest
import torch
from tables import table

from saccade.engine.core.seeds import sample_seed, uniforms
from saccade.engine.core.sequence import Sequence
from saccade.engine.core.step_builder import row_counts, sampling_input
from saccade.engine.executor.logits_processors import RowChanges
from saccade.engine.executor.penalties import Penalties
from saccade.engine.executor.sampler import Sampler
from saccade.models.positions import MultimodalPositions
from saccade.protocol.request import EngineRequest, SamplingParams

CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.5, -1.0, 9.0])
FORBIDDEN = 5


def row(
    seed: int = 0, index: int = 0, prompt: Ordered[int] = (1,), answer: Ordered[int] | None = None, **params: Any
) -> Sequence:
    """A sequence that is about to draw the token *index* of its answer."""
    sampling = SamplingParams(**{"max_tokens": 1, "temperature": 1.0, **params})
    asked = EngineRequest(request_id="a", token_ids=list(prompt), sampling=sampling)
    sequence = Sequence(0, asked, 1, seed, b"", MultimodalPositions([]))
    sequence.token_ids += [0] * index if answer is None else answer
    return sequence


def sampled(logits: torch.Tensor, sequences: Ordered[Sequence]) -> list[int]:
    """What is drawn for each of *sequences*, each in a row of its own."""
    changes = RowChanges(CPU)
    for number, sequence in enumerate(sequences):
        sequence.row = number
        changes.start_row(number, sequence.sampling)
    params = [sequence.sampling for sequence in sequences]
    sampler = Sampler((FORBIDDEN,), changes, Penalties(len(sequences), logits.shape[1], CPU), CPU)
    counts = tuple(row_counts(sequence) for sequence in sequences if sequence.penalised)
    return sampler(logits, range(len(sequences)), params, sampling_input(1, sequences, counts=counts)).tolist()


def draw(rows: list[Sequence], logits: torch.Tensor = LOGITS) -> list[int]:
    return sampled(logits.repeat(len(rows), 1), rows)


def chosen(logits: Any, sequence: Sequence) -> int:
    """The token that the sampler should choose, written plainly: one token of the vocabulary after the other."""
    params, answer = sequence.sampling, sequence.token_ids[sequence.num_prompt_tokens :]
    x = np.array(logits, dtype=np.float64)
    for token in range(len(x)):
        count = answer.count(token)
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            x[token] = -np.inf
        if token == FORBIDDEN or (token in params.stop_token_ids and len(answer) < params.min_tokens):
            x[token] = -np.inf
        x[token] += params.logit_bias.get(token, 0)
        if token in sequence.token_ids:
            x[token] *= params.repetition_penalty if x[token] < 0 else 1 / params.repetition_penalty
        x[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    if params.temperature == 0:
        return int(x.argmax())
    p = np.exp((x - x.max()) / params.temperature)
    p[p < params.min_p] = 0  # the largest is 1
    if params.top_k:
        p[p < np.sort(p)[::-1][min(params.top_k, len(p)) - 1]] = 0
    p /= p.sum()
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.top_p]] = 0
    [uniform] = uniforms([sequence.seed], [len(answer)])
    return int(np.searchsorted(np.cumsum(p / p.sum()), uniform, side="right"))


EACH: list[dict[str, Any]] = [
    {},
    {"top_k": 7},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"presence_penalty": 1.5},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.5},
    {"logit_bias": {3: 4.0, 9: -100.0, FORBIDDEN: 100.0, 20: 2.5}},
    {"allowed_token_ids": (2, FORBIDDEN, 30, 7, 2)},
    {"min_tokens": 7, "stop_token_ids": (1, 4, 8, 16, 10**6, -1)},
    {"min_tokens": 6, "stop_token_ids": (1, 4, 8, 16)},
]
"""Each parameter by itself; answers have 6 tokens, so min_tokens 7 still counts and 6 does not."""


def batch(kinds: Ordered[dict[str, Any]], vocab_size: int = 40) -> tuple[torch.Tensor, list[Sequence]]:
    """Logits and sequences whose prompts and answers repeat tokens."""
    random = np.random.default_rng(5)
    logits = torch.from_numpy(random.normal(0, 2, (len(kinds), vocab_size)).astype(np.float32))
    rows = []
    for index, kind in enumerate(kinds):
        prompt, answer = (random.integers(0, vocab_size // 2, size).tolist() for size in (9, 6))
        rows.append(row(index * 7, prompt=[*prompt, FORBIDDEN, FORBIDDEN], answer=answer, **kind))
    return logits, rows


@table("temperature", [0.0, 0.7, 1.6])
@table("kind", EACH)
def test_each_parameter_equals_the_reference(kind: dict[str, Any], temperature: float) -> None:  # [eng] 14
    logits, rows = batch([{**kind, "temperature": temperature}] * 60)
    assert sampled(logits.clone(), rows) == list(map(chosen, logits.numpy(), rows))


def mixed(number: int) -> list[dict[str, Any]]:
    """Combinations of several parameters, every row another."""
    random = np.random.default_rng(3)
    kinds = []
    for _ in range(number):
        parts = [EACH[index] for index in random.integers(0, len(EACH), 4)]
        kinds.append({key: value for part in parts for key, value in part.items()})
        kinds[-1]["temperature"] = random.choice([0.0, 0.5, 1.0, 2.0])
    return kinds


def test_mixed_parameters_in_one_batch_equal_the_reference() -> None:
    logits, rows = batch(mixed(200))
    assert sampled(logits.clone(), rows) == list(map(chosen, logits.numpy(), rows))


def test_penalties_follow_the_answer_as_it_grows() -> None:
    logits, [growing] = batch([{"temperature": 0, "frequency_penalty": 0.4, "repetition_penalty": 1.3}])
    for _ in range(30):
        [token] = sampled(logits.clone(), [growing])
        assert token == chosen(logits[0].numpy(), growing)
        growing.token_ids.append(token)
    assert len(set(growing.token_ids[-30:])) > 5


@table(
    ("params", "possible"),
    [
        ({"temperature": 0}, {0}),
        ({"temperature": 1e-40}, {0}),
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 3}, {0, 1, 2, 3}),  # equal logits stay together
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.01}, {0}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.85}, {0, 1, 2, 3}),
        ({"top_p": 0.6, "top_k": 1}, {0}),
        ({"top_p": 0.7, "top_k": 2}, {0}),  # 0 alone has 0.73 of what top_k leaves
    ],
)
def test_only_possible_tokens_are_drawn(params: dict[str, Any], possible: set[int]) -> None:
    assert set(draw([row(seed, **params) for seed in range(400)])) == possible


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_shares_follow_the_softmax(temperature: float) -> None:
    drawn = draw([row(seed=3, index=index, temperature=temperature) for index in range(4000)])
    shares = np.bincount(drawn, minlength=6) / len(drawn)
    expected = (LOGITS[:5] / temperature).softmax(-1).numpy()
    assert np.abs(shares[:5] - expected).max() < 0.03


def test_a_draw_does_not_depend_on_its_batch() -> None:
    logits, rows = batch([*mixed(30), *EACH], 300)
    together = sampled(logits.clone(), rows)
    alone = [sampled(logits[index : index + 1].clone(), [rows[index]])[0] for index in range(len(rows))]
    backwards = sampled(logits.flip(0).contiguous(), rows[::-1])[::-1]
    assert together == alone == backwards
    assert len(set(together)) > 20


def test_uniforms_are_spread_and_fixed() -> None:
    numbers = uniforms([2**64 - 1] * 5000, range(5000))
    assert 0 <= numbers.min() <= numbers.max() < 1
    assert np.abs(np.histogram(numbers, 10, (0, 1))[0] - 500).max() < 100
    assert uniforms([1, 2], [3, 3]).tolist() != uniforms([2, 1], [3, 3]).tolist()
    # Seeds are a promise to clients: these numbers must not change between releases.
    assert uniforms([42, 42], [0, 1]).tolist() == [0.34329192209867343, 0.9504380907279257]


def test_samples_have_streams_of_their_own() -> None:  # B9
    seeds = [sample_seed(seed, index) for seed in range(50) for index in range(128)]
    assert seeds[::128] == list(range(50))  # sample 0 draws what the request alone would
    assert len(set(seeds)) == len(seeds)
    assert abs(np.mean(uniforms(seeds, [0] * len(seeds))) - 0.5) < 0.01
    assert sample_seed(-1, 0) == 2**64 - 1
    assert sample_seed(42, 1) == 9793018128106815799  # a promise too
