"""Attention backends and operations for GPUs under whole networks: every one that runs here gives the same logits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from checkpoints import NETWORKS

from saccade.engine.executor import execution
from saccade.engine.loop import Engine
from saccade.models.spec import Latent
from saccade.nn import ops

pytestmark = pytest.mark.ci

IMAGES: list[Any] = [3, ((96, 160), 2), 6, ((320, 64), 3), 8]
ATOL = 1e-4
CHECKPOINTS = [pytest.param(name, marks=() if name == "qwen3_vl" else pytest.mark.conformance) for name in NETWORKS]


@pytest.fixture(scope="module", params=CHECKPOINTS)
def folder(request: pytest.FixtureRequest, network_folder: Callable[[str], Path]) -> Path:
    return network_folder(request.param)


def answered(subject: Engine, folder: Path) -> tuple[list[int], torch.Tensor]:
    """The tokens of an answer, and the logits that they were drawn from."""
    logits = engines.record_logits(subject)
    asked = engines.request(folder, IMAGES, max_tokens=6)
    token_ids = engines.drain(subject, asked).answers["a"].token_ids
    return token_ids, torch.stack(logits["a"])


@pytest.mark.sampled(9, of_all=True)
def test_triton_gives_the_logits_of_the_plain_backend(folder: Path) -> None:
    plain = engines.engine(folder)
    has_latent_layers = any(isinstance(layer, Latent) for layer in plain.validator.spec.kv_specs)
    decoder = "torch_sdpa" if has_latent_layers else "triton"
    other = engines.engine(folder, attention_backend=decoder, mm_encoder_attn_backend="triton")
    (expected_ids, expected), (found_ids, found) = answered(plain, folder), answered(other, folder)
    torch.testing.assert_close(found, expected, atol=ATOL, rtol=0)
    assert found_ids == expected_ids


@pytest.mark.conformance
@pytest.mark.sampled(9, of_all=True)
def test_operations_for_gpus_give_the_logits_of_the_plain_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of towers, and with residuals that are overwritten."""
    plain = engines.engine(folder)
    names = [name for name, device_type, _ in ops.FASTER if device_type == "cuda" and name != "experts"]
    faster = {(name, "cpu", torch.float32): "saccade.nn.gpu" for name in names}
    monkeypatch.setattr(execution, "resolve", lambda device, dtype, *_: ops.resolve(device, dtype, faster))
    other = engines.engine(folder)
    (expected_ids, expected), (found_ids, found) = answered(plain, folder), answered(other, folder)
    torch.testing.assert_close(found, expected, atol=ATOL, rtol=0)
    assert found_ids == expected_ids
