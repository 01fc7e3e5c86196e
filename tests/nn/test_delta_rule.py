"""The gated delta rule and its convolution against one token at a time in float64, over all ways to cut a sequence."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tables import table
from torch.nn import functional

from saccade.nn import gpu
from saccade.nn.delta_rule import BLOCK, Gates, causal_conv, delta_rule, gated_delta_rule
from saccade.nn.ops import SILU

KEY_HEADS, HEADS, KEY, VALUE = 2, 6, 8, 5
CHANNELS, TAPS = 7, 4
ROWS = 6
Step = list[tuple[int, int]]
"""The chunks of a step: row and number of tokens, single tokens first."""
CUTS: dict[str, list[Step]] = {
    "one token at a time": [[(3, 1)]] * 9,
    "whole": [[(3, 200)]],
    "one block": [[(3, BLOCK)]],
    "just over a block": [[(3, BLOCK + 1)], [(3, 2)]],
    "chunks": [[(3, 7)], [(3, 1)], [(3, 100)], [(3, 1)], [(3, 1)], [(3, 2)]],
    "a batch": [[(5, 3)], [(5, 1), (0, 70), (2, 2)], [(2, 1), (5, 1), (0, 1)], [(0, 1), (2, 65), (5, 9)]],
    "single tokens alone": [[(1, 1), (4, 1)], [(4, 1), (1, 1)], [(1, 1), (4, 1)]],
}


def drawn(length: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(length, *shape, generator=torch.Generator().manual_seed(length + seed))


def total(cut: list[Step]) -> int:
    return sum(length for step in cut for _, length in step)


def walk(cut: list[Step]) -> Iterator[tuple[torch.Tensor, tuple[int, ...], slice]]:
    """Yield the rows and lengths of each step, and its tokens in the flat input."""
    start = 0
    for step in cut:
        stop = start + sum(length for _, length in step)
        yield torch.tensor([row for row, _ in step]), tuple(length for _, length in step), slice(start, stop)
        start = stop


def poisoned(*shape: int) -> torch.Tensor:
    """States of which only the rows that a cut uses may be read."""
    return torch.full(shape, float("nan"))


def tokens_of(cut: list[Step]) -> dict[int, list[int]]:
    """The flat indices of each row's tokens."""
    found: dict[int, list[int]] = {}
    for rows, lengths, span in walk(cut):
        start = span.start
        for row, length in zip(rows.tolist(), lengths, strict=True):
            found.setdefault(row, []).extend(range(start, start + length))
            start += length
    return found


def rule_token_by_token(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and last state of one sequence by the formula in float64."""
    q, k, v, log_decay, beta = (tensor.double() for tensor in inputs)
    state = torch.zeros(HEADS, KEY, VALUE, dtype=torch.float64)
    outputs = []
    for token in range(len(q)):
        for head in range(HEADS):
            key = k[token, head // (HEADS // KEY_HEADS)]
            state[head] *= log_decay[token, head].exp()
            error = v[token, head] - key @ state[head]
            state[head] += beta[token, head] * torch.outer(key, error)
        queries = q[token].repeat_interleave(HEADS // KEY_HEADS, 0)
        outputs.append(torch.einsum("hd,hdw->hw", queries, state))
    return torch.stack(outputs), state


@table("name", CUTS)
@table("dtype", [torch.float32, torch.bfloat16])
def test_delta_rule_equals_token_by_token(name: str, dtype: torch.dtype) -> None:
    cut = CUTS[name]
    length = total(cut)
    q = functional.normalize(drawn(length, KEY_HEADS, KEY, seed=1), dim=-1).to(dtype)
    k = functional.normalize(drawn(length, KEY_HEADS, KEY, seed=2), dim=-1).to(dtype)
    v = drawn(length, HEADS, VALUE, seed=3).to(dtype)
    # From nearly no decay to one that forgets everything.
    log_decay = -(10 ** (2 * drawn(length, HEADS, seed=4)).clamp(-4, 2))
    beta = drawn(length, HEADS, seed=5).sigmoid()
    states = poisoned(ROWS, HEADS, KEY, VALUE)
    own = tokens_of(cut)
    states[list(own)] = 0
    outputs = torch.cat(
        [
            delta_rule(*(tensor[span] for tensor in (q, k, v, log_decay, beta)), states, rows, lengths)
            for rows, lengths, span in walk(cut)
        ]
    )
    assert outputs.dtype == torch.float32
    for row in range(ROWS):
        if row not in own:
            assert states[row].isnan().all()
            continue
        expected, state = rule_token_by_token(*(tensor[own[row]] for tensor in (q, k, v, log_decay, beta)))
        torch.testing.assert_close(outputs[own[row]].double(), expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(states[row].double(), state, atol=2e-5, rtol=1e-4)


@pytest.mark.ci
@pytest.mark.parametrize("conv", [causal_conv, gpu.causal_conv], ids=["plain", "gpu"])
@table("name", CUTS)
@table("dtype", [torch.float32, torch.bfloat16])
def test_causal_conv_equals_token_by_token(name: str, dtype: torch.dtype, conv: Callable[..., torch.Tensor]) -> None:
    cut = CUTS[name]
    x, taps = drawn(total(cut), CHANNELS, seed=6).to(dtype), drawn(TAPS, CHANNELS, seed=7)
    states = poisoned(ROWS, TAPS - 1, CHANNELS).to(dtype)
    own = tokens_of(cut)
    states[list(own)] = 0
    outputs = torch.cat([conv(x[span], taps, states, rows, lengths, SILU) for rows, lengths, span in walk(cut)])
    assert outputs.dtype == dtype
    # Triton's interpreter cuts off the digits that bfloat16 lacks, and rounds nothing.
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8 if conv is causal_conv else 2**-7
    for row in range(ROWS):
        if row not in own:
            assert states[row].isnan().all()
            continue
        padded = torch.cat((torch.zeros(TAPS - 1, CHANNELS), x[own[row]].float())).double()
        sums = [(padded[token : token + TAPS] * taps).sum(0) for token in range(len(own[row]))]
        expected = functional.silu(torch.stack(sums))
        torch.testing.assert_close(outputs[own[row]].double(), expected, atol=tolerance, rtol=tolerance)
        assert torch.equal(states[row], padded[-(TAPS - 1) :].to(dtype))


def test_operations_per_token_do_not_grow_with_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scan loops over blocks, not over tokens: calls are counted, not time."""
    calls: list[int] = []
    baddbmm = torch.baddbmm

    def counted(*arguments: torch.Tensor, **options: float) -> torch.Tensor:
        calls.append(1)
        return baddbmm(*arguments, **options)

    monkeypatch.setattr(torch, "baddbmm", counted)
    for length in (BLOCK, 4 * BLOCK):
        calls.clear()
        arguments = (drawn(length, KEY_HEADS, KEY), drawn(length, KEY_HEADS, KEY), drawn(length, HEADS, VALUE))
        decay = -drawn(length, HEADS).abs()
        states = torch.zeros(1, HEADS, KEY, VALUE)
        delta_rule(*arguments, decay, drawn(length, HEADS).sigmoid(), states, torch.tensor([0]), (length,))
        assert len(calls) == 2 * length // BLOCK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_after_proposals_are_kept(dtype: torch.dtype) -> None:
    """As one token at a time leaves them."""
    num_sequences, length = 2, 4
    rows, trail = torch.tensor([3, 0]), torch.tensor([[5, 7, 4, 3], [6, 2, 8, 0]])
    x, taps = drawn(num_sequences * length, CHANNELS, seed=6).to(dtype), drawn(TAPS, CHANNELS, seed=7)
    q, k = (drawn(len(x), KEY_HEADS, KEY, seed=seed).to(dtype) for seed in (1, 2))
    v, a, b = drawn(len(x), HEADS, VALUE, seed=3).to(dtype), drawn(len(x), HEADS, seed=4), drawn(len(x), HEADS, seed=5)
    rate, bias = drawn(2, HEADS)

    def conv(states: torch.Tensor, own: slice, *where: Any) -> torch.Tensor:
        rows, lengths, trail = where
        return causal_conv(x[own], taps, states, rows, lengths, SILU, trail)

    def rule(states: torch.Tensor, own: slice, *where: Any) -> torch.Tensor:
        return gated_delta_rule(q[own], k[own], v[own], Gates(rate, bias, a[own], b[own]), states, *where)

    for compute, before in (
        (conv, drawn(9, TAPS - 1, CHANNELS, seed=8).to(dtype)),
        (rule, drawn(9, HEADS, KEY, VALUE, seed=9)),
    ):
        together, alone = before.clone(), before.clone()
        outputs = compute(together, slice(None), rows, (length,) * num_sequences, trail)
        singles = []
        for token in range(length):
            singles.append(compute(alone, slice(token, None, length), rows, (1,) * num_sequences, None))
            alone[trail[:, token]] = alone[rows].clone()
        torch.testing.assert_close(outputs, torch.stack(singles, 1).flatten(0, 1))
        torch.testing.assert_close(together, alone)
