"""Attention cut over fewer ranks than MLPs and experts: the answers of one process."""

from collections.abc import Callable
from pathlib import Path

import engines
import pytest
import torch

pytestmark = pytest.mark.ci


def test_attention_is_copied_and_experts_are_shared(network_folder: Callable[[str], Path]) -> None:  # B8
    folder = network_folder("qwen3_vl_moe")
    asked = engines.request(folder, [5, ((64, 64), 1), 9])
    alone = engines.engine(folder)
    expected = engines.record_logits(alone)
    token_ids = engines.drain(alone, asked).answers["a"].token_ids
    with engines.on_ranks(folder, attention_tensor_parallel_size=1) as subject:
        found = engines.record_logits(subject)
        assert engines.drain(subject, asked).answers["a"].token_ids == token_ids
        own, whole = (engines.module(engine).language_model.layers[0] for engine in (subject, alone))
        caches = [engines.local(engine).runner.caches.layers[0] for engine in (subject, alone)]
    torch.testing.assert_close(torch.stack(found["a"]), torch.stack(expected["a"]), atol=1e-4, rtol=0)
    assert own.self_attn.qkv_proj.weight.shape == whole.self_attn.qkv_proj.weight.shape
    assert caches[0].keys.shape == caches[1].keys.shape  # type: ignore[union-attr]
    assert 2 * len(own.mlp.experts.down_proj) == len(whole.mlp.experts.down_proj)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["qwen3_5_moe", "kimi_k25"])
def test_shared_experts_need_no_sum_of_their_own(name: str, network_folder: Callable[[str], Path]) -> None:  # B8
    folder = network_folder(name)
    with engines.on_ranks(folder) as subject, engines.counted_sums() as sums:
        engines.drain(subject, engines.request(folder, [5], max_tokens=1))
        assert len(sums) == 2 * len(engines.module(subject).language_model.layers) + 1


@pytest.mark.conformance
@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_5_moe", "kimi_k25"])
@pytest.mark.parametrize(("size", "shared"), [(2, 1), (4, 2)])
def test_experts_are_cut_over_more_ranks_than_attention(
    name: str, size: int, shared: int, network_folder: Callable[[str], Path]
) -> None:  # B8
    """Of six experts, four ranks hold a quarter of each; of eight, two each."""
    folder = network_folder(name)
    asked = [engines.request(folder, [9, ((96, 64), seed), 20], str(seed), seed) for seed in (1, 2, 3)]
    alone = engines.engine(folder)
    expected = engines.record_logits(alone)
    answers = engines.drain(alone, *asked).answers
    with engines.on_ranks(folder, size, attention_tensor_parallel_size=shared) as subject:
        found = engines.record_logits(subject)
        told = engines.drain(subject, *asked).answers
    for key, answer in answers.items():
        assert told[key].token_ids == answer.token_ids
        torch.testing.assert_close(torch.stack(found[key]), torch.stack(expected[key]), atol=1e-4, rtol=0)


@pytest.mark.conformance
def test_the_encoder_is_cut_as_attention_is(network_folder: Callable[[str], Path]) -> None:  # B8
    """Two pairs of ranks encode every image, each pair by itself."""
    folder = network_folder("qwen3_vl_moe")
    asked = engines.request(folder, [5, ((64, 64), 1), 9, ((96, 64), 2)])
    expected = engines.drain(engines.engine(folder), asked).answers["a"].token_ids
    with engines.on_ranks(folder, 4, attention_tensor_parallel_size=2, mm_encoder_tp_mode="weights") as subject:
        assert engines.drain(subject, asked).answers["a"].token_ids == expected
        block = engines.module(subject).visual.blocks[0]
        assert 2 * block.attn.num_heads == engines.module(subject).spec.vision.num_heads
