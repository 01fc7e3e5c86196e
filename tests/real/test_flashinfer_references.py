"""Saccade's plain operations equal the references that FlashInfer's releases have of its own operations.

A kernel of the library that takes an operation's place then computes the same, if it does what its reference says.
Where the library has another layout, the test converts it, and so says what an adapter must do.
"""

import pytest
import torch
from libraries import Library
from torch.nn import functional

from saccade.engine.core.step import SamplingInput
from saccade.engine.executor.logits_processors import RowChanges
from saccade.engine.executor.penalties import Penalties
from saccade.engine.executor.sampler import Sampler
from saccade.nn import ops
from saccade.nn.backends import torch_sdpa
from saccade.nn.context import ForwardContext, KvCache, LatentCache, LayerCache, PackedLayout, PagedLayout
from saccade.nn.delta_rule import delta_rule
from saccade.nn.formats.fp8 import Fp8
from saccade.nn.formats.nvfp4 import Nvfp4
from saccade.nn.formats.quantised import QuantisedLinear, QuantisedWeight, Region
from saccade.nn.ops import softmax_top_k
from saccade.nn.rope import cos_sin, cos_sin_pairs, inverse_frequencies
from saccade.protocol.request import SamplingParams

pytestmark = pytest.mark.real
TEMPLATES = "flashinfer.trace.templates"
EPS = 1e-6
BF16 = torch.bfloat16
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
"""Values are of about 1. The library's references of attention round to bfloat16."""

HEADS, KV_HEADS, DIM, BLOCK = 8, 2, 64, 4


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> None:
    bound = TOLERANCE[expected.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(actual.float(), expected.float(), atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_norms(flashinfer: Library, dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(5, 96).to(dtype), torch.randn(96), torch.randn(96)
    rms = flashinfer.run(f"{TEMPLATES}.norm._rmsnorm_reference")
    close(ops.rms_norm(x, weight, EPS), rms(x, weight))
    close(ops.rms_norm(x, weight.to(dtype), EPS), rms(x, weight.to(dtype)))
    gemma = flashinfer.run(f"{TEMPLATES}.norm._gemma_rmsnorm_reference")
    close(ops.rms_norm(x, weight + 1, EPS), gemma(x, weight))
    layer = flashinfer.run(f"{TEMPLATES}.norm._layernorm_reference")
    close(
        functional.layer_norm(x, (96,), weight.to(dtype), bias.to(dtype), EPS),
        layer(x, weight.to(dtype), bias.to(dtype)),
    )
    added = flashinfer.run(f"{TEMPLATES}.norm._fused_add_rmsnorm_reference")
    close(ops.rms_norm(x.float() + 1, weight, EPS).to(dtype), added(x, torch.ones_like(x), weight))


@pytest.mark.parametrize(
    ("activation", "name"), [(ops.SILU, "_silu"), (ops.GELU, "_gelu"), (ops.GELU_TANH, "_gelu_tanh")]
)
def test_gated_activations(flashinfer: Library, activation: ops.Activation, name: str) -> None:
    x = torch.randn(7, 64)
    close(
        ops.gated_activation(x, activation),
        flashinfer.run(f"{TEMPLATES}.activation.{name}_and_mul_reference")(x),
    )


@pytest.mark.parametrize("width", [DIM, DIM // 2])
def test_rotations(flashinfer: Library, width: int) -> None:
    q, positions = torch.randn(6, HEADS, DIM), torch.tensor([0, 1, 2, 77, 5000, 262000])
    angles = positions.float().unsqueeze(1) * inverse_frequencies(1e4, width, torch.device("cpu"))
    reference = flashinfer.run(f"{TEMPLATES}.rope._apply_rope_pos_ids_reference")
    # Angles of such positions have only a few digits after the point in float32.
    close(ops.rotary(q, cos_sin(angles, q.dtype)), reference(q, q, positions, width)[0], 0.05)
    table = flashinfer.run(f"{TEMPLATES}.rope._apply_rope_with_cos_sin_cache_reference")
    cache = torch.cat((angles.cos(), angles.sin()), -1)
    rotated = table(torch.arange(6), q.flatten(1), q.flatten(1), DIM, cache)[0].view_as(q)
    close(ops.rotary(q, cos_sin(angles, q.dtype)), rotated)
    if width == DIM:
        rotated = table(torch.arange(6), q.flatten(1), q.flatten(1), DIM, cache, is_neox=False)[0].view_as(q)
        close(ops.rotary_pairs(q, cos_sin_pairs(angles)), rotated)


def layout(queries: tuple[int, ...], contexts: tuple[int, ...]) -> tuple[PagedLayout, torch.Tensor, torch.Tensor]:
    """Sequences with shuffled blocks, and the library's borders and indices of pages. Contexts fill whole blocks."""
    counts = [length // BLOCK for length in contexts]
    order = torch.randperm(sum(counts))
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int64)
    slots = []
    for row, blocks in enumerate(order.split(counts)):
        tables[row, : len(blocks)] = blocks
        own = (blocks.unsqueeze(1) * BLOCK + torch.arange(BLOCK)).flatten()
        slots.append(own[len(own) - queries[row] :])
    num_decodes = sum(length == 1 for length in queries)
    paged = PagedLayout(
        torch.cat(slots), tables, torch.tensor(contexts), queries, contexts, num_decodes, BLOCK, torch.arange(len(counts))
    )  # fmt: skip
    return paged, borders(tuple(counts)), order.int()


def borders(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def context(paged: PagedLayout, cache: LayerCache, dtype: torch.dtype) -> ForwardContext:
    backend = torch_sdpa.AttentionBackend()
    positions = torch.zeros(3, len(paged.slot_mapping), dtype=torch.int64)
    return ForwardContext(positions, paged, [cache], backend, backend.plan(paged, dtype))


BATCHES = [((1, 1, 1), (4, 12, 40)), ((1, 4, 6), (8, 4, 20))]


@pytest.mark.parametrize(("queries", "contexts"), BATCHES)
def test_paged_attention(flashinfer: Library, queries: tuple[int, ...], contexts: tuple[int, ...]) -> None:
    paged, pages, indices = layout(queries, contexts)
    shape = (len(indices), BLOCK, KV_HEADS, DIM)
    cache = KvCache(torch.randn(shape).to(BF16), torch.randn(shape).to(BF16))
    num_tokens = sum(queries)
    q, (k, v) = torch.randn(num_tokens, HEADS, DIM).to(BF16), torch.randn(2, num_tokens, KV_HEADS, DIM).to(BF16)
    step = context(paged, cache, BF16)
    output = step.backend.paged(q, k, v, 0, step).view_as(q)
    scale = DIM**-0.5
    if set(queries) == {1}:
        reference = flashinfer.run(f"{TEMPLATES}.attention._gqa_paged_decode_reference")
        close(output, reference(q, cache.keys, cache.values, pages, indices, scale)[0])
    reference = flashinfer.run(f"{TEMPLATES}.attention._gqa_paged_prefill_reference")
    close(output, reference(q, cache.keys, cache.values, borders(queries), pages, indices, scale)[0])


@pytest.mark.parametrize(("queries", "contexts"), BATCHES)
def test_latent_attention(flashinfer: Library, queries: tuple[int, ...], contexts: tuple[int, ...]) -> None:
    """The library has a cache of latents and one of rotated channels; Saccade has both in one."""
    paged, pages, indices = layout(queries, contexts)
    width, rope_width = 32, 16
    cache = LatentCache(torch.randn(len(indices), BLOCK, width + rope_width).to(BF16))
    q = torch.randn(sum(queries), HEADS, width + rope_width).to(BF16)
    step = context(paged, cache, BF16)
    own = torch.randn(len(q), width + rope_width).to(BF16)
    output = step.backend.latent(q, own, 0, step, value_width=width, scale=0.1)
    parts = (*q.split((width, rope_width), -1), *cache.latents.split((width, rope_width), -1))
    if set(queries) == {1}:
        reference = flashinfer.run(f"{TEMPLATES}.attention._mla_paged_decode_reference")
        close(output, reference(*parts, pages, indices, 0.1)[0])
    reference = flashinfer.run(f"{TEMPLATES}.attention._mla_paged_prefill_reference")
    close(output, reference(*parts, borders(queries), pages, indices, 0.1)[0])


def test_attention_of_towers(flashinfer: Library) -> None:
    """The library's reference takes keys and values in pages: one page a sequence."""
    lengths = (5, 3, 9)
    q, k, v = torch.randn(3, sum(lengths), HEADS, 72)
    output = torch_sdpa.VisionAttentionBackend().packed(
        (q, k, v), PackedLayout(borders(lengths), max(lengths), lengths)
    )
    pages = [
        torch.stack([functional.pad(part, (0, 0, 0, 0, 0, max(lengths) - len(part))) for part in x.split(lengths)])
        for x in (k, v)
    ]
    counts, longest = torch.tensor(lengths), max(lengths)
    reference = flashinfer.run(f"{TEMPLATES}.attention._cudnn_batch_prefill_reference")
    expected, _ = reference(
        q, *(page.transpose(1, 2) for page in pages), 72**-0.5, None, longest, longest, counts, counts, False, False
    )
    close(output.view_as(q), expected)


def test_writes_to_the_cache(flashinfer: Library) -> None:
    paged, pages, indices = layout((1, 4, 6), (8, 4, 20))
    shape = (len(indices), BLOCK, KV_HEADS, DIM)
    cache = KvCache(torch.zeros(shape), torch.zeros(shape))
    k, v = torch.randn(2, 11, KV_HEADS, DIM)
    cache.write(paged.slot_mapping, k, v)
    expected = torch.zeros(shape), torch.zeros(shape)
    rows = torch.tensor([0] + [1] * 4 + [2] * 6)
    positions = torch.tensor([7, 0, 1, 2, 3, 14, 15, 16, 17, 18, 19])
    reference = flashinfer.run(f"{TEMPLATES}.page._append_paged_kv_cache_reference")
    reference(k, v, rows, positions, expected, indices, pages, torch.tensor([4, 4, 4]))
    assert torch.equal(cache.keys, expected[0])
    assert torch.equal(cache.values, expected[1])


def unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


@pytest.mark.parametrize("lengths", [(1, 1, 1), (1, 5, 130)])
def test_delta_rule(flashinfer: Library, lengths: tuple[int, ...]) -> None:
    """The library computes decay and beta itself, scales the query, and has states [H, W, D]."""
    num_tokens, keys, values, width = sum(lengths), 2, 4, 32
    q, k = (unit(torch.randn(num_tokens, keys, width)).to(BF16) for _ in range(2))
    v = torch.randn(num_tokens, values, width).to(BF16)
    rate_log, bias, a, b = 0.1 * torch.randn(values), torch.randn(values), *torch.randn(2, num_tokens, values)
    states = torch.randn(len(lengths), values, width, width)
    before = states.transpose(-1, -2).clone()
    decay = -rate_log.exp() * functional.softplus(a + bias)
    output = delta_rule(q * width**-0.5, k, v, decay, b.sigmoid(), states, torch.arange(len(lengths)), lengths)
    gates = (rate_log, a, bias, b)
    reference = flashinfer.run(f"{TEMPLATES}.gdn._gdn_prefill_reference")
    expected, after = reference(q, k, v, before, *gates, borders(lengths), None)
    close(output.to(BF16), expected, 0.02)
    close(states.transpose(-1, -2), after, 0.02)
    if set(lengths) == {1}:
        reference = flashinfer.run(f"{TEMPLATES}.gdn._gdn_decode_reference")
        one, single = (q, k, v), (rate_log, a.unsqueeze(1), bias, b.unsqueeze(1))
        expected, after = reference(*(x.unsqueeze(1) for x in one), before, *single, None)
        close(output.to(BF16), expected.squeeze(1), 0.02)
        close(states.transpose(-1, -2), after, 0.02)


def test_delta_rule_over_drafts(flashinfer: Library) -> None:
    """Of speculation: several tokens of each row of a pool, here with the states updated."""
    rows, num_tokens, heads, width = torch.tensor([3, 1]), 4, 2, 32
    q, k, v = (torch.randn(2, num_tokens, heads, width).to(BF16) for _ in range(3))
    rate_log, bias = 0.1 * torch.randn(heads), torch.randn(heads)
    a, b = torch.randn(2, 2, num_tokens, heads).to(BF16)
    pool = torch.randn(5, heads, width, width)
    states = pool.transpose(-1, -2).contiguous()
    reference = flashinfer.run(f"{TEMPLATES}.gdn._gdn_mtp_reference")
    expected, after = reference(q, k, v, pool, rows, rate_log, a, bias, b, disable_state_update=False)
    decay = -rate_log.exp() * functional.softplus(a.float() + bias)
    inputs = unit(q.float()) * width**-0.5, unit(k.float()), v, decay, b.float().sigmoid()
    output = delta_rule(*(x.flatten(0, 1) for x in inputs), states, rows, (num_tokens,) * 2)
    close(output.view_as(v).to(BF16), expected, 0.02)
    close(states.transpose(-1, -2), after, 1e-4)


def test_experts(flashinfer: Library) -> None:
    """The library's first matrix has the ups first, then the gates."""
    num_experts, hidden, width = 6, 32, 48
    x, logits = torch.randn(9, hidden).to(BF16), torch.randn(9, num_experts)
    gate_up = torch.randn(num_experts, 2 * width, hidden).to(BF16) * hidden**-0.5
    down = torch.randn(num_experts, hidden, width).to(BF16) * width**-0.5
    ids, weights = softmax_top_k(logits, 3, False)
    routing = flashinfer.run(f"{TEMPLATES}.moe._default_routing_weights")
    their_weights, their_ids = routing(logits, None, 3, None)
    dense = torch.zeros(2, 9, num_experts)
    close(dense[0].scatter(1, ids, weights), dense[1].scatter(1, their_ids, their_weights))
    ups_first = torch.cat((gate_up[:, width:], gate_up[:, :width]), 1)
    reference = flashinfer.run(f"{TEMPLATES}.moe._cutlass_fused_moe_reference")
    close(ops.experts(x, gate_up, down, ids, weights), reference(x, ids, weights, ups_first, down), 0.02)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.6, 0.0), (12, 0.7, 0.0), (0, 1.0, 0.2)]
)
def test_draws(flashinfer: Library, top_k: int, top_p: float, min_p: float) -> None:
    """The library masks and renormalises; the token is drawn from the cumulative shares by Saccade's uniform number."""
    num_rows, vocabulary = 200, 64
    logits = torch.randn(1, vocabulary).expand(num_rows, -1).clone()
    probs = logits.softmax(-1)
    sampling = f"{TEMPLATES}.sampling"
    if top_k:
        probs = flashinfer.run(f"{sampling}._top_k_renorm_probs_reference")(probs, top_k)
    if top_p < 1:
        probs = flashinfer.run(f"{sampling}._top_p_renorm_probs_reference")(probs, top_p)
    if min_p:
        kept = probs >= probs.amax(-1, keepdim=True) * min_p
        most_likely = flashinfer.run(f"{sampling}._min_p_sampling_reference")(probs, min_p)
        assert torch.equal(most_likely.long(), probs.argmax(-1))
        probs = torch.where(kept, probs, 0.0)
    uniforms = ((torch.arange(num_rows) + 0.5) / num_rows).double()
    cumulative = probs.double().cumsum(-1)
    expected = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1]).unsqueeze(1), right=True).squeeze(1)
    device = torch.device("cpu")
    sampler = Sampler([], RowChanges(device), Penalties(num_rows, vocabulary, device), device)
    params = [SamplingParams(max_tokens=1, top_k=top_k, top_p=top_p, min_p=min_p)] * num_rows
    drawn = sampler(logits, range(num_rows), params, SamplingInput(1, uniforms=tuple(uniforms.tolist())))
    # A number at the border of two tokens may fall to either side.
    assert (drawn != expected).sum() <= 1
    assert len(drawn.unique()) > 3


def test_fp8_blocks(flashinfer: Library) -> None:
    weight, x = torch.randn(256, 384), torch.randn(5, 384).to(BF16)
    fields = {"weight": weight.to(torch.float8_e4m3fn), "weight_scale_inv": torch.rand(2, 3) + 0.5}
    layer = QuantisedLinear((QuantisedWeight(Fp8(), fields, Region(0, 256, 0, 384)),), None)
    hopper = flashinfer.run(f"{TEMPLATES}.gemm._fp8_blockscale_gemm_sm90_reference")
    close(layer.apply(x, None), hopper(x, fields["weight"], None, fields["weight_scale_inv"]), 0.05)
    blackwell = flashinfer.run(f"{TEMPLATES}.gemm._gemm_fp8_nt_groupwise_reference")
    close(layer.apply(x, None), blackwell(x, fields["weight"], torch.ones(5, 3), fields["weight_scale_inv"]), 0.05)


def test_nvfp4_values(flashinfer: Library) -> None:
    codes = torch.randint(0, 256, (8, 32), dtype=torch.uint8)
    scales = (torch.rand(8, 4) * 4).to(torch.float8_e4m3fn)
    fields = {"weight": codes, "weight_scale": scales, "weight_scale_2": torch.tensor(0.25)}
    reference = flashinfer.run(f"{TEMPLATES}.moe._dequantize_fp4_tensor")
    assert torch.equal(Nvfp4().dequantise(fields, Region(0, 8, 0, 64)), reference(codes, scales, False) * 0.25)
