"""Attention over cached latents against the same in float64, and against attention with unabsorbed keys and values."""

import pytest
import torch
from attention import BATCHES
from latents import HEADS, WIDTH, attend, draw, reference, step
from tables import table

from saccade.nn.backends import AUTO, load_backend
from saccade.nn.context import ForwardContext, KvCache, LatentCache


@table("dtype", [torch.float32, torch.bfloat16])
@table(("queries", "contexts"), BATCHES)
def test_latent_attention(queries: list[int], contexts: list[int], dtype: torch.dtype) -> None:  # [eng] 41
    made = step(queries, contexts, dtype)
    q_NQC, latents = draw(queries, contexts, dtype)
    output = attend(load_backend(AUTO), made, q_NQC, latents)
    assert output.shape == (sum(queries), HEADS, WIDTH)
    expected = [
        reference(q, latent[:, None].expand(-1, HEADS, -1), latent[:, None, :WIDTH].expand(-1, HEADS, -1))
        for q, latent in zip(q_NQC.split(queries), latents, strict=True)
    ]
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(output.double(), torch.cat(expected), atol=tolerance, rtol=tolerance)
    for own, latent in zip(made.slots, latents, strict=True):
        assert torch.equal(made.cache.flatten(0, 1)[own], latent)


@table(("queries", "contexts"), BATCHES)
def test_absorbed_queries_attend_as_keys_made_of_latents(queries: list[int], contexts: list[int]) -> None:
    generator = torch.Generator().manual_seed(2)
    to_keys_QKW = torch.randn(HEADS, 6, WIDTH, generator=generator)
    to_values_QVW = torch.randn(HEADS, 7, WIDTH, generator=generator)
    q_NQK = torch.randn(sum(queries), HEADS, 6, generator=generator)
    q_NQC, latents = draw(queries, contexts, torch.float32)
    turned_NQR = q_NQC[..., WIDTH:]
    absorbed = torch.cat((torch.einsum("nqk,qkw->nqw", q_NQK, to_keys_QKW), turned_NQR), -1)
    attended = attend(load_backend(AUTO), step(queries, contexts, torch.float32), absorbed, latents)
    output = torch.einsum("nqw,qvw->nqv", attended, to_values_QVW)
    expected = []
    for q, turned, latent in zip(q_NQK.split(queries), turned_NQR.split(queries), latents, strict=True):
        keys = torch.einsum("lw,qkw->lqk", latent[:, :WIDTH], to_keys_QKW)
        keys = torch.cat((keys, latent[:, None, WIDTH:].expand(-1, HEADS, -1)), -1)
        values = torch.einsum("lw,qvw->lqv", latent[:, :WIDTH], to_values_QVW)
        expected.append(reference(torch.cat((q, turned), -1), keys, values))
    torch.testing.assert_close(output.double(), torch.cat(expected), atol=1e-4, rtol=1e-4)


def test_a_cache_of_another_kind_is_refused() -> None:
    made = step([1], [1], torch.float32)
    backend = load_backend(AUTO)
    cache = KvCache(made.cache, made.cache)
    context = ForwardContext(torch.zeros(3, 1), made.layout, [cache], backend, backend.plan(made.layout, torch.float32))
    with pytest.raises(TypeError, match="Layer 0 has a KvCache, not a LatentCache"):
        context.cache(0, LatentCache)
