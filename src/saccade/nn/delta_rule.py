"""The gated delta rule and the short causal convolution in front of it, for the sequences of one step.

Both keep one state for each sequence instead of all its tokens, so the cost of a token does not grow with its context.
Formulas: Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464 (the rule); Yang et al. 2024, arXiv:2406.06484, section 3
(blocks of tokens at once, by the inverse of a triangular matrix).

The tokens of a step are flat, sequence after sequence; sequences of a single token come first. *lengths* counts each
sequence's tokens, and *rows* int32 or int64 [S] has the row of its state. Shapes: N tokens, S sequences, R rows, T
taps, C channels, K key heads, H value heads, D key width, W value width, L tokens of a sequence, B blocks of L tokens.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.nn import functional

UNIT_EPS = 1e-6
BLOCK = 64
"""Tokens in a block of the scan. Within a block the work is in matrix products; blocks follow each other in a loop."""


Trail = torch.Tensor | None
"""Rows int64 [S, L] of the states after each token, if all sequences have L tokens; the last is the sequence's own."""


class RuleHeads(NamedTuple):
    """The heads of a layer on one rank, and the widths of keys and values."""

    num_key_heads: int
    num_value_heads: int
    key_width: int
    value_width: int


class _Tokens(NamedTuple):
    """The rule's float32 input for some tokens. There are as many heads of queries and of keys as of values."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor


def causal_conv(
    x_NC: torch.Tensor,
    taps_TC: torch.Tensor,
    states: torch.Tensor,
    rows: torch.Tensor,
    lengths: tuple[int, ...],
    activation: Callable[[torch.Tensor], torch.Tensor],
    trail: Trail = None,
) -> torch.Tensor:
    """Return activation(sum over t of taps[t] * x[n - T + 1 + t]) [N, C], computed in float32 and rounded once.

    *taps_TC* is float32. *states* [R, T - 1, C] hold the last inputs of each sequence, which are zero before the first.
    This updates them.
    """
    rows = rows.long()
    if trail is not None:
        num_taps = len(taps_TC)
        padded_SNC = torch.cat((states.index_select(0, rows), x_NC.unflatten(0, trail.shape)), 1)
        inputs_SLCT = padded_SNC.unfold(1, num_taps, 1)
        states.index_copy_(0, trail.flatten(), inputs_SLCT[..., 1:].transpose(2, 3).flatten(0, 1))
        return activation((inputs_SLCT.transpose(2, 3) * taps_TC).sum(2)).flatten(0, 1).to(x_NC.dtype)
    num_singles, spans = split(lengths)
    outputs = []
    if num_singles:
        own = rows[:num_singles]
        window_STC = torch.cat((states.index_select(0, own), x_NC[:num_singles].unsqueeze(1)), 1)
        states.index_copy_(0, own, window_STC[:, 1:])
        outputs.append(activation((window_STC * taps_TC).sum(1)))
    for index, span in spans:
        own = rows[index : index + 1]
        length = lengths[index]
        padded = torch.cat((states.index_select(0, own)[0], x_NC[span]))
        states.index_copy_(0, own, padded[length:].unsqueeze(0))
        total_LC = padded[:length] * taps_TC[0]
        for tap in range(1, len(taps_TC)):
            total_LC.addcmul_(padded[tap : tap + length].float(), taps_TC[tap])
        outputs.append(activation(total_LC))
    return torch.cat(outputs).to(x_NC.dtype)


class Gates(NamedTuple):
    """A step's gates: the layer's *rate_log_H* and *bias_H* in float32, and its tokens' *a_NH* and *b_NH*.

    A token's decay is exp(-exp(rate_log) * softplus(a + bias)), and its update rate is sigmoid(b).
    """

    rate_log_H: torch.Tensor
    bias_H: torch.Tensor
    a_NH: torch.Tensor
    b_NH: torch.Tensor

    def log_decay(self) -> torch.Tensor:
        """Return the logarithm of the decays, float32 [N, H]."""
        return -self.rate_log_H.exp() * functional.softplus(self.a_NH.float() + self.bias_H)


def gated_delta_rule(
    q_NKD: torch.Tensor,
    k_NKD: torch.Tensor,
    v_NHW: torch.Tensor,
    gates: Gates,
    states: torch.Tensor,
    rows: torch.Tensor,
    lengths: tuple[int, ...],
    trail: Trail = None,
) -> torch.Tensor:
    """Return the result of `delta_rule` with *gates*, for keys scaled to length 1 and queries to length D ** -0.5.

    Faster versions may return the result in the dtype of the values.
    """
    q, k = _unit(q_NKD) * q_NKD.shape[-1] ** -0.5, _unit(k_NKD)
    tokens = q, k, v_NHW, gates.log_decay(), gates.b_NH.float().sigmoid()
    if trail is None:
        return delta_rule(*tokens, states, rows, lengths)
    outputs, parts = [], [part.unflatten(0, trail.shape) for part in tokens]
    for token in range(trail.shape[1]):
        q, k, v, log_decay, beta = (part[:, token] for part in parts)
        outputs.append(delta_rule(q, k, v, log_decay, beta, states, rows, (1,) * len(rows)))
        states.index_copy_(0, trail[:, token], states.index_select(0, rows))
    return torch.stack(outputs, 1).flatten(0, 1)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Return x / |x| over the last dimension, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)


def delta_rule(
    q_NKD: torch.Tensor,
    k_NKD: torch.Tensor,
    v_NHW: torch.Tensor,
    log_decay_NH: torch.Tensor,
    beta_NH: torch.Tensor,
    states: torch.Tensor,
    rows: torch.Tensor,
    lengths: tuple[int, ...],
) -> torch.Tensor:
    """Return S_n^T q_n, float32 [N, H, W], with S_n = d S + k_n (beta_n (v_n - d S^T k_n))^T and S = S_(n-1).

    d is exp(log_decay_n), at most 1. H / K neighbouring value heads share a key head. *states* float32 [R, H, D, W]
    hold each sequence's S, which is zero before its first token. This updates them.
    """
    rows = rows.long()
    num_singles, spans = split(lengths)
    group = v_NHW.shape[1] // k_NKD.shape[1]
    q_NHD, k_NHD = (tensor.float().repeat_interleave(group, 1) for tensor in (q_NKD, k_NKD))
    tokens = _Tokens(q_NHD, k_NHD, v_NHW.float(), log_decay_NH.float(), beta_NH.float())
    outputs = []
    if num_singles:
        own = rows[:num_singles]
        state = states.index_select(0, own)
        outputs.append(_single_tokens(_Tokens(*(tensor[:num_singles] for tensor in tokens)), state))
        states.index_copy_(0, own, state)
    for index, span in spans:
        own = rows[index : index + 1]
        state = states.index_select(0, own)
        outputs.append(_scan(_Tokens(*(tensor[span].transpose(0, 1) for tensor in tokens)), state[0]))
        states.index_copy_(0, own, state)
    return torch.cat(outputs)


def split(lengths: tuple[int, ...]) -> tuple[int, Iterator[tuple[int, slice]]]:
    """Return how many sequences of a single token come first, and the index and token slice of each later sequence."""
    num_singles = next((index for index, length in enumerate(lengths) if length > 1), len(lengths))
    return num_singles, _spans(lengths, num_singles)


def _spans(lengths: tuple[int, ...], first: int) -> Iterator[tuple[int, slice]]:
    start = first
    for index in range(first, len(lengths)):
        yield index, slice(start, start + lengths[index])
        start += lengths[index]


def _single_tokens(tokens: _Tokens, state_SHDW: torch.Tensor) -> torch.Tensor:
    """Apply the rule to one token of each sequence; overwrite the states, and return [S, H, W]."""
    q_SHD, k_SHD, v_SHW, log_decay_SH, beta_SH = tokens
    state_SHDW.mul_(log_decay_SH.exp()[..., None, None])
    recalled_SHW = (k_SHD.unsqueeze(-2) @ state_SHDW).squeeze(-2)
    correction_SHW = (v_SHW - recalled_SHW) * beta_SH.unsqueeze(-1)
    state_SHDW.addcmul_(k_SHD.unsqueeze(-1), correction_SHW.unsqueeze(-2))
    return (q_SHD.unsqueeze(-2) @ state_SHDW).squeeze(-2)


def _scan(tokens: _Tokens, state_HDW: torch.Tensor) -> torch.Tensor:
    """Apply the rule to one sequence, [H, L, ...], block by block; overwrite the state, and return [L, H, W].

    Let c be the sum of log decays from the block's start, and S the state there. The corrections u of a block solve
    u_i + beta_i sum over j < i of exp(c_i - c_j) (k_i . k_j) u_j = beta_i (v_i - exp(c_i) S^T k_i).
    """
    length = tokens.q.shape[1]
    block = min(BLOCK, length)
    padding = -length % block
    # Tokens of padding have neither keys nor decay, so they change no state.
    q, k, v = (functional.pad(x, (0, 0, 0, padding)).unflatten(1, (-1, block)) for x in tokens[:3])
    log_decay, beta = (functional.pad(x, (0, padding)).unflatten(1, (-1, block)) for x in tokens[3:])
    # Sums between two tokens, made without differences of longer sums, which would lose their last digits.
    between = log_decay.unsqueeze(-1).expand(*log_decay.shape, block).tril(-1).cumsum(-2)
    decays = between.exp_().tril_()
    weighted_k = k * beta.unsqueeze(-1)
    system = (weighted_k @ k.transpose(-1, -2)).mul_(decays)
    scores = (q @ k.transpose(-1, -2)).mul_(decays)
    decay_in = log_decay.cumsum(-1).exp_().unsqueeze(-1)
    right_side = torch.cat((v * beta.unsqueeze(-1), weighted_k * decay_in), -1)
    solved = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
    new_v, read_k = solved.split_with_sizes((v.shape[-1], k.shape[-1]), -1)
    q_in = q * decay_in
    k_out = (k * decays[..., -1, :].unsqueeze(-1)).transpose(-1, -2)
    outputs = torch.empty_like(v)
    for index in range(q.shape[1]):
        correction = torch.baddbmm(new_v[:, index], read_k[:, index], state_HDW, alpha=-1)
        outputs[:, index] = torch.baddbmm(q_in[:, index] @ state_HDW, scores[:, index], correction)
        state_HDW.mul_(decay_in[:, index, -1:]).baddbmm_(k_out[:, index], correction)
    return outputs.flatten(1, 2)[:, :length].transpose(0, 1)
