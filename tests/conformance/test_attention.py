"""Attention backends under whole networks: the same logits from each, and the metadata that towers give to each block."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from checkpoints import NETWORKS

from saccade.engine.loop import Engine
from saccade.models.facts import Latent, MediaShape
from saccade.nn.context import PackedLayout
from saccade.nn.vision import PackedSelfAttention

PICTURES: list[Any] = [3, ((96, 160), 2), 6, ((320, 64), 3), 8]
ATOL = 1e-4
CHECKPOINTS = [pytest.param(name, marks=() if name == "qwen3_vl" else pytest.mark.conformance) for name in NETWORKS]


@pytest.fixture(scope="module", params=CHECKPOINTS)
def folder(request: pytest.FixtureRequest, network_folder: Callable[[str], Path]) -> Path:
    return network_folder(request.param)


def answered(subject: Engine, folder: Path) -> tuple[list[int], torch.Tensor]:
    """The tokens of an answer, and the logits that they were drawn from."""
    logits = engines.record_logits(subject)
    asked = engines.request(folder, PICTURES, max_tokens=6)
    token_ids = engines.drain(subject, asked).answers["a"].token_ids
    return token_ids, torch.stack(logits["a"])


def test_triton_gives_the_logits_of_the_plain_backend(folder: Path) -> None:
    plain = engines.engine(folder)
    has_latent_layers = any(isinstance(spec, Latent) for spec in plain.validator.facts.kv_specs)
    decoder = "torch_sdpa" if has_latent_layers else "triton"
    other = engines.engine(folder, attention_backend=decoder, mm_encoder_attn_backend="triton")
    (expected_ids, expected), (found_ids, found) = answered(plain, folder), answered(other, folder)
    torch.testing.assert_close(found, expected, atol=ATOL, rtol=0)
    assert found_ids == expected_ids


class Recording:
    """A vision backend that keeps the layout of each call."""

    def __init__(self, backend: Any, metadata: tuple[str, ...]) -> None:
        self.name, self.metadata = "recording", metadata
        self.layouts: list[PackedLayout] = []
        self._backend = backend

    def packed(self, *args: Any) -> torch.Tensor:
        self.layouts.append(next(arg for arg in args if isinstance(arg, PackedLayout)))
        return self._backend.packed(*args)  # type: ignore[no-any-return]


def test_every_block_of_a_tower_gets_all_metadata(folder: Path) -> None:  # B6, C1, [eng] 34
    subject = engines.engine(folder, encode_budget_patches=1 << 14)
    runner = engines.local(subject).runner
    recording = runner.vision_backend = Recording(
        runner.vision_backend, ("cu_seqlens", "max_seqlen", "sequence_lengths")
    )
    asked = engines.request(folder, PICTURES, max_tokens=1)
    assert engines.drain(subject, asked).answers["a"].failure is None
    num_blocks = sum(isinstance(module, PackedSelfAttention) for module in engines.module(subject).modules())
    assert len(recording.layouts) >= max(1, num_blocks)
    for layout in recording.layouts:
        assert (layout.cu_seqlens.dtype, layout.cu_seqlens[0]) == (torch.int32, 0)
        assert layout.cu_seqlens.diff().tolist() == list(layout.sequence_lengths)
        assert type(layout.max_seqlen) is int
        assert layout.max_seqlen == max(layout.sequence_lengths)


def test_a_tower_that_lacks_metadata_is_refused_before_it_runs(folder: Path) -> None:
    network = engines.module(engines.engine(folder))
    item = engines.request(folder, PICTURES).media[0]
    backend = Recording(None, ("cu_seqlens", "workspace"))
    with pytest.raises(ValueError, match="recording needs workspace"):
        network.prepare([MediaShape(item.grid, item.original_size)], backend)
    assert backend.layouts == []
