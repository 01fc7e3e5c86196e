"""A model's fingerprint: other weights, files and settings that change KV blocks have another one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from saccade.engine.config import EngineConfig
from saccade.engine.executor.fingerprint import fingerprint, model_fingerprint, weights_digest
from saccade.engine.executor.weight_index import weight_files
from saccade.identity.content import files_digest
from saccade.models.files import read_model_files

DOWN = "model.language_model.layers.1.mlp.down_proj.weight"


def of(folder: Path, **settings: Any) -> bytes:
    return model_fingerprint(EngineConfig(str(folder), "tiny", **settings), read_model_files(folder))


@pytest.fixture
def copy(tiny_qwen3_vl: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may change."""
    return shutil.copytree(tiny_qwen3_vl, tmp_path / "model")


def test_fingerprint_depends_on_weights_and_files(copy: Path) -> None:
    seen = [of(copy), of(copy)]
    tensors = load_file(copy / "model.safetensors")
    tensors[DOWN].add_(1)
    save_file(tensors, copy / "model.safetensors")
    seen.append(of(copy))
    (copy / "generation_config.json").write_text("{}")
    seen.append(of(copy))
    assert seen[0] == seen[1]
    assert len(set(seen)) == 3


def test_the_digest_of_the_weights_leaves_out_the_files(copy: Path) -> None:  # F9
    def told(**settings: Any) -> bytes:
        return weights_digest(EngineConfig(str(copy), "tiny", **settings), read_model_files(copy))

    first, cache = told(), told(kv_cache_dtype="fp8")
    (copy / "generation_config.json").write_text("{}")
    assert told() == first != cache
    tensors = load_file(copy / "model.safetensors")
    tensors[DOWN].add_(1)
    save_file(tensors, copy / "model.safetensors")
    assert told() not in (first, cache)


def test_fingerprint_depends_on_weight_and_cache_formats(copy: Path) -> None:  # E5: never a wrong key
    seen = [of(copy), of(copy, kv_cache_dtype="fp8")]
    for algorithm in ("NVFP4", "FP8"):
        (copy / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": algorithm}}))
        seen += [of(copy), of(copy, kv_cache_dtype="fp8")]
    assert len(set(seen)) == 6


def test_settings_that_change_no_block_change_no_fingerprint(copy: Path) -> None:
    """Nor do models without a feature have another one than before the feature was known."""
    plain = fingerprint(b"saccade.model.1" + files_digest(read_model_files(copy).files), weight_files(copy))
    settings: list[dict[str, Any]] = [{}, {"max_model_len": 64}, {"block_size": 32}, {"tensor_parallel_size": 2}]
    assert {of(copy, **one) for one in settings} == {plain}


def test_longrope_has_two_sets_of_factors(network_folder: Callable[[str], Path]) -> None:
    folder = network_folder("phi3_v")
    longer, at_most, shorter = (of(folder, max_model_len=length) for length in (4097, 4096, 100))
    assert longer == of(folder) != at_most == shorter
