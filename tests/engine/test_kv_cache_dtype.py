"""--kv-cache-dtype: what the caches hold, how much fits, and what that does to logits."""

import shutil
from pathlib import Path

import engines
import pytest
import torch
import toy_network
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from tables import table

from saccade.engine import startup
from saccade.engine.config import EngineConfig
from saccade.engine.executor.execution import prepare_execution
from saccade.engine.executor.loader import load_model
from saccade.errors import StartupError
from saccade.nn.context import KvCache, LatentCache, RecurrentState

FP8 = torch.float8_e4m3fn
PARTS = [21, ((96, 64), 1), 30]


def logits(folder: Path, **settings: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of one request, fresh and with its prefix in the cache. All tokens are the same in every engine."""
    subject = engines.engine(folder, **settings)
    found = engines.record_logits(subject)
    for request_id in ("fresh", "cached"):
        asked = engines.request(folder, PARTS, request_id, max_tokens=6, allowed_token_ids=(7,))
        engines.drain(subject, asked)
    return torch.stack(found["fresh"]), torch.stack(found["cached"])


def test_float8_changes_logits_a_little(tiny_qwen3_vl: Path) -> None:
    plain, _ = logits(tiny_qwen3_vl)
    fresh, cached = logits(tiny_qwen3_vl, kv_cache_dtype="fp8")
    assert 0.001 < (fresh - plain).abs().mean() / plain.std() < 0.1
    torch.testing.assert_close(cached, fresh, atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunk", [7, 16])
def test_chunks_and_whole_prompts_read_equal_values(tiny_qwen3_vl: Path, chunk: int) -> None:
    """Tokens of one chunk see one another as the cache will give them, so that chunks change nothing."""
    whole, _ = logits(tiny_qwen3_vl, kv_cache_dtype="fp8")
    chunked, _ = logits(tiny_qwen3_vl, kv_cache_dtype="fp8", max_num_batched_tokens=chunk, max_num_seqs=1)
    # A sum in another order may be rounded to the next number of float8.
    assert (chunked - whole).abs().mean() < 1e-3


@pytest.mark.parametrize(("dtype", "share"), [("float32", 4), ("bfloat16", 2)])
def test_float8_cache_has_more_blocks(tiny_qwen3_vl: Path, dtype: str, share: int) -> None:
    settings = {"num_blocks": None, "kv_cache_bytes": 1 << 20, "dtype": dtype}
    plain = engines.engine(tiny_qwen3_vl, **settings).description.num_blocks
    description = engines.engine(tiny_qwen3_vl, **settings, kv_cache_dtype="fp8").description
    assert description.num_blocks == share * plain
    assert (description.dtype, description.kv_cache_dtype) == (dtype, "float8_e4m3fn")


def test_recurrent_states_keep_their_dtypes() -> None:
    model = toy_network.load()
    config = EngineConfig("", "toy", device="cpu", num_blocks=8, kv_cache_dtype="fp8")
    caches = startup.allocate(config, model)
    kinds = {KvCache: 0, LatentCache: 0, RecurrentState: 0}
    plain = startup.allocate(EngineConfig("", "toy", device="cpu", num_blocks=8), model)
    for cache, before in zip(caches.layers, plain.layers, strict=True):
        kinds[type(cache)] += 1
        if isinstance(cache, RecurrentState):
            assert [tensor.dtype for tensor in cache.live] == [tensor.dtype for tensor in before.live]  # type: ignore[union-attr]
        else:
            assert cache[0].dtype == FP8
    assert all(kinds.values())
    assert prepare_execution(config, model).backend.name in ("torch_sdpa", "onednn")


def test_scales_of_the_checkpoint(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    """Under the names of the releases; those of layers that the network lacks are not needed."""
    folder = shutil.copytree(tiny_qwen3_vl, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    layers = "model.language_model.layers"
    tensors |= {
        f"{layers}.0.self_attn.k_proj.k_scale": torch.tensor(0.5),
        f"{layers}.0.self_attn.v_proj.v_scale": torch.tensor([0.25]),
        f"{layers}.2.self_attn.k_scale": torch.tensor(2.0),
        f"{layers}.3.self_attn.attn.v_scale": torch.tensor(4.0),
    }
    save_file(tensors, folder / "model.safetensors")

    def scales(**settings: str) -> list[tuple[float, float]]:
        caches = engines.local(engines.engine(folder, **settings)).runner.caches.layers
        return [(cache.key_scale, cache.value_scale) for cache in caches if isinstance(cache, KvCache)]

    assert scales(kv_cache_dtype="fp8") == [(0.5, 0.25), (1, 1), (2, 1), (1, 4)]
    assert scales() == [(1, 1)] * 4
    tensors[f"{layers}.1.self_attn.k_scale"] = torch.tensor(0.0)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(StartupError, match=r"layers\.1\.self_attn\.k_scale.*positive"):
        scales(kv_cache_dtype="fp8")


@table(
    ("names", "expected"),
    [
        ({"self_attn.kv_scale": 0.5}, (0.5, 0.5)),
        ({"self_attn.kv_scale": 0.5, "self_attn.k_scale": 0.5, "self_attn.v_scale": 0.5}, (0.5, 0.5)),
        ({"self_attn.k_proj.output_scale": 0.5, "self_attn.v_proj.output_scale": 0.25}, (0.5, 0.25)),
        ({"self_attn.qkv_proj.k_scale": 0.5, "self_attn.qkv_proj.v_scale": 0.25}, (0.5, 0.25)),
        ({"self_attn.q_scale": 3.0, "self_attn.prob_scale": 3.0}, (1, 1)),
        ({"self_attn.q_proj.output_scale": 3.0, "self_attn.prob_output_scale": 3.0}, (1, 1)),
    ],
)
def test_names_of_the_scales(
    tiny_qwen3_vl: Path, tmp_path: Path, names: dict[str, float], expected: tuple[float, float]
) -> None:
    """Those that the cache needs are used; others, or all of a cache of another format, are in the log."""
    folder = shutil.copytree(tiny_qwen3_vl, tmp_path / "model")
    own = {f"model.language_model.layers.1.{name}": torch.tensor(value) for name, value in names.items()}
    save_file({**load_file(folder / "model.safetensors"), **own}, folder / "model.safetensors")
    for dtype in ("auto", "fp8"):
        config = EngineConfig(str(folder), "tiny", device="cpu", kv_cache_dtype=dtype)
        with capture_logs() as logs:
            model = load_model(config, lambda *_: None)
        assert model.kv_scales.get(1, (1, 1)) == expected
        spare = [sum(log["tensors"].values()) for log in logs if "not used" in log["event"]]
        assert spare == ([len(names)] if dtype == "auto" or expected == (1, 1) else [])


@table(
    ("names", "words"),
    [
        ({"layers.1.self_attn.kv_scale": 0.5, "layers.1.self_attn.k_scale": 0.25}, ["kv_scale", "k_scale", "0.25"]),
        ({"layers.99.self_attn.k_scale": 0.5}, ["not know", "layers.99.self_attn.k_scale"]),
        ({"layers.1.self_attn.x_scale": 0.5}, ["not know", "layers.1.self_attn.x_scale"]),
    ],
)
def test_scales_that_are_refused(
    tiny_qwen3_vl: Path, tmp_path: Path, names: dict[str, float], words: list[str]
) -> None:
    folder = shutil.copytree(tiny_qwen3_vl, tmp_path / "model")
    own = {f"model.language_model.{name}": torch.tensor(value) for name, value in names.items()}
    save_file({**load_file(folder / "model.safetensors"), **own}, folder / "model.safetensors")
    with pytest.raises(StartupError) as error:
        load_model(EngineConfig(str(folder), "tiny", device="cpu"), lambda *_: None)
    assert all(word in error.value.message for word in words), error.value.message


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
def test_backends_that_read_no_float8_are_refused(tiny_qwen3_vl: Path, backend: str) -> None:
    with pytest.raises(StartupError, match=f"--attention-backend cannot be {backend}"):
        engines.engine(tiny_qwen3_vl, kv_cache_dtype="fp8", attention_backend=backend)
