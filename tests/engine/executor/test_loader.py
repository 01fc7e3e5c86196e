"""Loading: damaged and odd checkpoints are the operator's to know, by file and tensor."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from safetensors.torch import load_file, save_file
from tables import table

from saccade.cli.bundled import bundled
from saccade.engine.config import EngineConfig
from saccade.engine.executor.loader import choose_dtype, load_model
from saccade.engine.executor.weight_files import Checkpoint
from saccade.errors import StartupError
from saccade.models.bundled_model import ABILITIES, BUNDLED_NAME, WAY_ON
from saccade.nn import layers
from saccade.nn.experts import Experts
from saccade.nn.layers import Linear
from saccade.nn.parallel import Ranks

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


def test_attention_by_cudnn_is_off(tiny_qwen3_vl: Path) -> None:
    """It would build a plan for every new length of a prompt."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    load(tiny_qwen3_vl)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


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
def test_wrong_tensors_are_named(copy: Path, change: Callable[[Tensors], object], words: list[str]) -> None:
    rewrite(copy, change)
    with pytest.raises(StartupError) as error:
        load(copy)
    assert all(word in error.value.message for word in words), error.value.message


def test_all_faults_are_listed_at_once(copy: Path) -> None:
    """Missing, unexpected and mis-shaped tensors, counted; of many, the first few are named."""

    def change(tensors: Tensors) -> None:
        tensors["model.renamed.weight"] = tensors.pop(DOWN)
        tensors[Q] = torch.ones(3, 5)
        for number in range(30):
            tensors[f"model.extra{number:02}"] = torch.ones(1)

    rewrite(copy, change)
    with pytest.raises(StartupError) as error:
        load(copy)
    words = ("lacks 1 tensors: language_model.layers.1.mlp.down_proj.weight", "has 31 tensors that", "model.extra10",
             "and 19 more", "has 1 tensors that cannot", f"{Q} (model.safetensors) has shape [3, 5]")  # fmt: skip
    assert all(word in error.value.message for word in words), error.value.message
    assert "model.extra20" not in error.value.message


def test_weights_that_are_no_floats_are_refused(copy: Path) -> None:
    rewrite(copy, lambda tensors: tensors.update({DOWN: torch.ones(128, 256, dtype=torch.int8)}))
    with pytest.raises(StartupError, match=r"down_proj\.weight \(model\.safetensors\) is I8 instead of"):
        load(copy)


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
    wrong = index["weight_map"] | {DOWN: "a.safetensors", Q: "b.safetensors", "model.absent": "a.safetensors"}
    moved = [name for name in (DOWN, Q) if wrong[name] != index["weight_map"][name]]
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": wrong}))
    with pytest.raises(StartupError) as error:
        load(copy)
    assert f"names {len(moved) + 1} tensors that its files do not have" in error.value.message
    assert all(f"{name} in {wrong[name]}" in error.value.message for name in (*moved, "model.absent"))
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    (copy / "b.safetensors").unlink()
    with pytest.raises(StartupError, match=r"b\.safetensors"):
        load(copy)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_damaged_index_is_named(copy: Path, content: str) -> None:
    (copy / "model.safetensors.index.json").write_text(content)
    with pytest.raises(StartupError, match=r"model\.safetensors\.index\.json.*weight_map"):
        load(copy)


def test_progress_counts_bytes(copy: Path) -> None:
    reports: list[tuple[str, int, int]] = []
    model = load_model(EngineConfig(str(copy), "tiny", device="cpu"), lambda *report: reports.append(report))
    total = 4 * model.num_parameters
    assert {(stage, of) for stage, _, of in reports} == {("loading weights", total)}
    done = [count for _, count, _ in reports]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, total)
    assert 10 < len(done) < 110


def test_a_rank_reads_its_part_only(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of cut tensors; the others are read whole."""
    counts: list[int] = []
    read = Checkpoint.read

    def counted(*arguments: Any) -> torch.Tensor:
        counts.append(read(*arguments).numel())
        return read(*arguments)

    monkeypatch.setattr(Checkpoint, "read", counted)
    config = EngineConfig(str(copy), "tiny", device="cpu")
    for ranks in (Ranks(), Ranks(1, 2)):
        counts.clear()
        model = load_model(config, lambda *_: None, ranks)
        assert sum(counts) == model.num_parameters


MEMORY = """
import sys, threading
import torch
from pathlib import Path
from saccade.engine.config import EngineConfig
from saccade.engine.executor import loader
from saccade.models.qwen_vl import spec, network  # imported before memory is measured
from saccade.nn.parallel import Ranks

def anonymous():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

before = peak = anonymous()
ended = threading.Event()

def watch():
    global peak
    while not ended.wait(0.001):
        peak = max(peak, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
ranks = Ranks(int(sys.argv[2]), int(sys.argv[3]))
model = loader.load_model(EngineConfig(sys.argv[1], "tiny", device="cpu"), lambda *_: None, ranks)
ended.set()
watcher.join()
print(max(peak, anonymous()) - before, 4 * model.num_parameters)
"""


@pytest.mark.conformance
def test_loading_holds_no_weight_twice(copy: Path) -> None:
    """At the peak, anonymous memory is the weights: no file and no tensor is held a second time."""
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 20_000
    (copy / "config.json").write_text(json.dumps(config))
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    shards: dict[str, Tensors] = {f"{number}.safetensors": {} for number in range(4)}
    for number, name in enumerate(tensors):
        if ".mlp." in name and "language_model" in name:
            tensors[name] = torch.zeros((128, 20_000) if "down" in name else (20_000, 128))
        shards[f"{number % 4}.safetensors"][name] = tensors[name]
    for shard, members in shards.items():
        save_file(members, copy / shard)
    index = {"weight_map": {name: shard for shard, members in shards.items() for name in members}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    for ranks in ("0 1", "1 2"):
        command = [sys.executable, "-c", MEMORY, str(copy), *ranks.split()]
        child = subprocess.run(command, capture_output=True, text=True, check=True)
        peak, weights = map(int, child.stdout.split())
        assert weights > 60 << 20
        assert weights < peak < weights + (64 << 20)


def test_damaged_weight_files_are_named(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(StartupError, match=r"model\.safetensors.*damaged"):
        load(copy)
    weights.unlink()
    with pytest.raises(StartupError, match=r"neither model\.safetensors nor"):
        load(copy)


@pytest.mark.parametrize("tied", [True, False])
def test_head_is_loaded_or_tied(copy: Path, tied: bool) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = tied
    (copy / "config.json").write_text(json.dumps(config))
    rewrite(copy, lambda tensors: tensors.pop("lm_head.weight", None))
    embedding = load_file(copy / "model.safetensors")["model.language_model.embed_tokens.weight"]
    head, hidden = torch.randn(embedding.shape), torch.randn(2, 128)
    if not tied:
        with pytest.raises(StartupError, match=r"lm_head\.weight"):
            load(copy)
    else:
        torch.testing.assert_close(load(copy).logits(hidden), hidden @ embedding.T)  # type: ignore[operator]
    rewrite(copy, lambda tensors: tensors.update({"lm_head.weight": head}))
    torch.testing.assert_close(load(copy).logits(hidden), hidden @ head.T)  # type: ignore[operator]
    # Each rank has the rows of its part of the vocabulary.
    other = load_model(EngineConfig(str(copy), "tiny", device="cpu"), lambda *_: None, Ranks(1, 2)).module
    assert torch.equal(other.lm_head.weight, head[len(head) // 2 :])  # type: ignore[union-attr]


@table(
    ("name", "device", "config", "expected"),
    [
        ("auto", "cpu", {"torch_dtype": "float32"}, torch.float32),
        ("auto", "cpu", {"torch_dtype": "float16"}, torch.float32),
        ("auto", "cuda", {"torch_dtype": "float16"}, torch.float16),
        ("auto", "cuda", {"text_config": {"dtype": "bfloat16"}}, torch.bfloat16),
        ("auto", "cuda", {"torch_dtype": "float16", "text_config": None}, torch.float16),
        ("bfloat16", "cpu", {}, torch.bfloat16),
    ],
)
def test_dtype_follows_setting_and_device(
    name: str, device: str, config: dict[str, object], expected: torch.dtype
) -> None:
    assert choose_dtype(name, torch.device(device), config) == expected


@pytest.mark.parametrize(("has_bfloat16", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_dtype_on_a_cpu_is_bfloat16_if_supported(
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


@table(
    ("settings", "words"),
    [
        ({"max_num_batched_tokens": 4}, "--max-num-batched-tokens"),
        ({"num_blocks": 4, "max_model_len": 65}, "--max-model-len is 65, but the KV cache holds 64 tokens"),
        ({"num_blocks": None, "kv_cache_bytes": 10}, "or raise .* --kv-cache-memory-bytes"),
        ({"attention_backend": "magic"}, "torch_sdpa"),
        (
            {"tensor_parallel_size": 4, "attention_tensor_parallel_size": 3},
            "--attention-tensor-parallel-size must divide",
        ),
        ({"attention_tensor_parallel_size": 2}, r"must divide --tensor-parallel-size \(1\), and 2 does not"),
        ({"mm_encoder_attn_backend": "magic"}, "torch_varlen, openvino, amx"),
        ({"mm_encoder_attn_backend": "amx"}, "in float32 on cpu"),
        ({"max_model_len": 10**6, "num_blocks": 10**5}, "--max-model-len"),
    ],
)
def test_impossible_settings_are_refused(tiny_qwen3_vl: Path, settings: dict[str, object], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        engines.engine(tiny_qwen3_vl, **settings)


def test_pool_is_never_larger_than_needed(tiny_qwen3_vl: Path) -> None:
    assert engines.engine(tiny_qwen3_vl, num_blocks=None, max_num_seqs=2, max_model_len=40).description.num_blocks == 6


def test_every_name_of_the_model_is_described(tiny_qwen3_vl: Path) -> None:
    description = engines.engine(tiny_qwen3_vl, aliases=("small",)).description
    assert (description.model, description.aliases) == ("tiny", ("small",))


DUMMY = {"device": "cpu", "load_format": "dummy"}


@table("settings", [{}, {"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}, {"hf_overrides": '{"x": 1}'}])
def test_the_bundled_model_is_known_under_any_name(settings: dict[str, str], tmp_path: Path) -> None:
    folder = shutil.copytree(bundled("model"), tmp_path / "copy")
    description = engines.engine(folder, **settings).description
    assert (description.model, description.note) == ("tiny", f"{ABILITIES} {WAY_ON}")


def test_a_model_of_random_weights_says_so(tmp_path: Path) -> None:
    note = engines.engine(bundled("model"), **DUMMY).description.note
    assert note == "The weights are random (--load-format dummy), so answers mean nothing."


def test_other_models_have_no_note(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_qwen3_vl, tmp_path / BUNDLED_NAME)
    assert engines.engine(folder, aliases=(BUNDLED_NAME,)).description.note == ""


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5", "qwen3_vl_moe"])
def test_dummy_weights_need_no_files_and_are_always_the_same(
    name: str, network_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(network_folder(name), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors*"))
    real = load_model(EngineConfig(str(network_folder(name)), "tiny", device="cpu"), lambda *_: None)
    config = EngineConfig(str(folder), "tiny", **DUMMY)  # type: ignore[arg-type]
    first, second = (load_model(config, lambda *_: None) for _ in range(2))
    assert first.num_parameters == real.num_parameters
    assert first.fingerprint == second.fingerprint != real.fingerprint
    for (place, one), (_, other) in zip(first.module.named_parameters(), second.module.named_parameters(), strict=True):
        assert torch.equal(one, other), place
        assert 0 < one.abs().max() <= 2 or place.endswith("bias"), place


def test_dummy_weights_of_a_quantised_checkpoint_are_refused(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match="quantization_config says that they are quantised"):
        load_model(EngineConfig(str(copy), "tiny", **DUMMY), lambda *_: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_vl_moe", "gemma4"])
def test_weights_are_rounded_to_fp8_while_they_are_loaded(
    name: str, network_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrices of the decoder's layers and experts alone; answers change little, the fingerprint does."""
    monkeypatch.setattr(layers, "LEAST_ROUNDED", 16)
    folder = str(network_folder(name))
    plain, rounded = (
        load_model(EngineConfig(folder, "tiny", device="cpu", quantization=choice), lambda *_: None)  # type: ignore[arg-type]
        for choice in (None, "fp8")
    )
    assert plain.fingerprint != rounded.fingerprint
    assert plain.weights_digest != rounded.weights_digest
    modules = dict(rounded.module.named_modules())
    held = {place for place, module in modules.items() if isinstance(module, Linear) and module.packed is not None}
    kinds = {place.split(".", 3)[3] for place in held}
    assert {"self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"} < kinds
    assert not any("gate_proj" in kind or "router" in kind or kind.endswith(".gate") for kind in kinds)
    assert all(place.startswith("language_model.layers.") for place in held)
    experts = [module for module in modules.values() if isinstance(module, Experts)]
    assert all(set(module.quantised) == {"gate_up_proj", "down_proj"} for module in experts)
    assert bool(experts) == (name != "qwen3_vl")
    for place in held:
        exact = plain.module.get_submodule(place).dequantised()  # type: ignore[operator]
        difference = modules[place].dequantised() - exact  # type: ignore[operator]
        assert 0 < difference.abs().max() <= exact.abs().max() / 16


def test_only_plain_weights_are_rounded(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match=r"--quantization fp8 rounds plain weights, but .* AWQ, 4 bits"):
        load_model(EngineConfig(str(copy), "tiny", device="cpu", quantization="fp8"), lambda *_: None)
