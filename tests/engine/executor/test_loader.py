"""Loading: damaged and odd checkpoints are the operator's to know, by file and tensor."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import engines
import pytest
import torch
from safetensors.torch import load_file, save_file

from saccade.engine.config import EngineConfig
from saccade.engine.executor.loader import choose_dtype, fingerprint, load_model, weight_files
from saccade.errors import StartupError
from saccade.models.files import read_model_files

Tensors = dict[str, torch.Tensor]
DOWN = "model.language_model.layers.1.mlp.down_proj.weight"
Q = "model.language_model.layers.2.self_attn.q_proj.weight"


@pytest.fixture
def copy(tiny_qwen3_vl: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may damage."""
    return shutil.copytree(tiny_qwen3_vl, tmp_path / "model")


def load(folder: Path) -> torch.nn.Module:
    network: torch.nn.Module = load_model(EngineConfig(str(folder), "tiny", device="cpu"), lambda *_: None).network
    return network


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(DOWN), ["lacks 1 tensors", "language_model.layers.1.mlp.down_proj.weight"]),
        (lambda t: t.pop(Q), ["language_model.layers.2.self_attn.qkv_proj.weight (part 0)"]),
        (lambda t: t.update({"model.extra": torch.ones(1)}), ["model.safetensors", "model.extra"]),
        (lambda t: t.update({DOWN: torch.ones(3, 5)}), ["model.safetensors", DOWN, "[3, 5]", "[128, 256]"]),
        (lambda t: t.update({Q: torch.ones(64, 128)}), [Q, "[64, 128]", "[128, 128]"]),
    ],
)
def test_wrong_tensors(copy: Path, change: Callable[[Tensors], object], words: list[str]) -> None:
    rewrite(copy, change)
    with pytest.raises(StartupError) as error:
        load(copy)
    assert all(word in error.value.message for word in words), error.value.message


def test_more_positions_than_the_model_has_are_refused_before_weights_are_read(tiny_qwen3_vl: Path) -> None:
    stages: list[str] = []
    config = EngineConfig(str(tiny_qwen3_vl), "tiny", device="cpu", max_model_len=999_999)
    with pytest.raises(StartupError, match=r"--max-model-len is 999999, but the model has \d+ positions"):
        load_model(config, lambda stage, *_: stages.append(stage))
    assert stages == []


def test_lost_image_settings_are_named(copy: Path) -> None:
    (copy / "preprocessor_config.json").unlink()
    with pytest.raises(StartupError, match=r"preprocessor_config\.json"):
        load(copy)


def test_sharded_index_loads_the_same(copy: Path) -> None:
    whole = load(copy).state_dict()
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, copy / shard)
    index = {"weight_map": {name: shard for shard, members in shards.items() for name in members}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert all(torch.equal(value, whole[name]) for name, value in load(copy).state_dict().items())
    (copy / "b.safetensors").unlink()
    with pytest.raises(StartupError, match=r"b\.safetensors"):
        load(copy)


def test_damaged_files(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(StartupError, match=r"model\.safetensors.*damaged"):
        load(copy)
    weights.unlink()
    with pytest.raises(StartupError, match=r"neither model\.safetensors nor"):
        load(copy)


@pytest.mark.parametrize("tied", [True, False])
def test_head(copy: Path, tied: bool) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = tied
    (copy / "config.json").write_text(json.dumps(config))
    rewrite(copy, lambda tensors: tensors.pop("lm_head.weight", None))
    embedding = load_file(copy / "model.safetensors")["model.language_model.embed_tokens.weight"]
    head, hidden = torch.randn(embedding.shape), torch.randn(2, 128)
    if not tied:
        with pytest.raises(StartupError, match=r"lm_head\.weight"):
            load(copy)
    rewrite(copy, lambda tensors: tensors.update({"lm_head.weight": head}))  # tied ones may carry it, unused
    expected = hidden @ (embedding if tied else head).T
    torch.testing.assert_close(load(copy).logits(hidden), expected)  # type: ignore[operator]


def test_fingerprint_follows_weights_and_files(copy: Path) -> None:
    def current() -> bytes:
        return fingerprint(read_model_files(copy), weight_files(copy))

    seen = [current(), current()]
    rewrite(copy, lambda tensors: tensors[DOWN].add_(1))
    seen.append(current())
    (copy / "generation_config.json").write_text("{}")
    seen.append(current())
    assert seen[0] == seen[1]
    assert len(set(seen)) == 3


@pytest.mark.parametrize(
    ("name", "device", "config", "expected"),
    [
        ("auto", "cpu", {"torch_dtype": "float32"}, torch.float32),
        ("auto", "cpu", {"torch_dtype": "float16"}, torch.float32),
        ("auto", "cuda", {"torch_dtype": "float16"}, torch.float16),
        ("auto", "cuda", {"text_config": {"dtype": "bfloat16"}}, torch.bfloat16),
        ("bfloat16", "cpu", {}, torch.bfloat16),
    ],
)
def test_dtype(name: str, device: str, config: dict[str, object], expected: torch.dtype) -> None:
    assert choose_dtype(name, torch.device(device), config) == expected


@pytest.mark.parametrize(("has_bfloat16", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_on_a_cpu_is_bfloat16_where_it_has_it(
    has_bfloat16: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: has_bfloat16)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    assert choose_dtype("auto", torch.device("cpu"), {"torch_dtype": "bfloat16"}) == expected
    assert choose_dtype("auto", torch.device("cpu"), {}) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(tiny_qwen3_vl: Path, dtype: str) -> None:
    subject = engines.engine(tiny_qwen3_vl, dtype=dtype)
    asked = engines.request(tiny_qwen3_vl, [4, ((1, 4, 4), 1), 3])
    assert len(engines.drain(subject, asked).answers["a"].token_ids) == 8
    assert subject.description.dtype == dtype


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": "int8"}, "dtype"),
        ({"device": "tpu"}, "device"),
        ({"max_num_batched_tokens": 4}, "max_num_batched_tokens"),
        ({"block_size": 0}, "block_size"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"num_blocks": 4, "max_model_len": 65}, "--max-model-len is 65, but the KV cache holds 64 tokens"),
        ({"num_blocks": None, "kv_cache_bytes": 10}, "KV cache"),
        ({"attention_backend": "magic"}, "torch_sdpa"),
        ({"mm_encoder_attn_backend": "magic"}, "torch_varlen, amx"),
        ({"mm_encoder_attn_backend": "amx"}, "in float32 on cpu"),
        ({"max_model_len": 10**6, "num_blocks": 10**5}, "--max-model-len"),
    ],
)
def test_settings_that_cannot_work(tiny_qwen3_vl: Path, settings: dict[str, object], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        engines.engine(tiny_qwen3_vl, **settings)


def test_pool_is_never_larger_than_needed(tiny_qwen3_vl: Path) -> None:
    assert engines.engine(tiny_qwen3_vl, num_blocks=None, max_num_seqs=2, max_model_len=40).description.num_blocks == 6


def test_every_name_of_the_model_is_described(tiny_qwen3_vl: Path) -> None:
    description = engines.engine(tiny_qwen3_vl, aliases=("small",)).description
    assert (description.model, description.aliases) == ("tiny", ("small",))
