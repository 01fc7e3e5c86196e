"""A network with quantised weights is the network with the values that they stand for, for every format."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import engines
import pytest
import torch
from checkpoints.quantised import quantise
from references.formats import REFERENCES
from safetensors.torch import load_file, save_file
from tables import table

from saccade.engine.config import EngineConfig
from saccade.engine.executor import unpacking
from saccade.engine.executor.loader import load_model
from saccade.errors import StartupError
from saccade.nn import ops
from saccade.nn.layers import Linear
from saccade.nn.parallel import ALONE, Ranks

PLAIN = ("embed_tokens", "norm", "patch_embed", "pos_embed", "visual.blocks.1.", "layers.1.self_attn.k_proj")
"""Parts of the names of weights that are not quantised; a layer that was joined has parts of both kinds."""


def is_quantised(name: str) -> bool:
    return not any(part in name for part in PLAIN)


ROUNDED = ("w8a8", "int8 rows", "int4", "int4 zeros", "awq", "gptq")
"""Formats that a kernel of processors multiplies, which rounds activations to eight bits, or to bfloat16."""

EVERYDAY = ("int4", "fp8", "nvfp4", "fp8 tensor")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.conformance) for name in REFERENCES],
)
def pair(
    request: pytest.FixtureRequest, tiny_qwen3_vl: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A quantised checkpoint, and its twin with plain weights."""
    return quantise(
        tiny_qwen3_vl, request.param, is_quantised, tmp_path_factory.mktemp(request.param), ["model.visual.blocks.1"]
    )


def load(folder: Path, ranks: Ranks = ALONE) -> torch.nn.Module:
    return load_model(EngineConfig(str(folder), "tiny", device="cpu"), lambda *_: None, ranks).module


def logits_of(folder: Path) -> tuple[list[int], torch.Tensor]:
    subject = engines.engine(folder)
    logits = engines.record_logits(subject)
    answer = engines.drain(subject, engines.request(folder, [5, ((96, 64), 1), 9])).answers["a"]
    return answer.token_ids, torch.stack(logits["a"])


def test_logits_equal_those_of_dequantised_weights(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "KERNELS", {})
    monkeypatch.setattr(unpacking, "free_bytes", lambda: 0)
    (token_ids, logits), (expected_ids, expected) = (logits_of(folder) for folder in pair)
    assert token_ids == expected_ids
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["w8a8", "int8 rows", "int4", "awq"])
def test_logits_by_a_kernel(name: str, tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    """Activations are rounded to eight bits, or to bfloat16."""
    quantised, plain = quantise(tiny_qwen3_vl, name, is_quantised, tmp_path, ["model.visual.blocks.1"])
    (_, logits), (_, expected) = (logits_of(folder) for folder in (quantised, plain))
    # The first token's: later ones follow answers, which may differ.
    assert (logits[0] - expected[0]).norm() <= 0.05 * expected[0].norm()
    assert not torch.equal(logits[0], expected[0])


@pytest.mark.conformance
@pytest.mark.parametrize("encoder", ["data", "weights"])
def test_logits_of_two_ranks(pair: tuple[Path, Path], encoder: str, request: pytest.FixtureRequest) -> None:
    quantised, plain = pair
    asked = engines.request(quantised, [5, ((96, 64), 1), 9])
    alone = engines.engine(plain)
    expected = engines.record_logits(alone)
    token_ids = engines.drain(alone, asked).answers["a"].token_ids
    with engines.on_ranks(quantised, mm_encoder_tp_mode=encoder) as subject:
        found = engines.record_logits(subject)
        assert engines.drain(subject, asked).answers["a"].token_ids == token_ids
    if request.node.callspec.params["pair"] in ROUNDED:
        # Each rank rounds its own part of a layer's inputs.
        assert (found["a"][0] - expected["a"][0]).norm() <= 0.05 * expected["a"][0].norm()
    else:
        torch.testing.assert_close(torch.stack(found["a"]), torch.stack(expected["a"]), atol=1e-4, rtol=0)


@pytest.mark.ci
@table("ranks", [ALONE, Ranks(0, 2), Ranks(1, 2)])
def test_weights_of_a_rank(pair: tuple[Path, Path], ranks: Ranks, request: pytest.FixtureRequest) -> None:
    """Every rank holds its shard of the values, to the bit."""
    quantised, plain = (load(folder, ranks) for folder in pair)
    kept = 0
    for (name, ours), theirs in zip(quantised.named_modules(), plain.modules(), strict=True):
        if isinstance(ours, Linear):
            assert torch.equal(ours.dequantised(), theirs.dequantised()), name
            kept += ours.packed is not None
    # All but what is ignored, and the queries, keys and values of the tower unless each row has its own values and scales:
    # they are rearranged.
    keeps_order = request.node.callspec.params["pair"] in ("int4", "w8a8", "int8 rows", "fp8 rows")
    assert kept == 4 * 4 + (4 if keeps_order else 3) * 3 + 4 * 2 + 1


def test_quantised_weights_take_less_memory(pair: tuple[Path, Path]) -> None:
    """Quantised weights are not kept dequantised."""
    quantised, plain = (load(folder) for folder in pair)

    def num_bytes(network: torch.nn.Module) -> int:
        layer = network.get_submodule("language_model.layers.0.mlp.gate_up_proj")
        if layer.packed is None:
            return layer.weight.nbytes
        assert layer.weight.numel() == 0
        return sum(field.nbytes for part in layer.packed.parts for field in part.fields.values())

    # Of four bytes in float32, one with its scales and zero points, or less.
    assert num_bytes(quantised) < 0.28 * num_bytes(plain)


def without(end: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(next(name for name in tensors if name.endswith(end)))


def changed(end: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({next(name for name in tensors if name.endswith(end)): value})


DOWN = "layers.0.mlp.down_proj."


@pytest.mark.ci
@table(
    ("name", "change", "words"),
    [
        ("int4", without(DOWN + "weight_scale"), ["lacks 1", DOWN + "weight_scale"]),
        ("int4", without(DOWN + "weight_packed"), ["lacks 1", DOWN + "weight_packed"]),
        ("int4", changed(DOWN + "weight_scale", torch.ones(128, 7)), ["[128, 7]", "[128, 8]"]),
        ("int4", changed(DOWN + "weight_packed", torch.ones(128, 32)), ["F32", "I32"]),
        ("int4", lambda t: t.update({f"model.language_model.{DOWN}weight_zero_point": torch.ones(1)}), ["not know"]),
        ("fp8", without(DOWN + "weight_scale_inv"), ["lacks 1", DOWN + "weight_scale_inv"]),
        ("fp8", changed(DOWN + "weight", torch.ones(128, 256)), ["same weight", DOWN + "weight"]),
        ("fp8", changed(DOWN + "weight_scale_inv", torch.ones(2, 2)), ["[2, 2]", "[1, 2]"]),
        ("fp8 tensor", without(DOWN + "weight_scale"), ["lacks 1", DOWN + "weight_scale (F32 or BF16 or F16 or F8_E8M0)"]),
        ("fp8 tensor", changed(DOWN + "weight_scale", torch.ones(7, 1)), ["[7, 1]", "instead of"]),
        ("fp8 rows", changed(DOWN + "weight_scale", torch.ones(1)), ["[1]", "[128, 1]"]),
        ("nvfp4", without(DOWN + "weight_scale_2"), ["lacks 1", DOWN + "weight_scale_2"]),
        ("nvfp4", changed(DOWN + "weight_scale", torch.ones(128, 16)), ["F32", "F8_E4M3"]),
    ],
)  # fmt: skip
def test_wrong_tensors_are_refused(
    name: str,
    change: Callable[[dict[str, torch.Tensor]], object],
    words: list[str],
    tiny_qwen3_vl: Path,
    tmp_path: Path,
) -> None:
    quantised, _ = quantise(tiny_qwen3_vl, name, is_quantised, tmp_path)
    tensors = load_file(quantised / "model.safetensors")
    change(tensors)
    save_file(tensors, quantised / "model.safetensors")
    with pytest.raises(StartupError) as error:
        load(quantised)
    assert all(word in error.value.message for word in words), error.value.message


def test_ignored_modules_must_be_plain(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    quantised, _ = quantise(tiny_qwen3_vl, "fp8", is_quantised, tmp_path, ["lm_head"])
    with pytest.raises(StartupError, match=r"lm_head\.weight \(model\.safetensors\) is F8_E4M3 instead of"):
        load(quantised)


def test_layers_of_several_formats(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    """MIXED_PRECISION: attention in one format, MLPs in another, what no list names plain."""
    algorithms = {"self_attn.": ("fp8 tensor", {"quant_algo": "FP8"}), "mlp.": ("nvfp4", REFERENCES["nvfp4"].config)}
    quantised, plain = (shutil.copytree(tiny_qwen3_vl, tmp_path / kind) for kind in ("quantised", "plain"))
    values = load_file(tiny_qwen3_vl / "model.safetensors")
    stored, layers = dict(values), {}
    for weight in [key for key in values if ".language_model.layers." in key and key.endswith("_proj.weight")]:
        (reference, algorithm), module = (
            next(one for part, one in algorithms.items() if part in weight),
            weight.removesuffix(".weight"),
        )
        fields = REFERENCES[reference].write(stored.pop(weight))
        values[weight] = torch.from_numpy(REFERENCES[reference].read(fields)).contiguous()
        stored |= {f"{module}.{end}": field for end, field in fields.items()}
        layers[module] = algorithm
    save_file(stored, quantised / "model.safetensors")
    save_file(values, plain / "model.safetensors")
    section = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": layers}
    (quantised / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    ours, theirs = load(quantised), load(plain)
    formats = set()
    for (name, layer), other in zip(ours.named_modules(), theirs.modules(), strict=True):
        if isinstance(layer, Linear):
            assert torch.equal(layer.dequantised(), other.dequantised()), name
            formats |= {part.format.name for part in layer.packed.parts} if layer.packed is not None else {"plain"}
    assert len(formats) == 3
    del layers["model.language_model.layers.0.mlp.up_proj"]
    (quantised / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    with pytest.raises(StartupError, match=r"layers\.0\.mlp\.up_proj\.weight .* is U8 instead of"):
        load(quantised)


def test_quantised_weights_without_a_configuration_are_refused(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    quantised, _ = quantise(tiny_qwen3_vl, "nvfp4", is_quantised, tmp_path)
    (quantised / "hf_quant_config.json").unlink()
    with pytest.raises(StartupError, match="U8 instead of F64"):
        load(quantised)
