"""What an engine has ready when its first request comes."""

from pathlib import Path

import engines
import pytest
import torch

from saccade.engine import startup
from saccade.engine.config import EngineConfig
from saccade.engine.execution import prepare
from saccade.engine.loader import load_model
from saccade.nn.backends.numba_cpu import Backend
from saccade.nn.kernels import paged_attention, rows, tile_attention, tile_product, tiles


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_kernel_is_compiled_for_a_request(tiny_qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Compiling takes a second, and everybody would wait for it."""
    passes = [rows.normalise, rows.layer_norm, rows.rms_norm, rows.norm_rotate, rows.rotate_pairs, rows.gate]
    kernels = [paged_attention.attend, *passes]
    if dtype == "bfloat16" and tiles.available():
        kernels += [tile_attention.attention, tile_product.multiply]
    for made in kernels:
        made.cache_clear()
    before = torch.get_num_threads()
    subject = engines.engine(tiny_qwen3_vl, dtype=dtype, threads=2, max_num_batched_tokens=64)
    assert isinstance(subject.runner.backend, Backend)
    ready = [made.cache_info().currsize for made in kernels]
    assert min(ready) > 0
    # Everything is worth all threads.
    monkeypatch.setattr("saccade.nn.backends.numba_cpu.PART_BYTES", 1)
    monkeypatch.setattr("saccade.nn.backends.numba_cpu.PART_VALUES", 1)
    monkeypatch.setattr("saccade.engine.threads.SERIAL_CONTEXT", -1)
    prompts = [[70], [5, ((1, 8, 12), 1), 9], [3, ((1, 4, 6), 2), ((1, 6, 6), 3)], [1]]
    for asked in ([0], [1], [0, 1, 2, 3], [2, 3, 2]):
        requests = [
            engines.request(tiny_qwen3_vl, prompts[which], str(number), number, max_tokens=8)
            for number, which in enumerate(asked)
        ]
        assert len(engines.drain(subject, *requests).answers) == len(asked)
    torch.set_num_threads(before)
    assert [made.cache_info().currsize for made in kernels] == ready


def test_pool_for_measuring_memory_does_not_bound_the_context(tiny_qwen3_vl: Path) -> None:
    """On a GPU memory is measured with a pool of one step's size; the context is held by the one that follows."""
    config = EngineConfig(
        str(tiny_qwen3_vl),
        "tiny",
        device="cpu",
        max_model_len=4096,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        encode_budget_patches=64,
    )
    model = load_model(config, lambda *_: None)
    startup._use_all_memory(config, model, prepare(config, model))
