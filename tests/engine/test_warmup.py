"""What an engine has ready when its first request comes."""

from pathlib import Path

import engines
import pytest
import torch

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
