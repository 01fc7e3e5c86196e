"""FlashInfer's delta rule as it is published, played on a CPU: what it demands, and what it computes.

Source: flashinfer/gdn_prefill.py and gdn_decode.py of release 0.7.2, and their documents; tests/real reads the
signatures itself. A call that the library would refuse fails an assertion.
"""

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from published import empty_library, has_form
from torch.nn import functional

BF16 = torch.bfloat16
WIDTH = 128


def has_tokens(part: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Assert what a CuTe kernel asks of heads in bfloat16, which may be parts of wider rows: whole units of 16 bytes."""
    assert (tuple(part.shape), part.dtype, part.stride(-1)) == (shape, BF16, 1)
    assert all(place % 16 == 0 for place in (part.data_ptr(), *(2 * step for step in part.stride()[:-1])))


def _unit(x: torch.Tensor) -> torch.Tensor:
    return (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _walked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """One sequence, token by token in float64; *state* [H, values, keys] is updated."""
    heads = v.shape[1] // k.shape[1]
    q, k = (part.double().repeat_interleave(heads, 1) for part in (q, k))
    own, outputs = state.double(), []
    for token in range(len(q)):
        own = own * decay[token].double()[:, None, None]
        recalled = torch.einsum("hwd,hd->hw", own, k[token])
        update = beta[token].double()[:, None] * (v[token].double() - recalled)
        own = own + update[:, :, None] * k[token][:, None, :]
        outputs.append(torch.einsum("hwd,hd->hw", own, q[token]) * WIDTH**-0.5)
    state.copy_(own)
    return torch.stack(outputs).to(BF16)


def chunk_gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *,
    initial_state: torch.Tensor, output_final_state: bool, cu_seqlens: torch.Tensor, use_qk_l2norm_in_kernel: bool,
    output_state: torch.Tensor, state_indices: torch.Tensor, max_seqlen: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    for part, heads in ((q, k.shape[1]), (k, k.shape[1]), (v, v.shape[1])):
        has_form(part, (len(q), heads, WIDTH), BF16)
    for gate in (g, beta):
        has_form(gate, (len(q), v.shape[1]), torch.float32)
    has_form(initial_state, (len(initial_state), v.shape[1], WIDTH, WIDTH), torch.float32)
    assert output_state is initial_state
    assert output_final_state
    assert use_qk_l2norm_in_kernel
    rows, borders = state_indices.tolist(), cu_seqlens.tolist()
    assert len(set(rows)) == len(rows) == len(borders) - 1
    assert max_seqlen == cu_seqlens.diff().max()
    spans = [slice(*pair) for pair in pairwise(borders)]
    parts = [
        _walked(_unit(q[span]), _unit(k[span]), v[span], g[span], beta[span], initial_state[row])
        for row, span in zip(rows, spans, strict=True)
    ]
    return torch.cat(parts), output_state


def gated_delta_rule_decode_pretranspose(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: None, A_log: torch.Tensor, a: torch.Tensor,
    dt_bias: torch.Tensor, b: torch.Tensor, *, initial_state: torch.Tensor, initial_state_indices: torch.Tensor,
    output: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    assert state is None
    count, heads = len(q), v.shape[2]
    for part, number in ((q, k.shape[2]), (k, k.shape[2]), (v, heads)):
        has_tokens(part, (count, 1, number, WIDTH))
    for gate in (a, b):
        assert (gate.shape, gate.dtype, gate.stride(-1)) == ((count, 1, heads), BF16, 1)
    has_form(output, (count, 1, heads, WIDTH), BF16)
    has_form(A_log, (heads,), torch.float32)
    assert dt_bias.dtype in (torch.float32, BF16)
    has_form(initial_state_indices, (count,), torch.int32)
    has_form(initial_state, (len(initial_state), heads, WIDTH, WIDTH), torch.float32)
    decay = (-A_log.exp() * functional.softplus(a.float() + dt_bias)).exp()
    parts = [
        _walked(_unit(q[row]), _unit(k[row]), v[row], decay[row], b[row].float().sigmoid(), initial_state[place])
        for row, place in enumerate(initial_state_indices.tolist())
    ]
    return output.copy_(torch.stack(parts)), initial_state


def gated_delta_rule_mtp(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor, A_log: torch.Tensor, a: torch.Tensor, dt_bias: torch.Tensor, b: torch.Tensor,
    *, ssm_state_indices: torch.Tensor, disable_state_update: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    count, length, heads = v.shape[:3]
    assert length >= 2
    assert not disable_state_update
    for part, number in ((q, k.shape[2]), (k, k.shape[2]), (v, heads)):
        has_form(part, (count, length, number, WIDTH), BF16)
    for gate in (a, b):
        has_form(gate, (count, length, heads), BF16)
    has_form(A_log, (heads,), torch.float32)
    assert dt_bias.dtype in (torch.float32, BF16)
    has_form(initial_state_indices, (count,), torch.int32)
    has_form(ssm_state_indices, (count, length), torch.int32)
    has_form(initial_state, (len(initial_state), heads, WIDTH, WIDTH), torch.float32)
    decay = (-A_log.exp() * functional.softplus(a.float() + dt_bias)).exp()
    outputs = torch.empty_like(v)
    for row, place in enumerate(initial_state_indices.tolist()):
        state = initial_state[place].clone()
        for token, after in enumerate(ssm_state_indices[row].tolist()):
            span = row, slice(token, token + 1)
            gates = decay[span], b[span].float().sigmoid()
            outputs[span] = _walked(_unit(q[span]), _unit(k[span]), v[span], *gates, state)
            initial_state[after] = state
    return outputs, initial_state


def chunk_kernel(num_sequences: int, heads: int, num_sms: int) -> bool:
    """Which of two kernels for chunks Hopper takes: with little work, several blocks share a sequence."""
    return 2 * num_sequences * heads < num_sms


def proposals_kernel(num_sequences: int, num_tokens: int, heads: int) -> tuple[int, int, int, int, bool, bool]:
    """The numbers by which a kernel for proposals is compiled: tokens, its tile and the like."""
    work = num_sequences * heads
    if work > 1024:
        tile, rows, shares = 64, 8 if num_tokens <= 2 else 4, num_tokens > 2
    elif work > 128:
        is_narrow = work <= 448 and num_tokens <= 2
        tile, rows, shares = 16 if is_narrow else 32, 2 if is_narrow else 4, False
    else:
        tile, rows, shares = (8, 2, False) if work <= 64 else (16, 4, False)
    return num_tokens, tile, 4, rows, shares, work <= 128


MODULES = {
    "flashinfer.gdn_prefill": (chunk_gated_delta_rule,),
    "flashinfer.gdn_decode": (gated_delta_rule_decode_pretranspose, gated_delta_rule_mtp),
}


def install(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    """Make these functions importable, and have torch find a GPU of *capability*."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    monkeypatch.setitem(sys.modules, "flashinfer", empty_library("flashinfer"))
    for name, functions in MODULES.items():
        library: Any = empty_library(name)
        for function in functions:
            setattr(library, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, library)
    # Set before it is deleted, so that the module is forgotten at the end.
    monkeypatch.setitem(sys.modules, "saccade.nn.flashinfer_delta", ModuleType("flashinfer_delta"))
    del sys.modules["saccade.nn.flashinfer_delta"]
