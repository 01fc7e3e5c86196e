"""Every network with quantised weights against itself with the values that they stand for, in every format.

All linear layers and experts whose sizes a format can have are quantised, also those that no release quantises.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import engines
import pytest
import torch
from checkpoints import NETWORKS
from references.formats import REFERENCES
from safetensors.torch import load_file, save_file

from saccade.engine.config import EngineConfig
from saccade.engine.executor import unpacking
from saccade.engine.executor.loader import load_model
from saccade.nn import ops
from saccade.nn.experts import Experts
from saccade.nn.formats.quantised import QuantisedLinear
from saccade.nn.layers import Linear

pytestmark = pytest.mark.ci

Tensors = dict[str, torch.Tensor]
COLUMNS = {"int4": 32, "nvfp4": 16, "int4 zeros": 32, "int8 rows": 4, "awq": 32, "gptq": 32, "gptq int8": 32,
           "nvfp4 packed": 16}  # fmt: skip
"""What the columns of a weight must be a multiple of."""
EVERYDAY = {("qwen3_vl_moe", "fp8")}
CASES = [
    pytest.param(release, format, marks=() if (release, format) in EVERYDAY else pytest.mark.conformance)
    for release in NETWORKS
    for format in REFERENCES
]


def one_by_one(tensors: Tensors) -> Tensors:
    """The same with fused experts [experts, outputs, inputs] as single ones, as releases have them that quantise."""
    found = {}
    for name, value in tensors.items():
        experts, _, matrix = name.rpartition(".")
        if matrix not in ("gate_up_proj", "down_proj") or value.ndim != 3:
            found[name] = value
            continue
        for number, weight in enumerate(value):
            parts = {"gate": weight.chunk(2)[0], "up": weight.chunk(2)[1]} if "gate" in matrix else {"down": weight}
            found |= {f"{experts}.{number}.{kind}_proj.weight": part.contiguous() for kind, part in parts.items()}
    return found


def join(values: Tensors, stored: Tensors) -> int:
    """Quantise what is stored for all experts in one tensor, in the orientation that it has; return how many."""
    reference, names = REFERENCES["fp8"], [key for key in values if key.endswith((".gate_up_proj", ".down_proj"))]
    for name in names:
        fields = [reference.write(expert) for expert in stored.pop(name)]
        values[name] = torch.stack([torch.from_numpy(reference.read(one)) for one in fields]).contiguous()
        stored |= {name + end.removeprefix("weight"): torch.stack([one[end] for one in fields]) for end in fields[0]}
    return len(names)


def pair(folder: Path, name: str, into: Path, split: bool) -> tuple[Path, Path, int]:
    """Copies of a checkpoint, quantised and with the values; and how many weights are quantised."""
    reference = REFERENCES[name]
    network = load_model(EngineConfig(str(folder), "tiny", device="cpu"), lambda *_: None).module
    modules = dict(network.named_modules())
    quantised, plain = (shutil.copytree(folder, into / kind) for kind in ("quantised", "plain"))
    values = load_file(folder / "model.safetensors")
    values = one_by_one(values) if split else values
    stored = dict(values)
    count = 0
    if name == "fp8":
        count += join(values, stored)
    for key, weight in values.items():
        target = network.locate(key) if key.endswith(".weight") and weight.ndim == 2 else None  # type: ignore[operator]
        if target is None or weight.shape[1] % COLUMNS.get(name, 1):
            continue
        # A layer that is no longer there was absorbed into others.
        owner = modules.get(target.parameter.rpartition(".")[0])
        if owner is None or isinstance(owner, Linear | Experts):
            fields = reference.write(stored.pop(key))
            values[key] = torch.from_numpy(reference.read(fields)).contiguous()
            stored |= {key.removesuffix("weight") + end: field for end, field in fields.items()}
            count += 1
    save_file(stored, quantised / "model.safetensors")
    save_file(values, plain / "model.safetensors")
    if reference.in_own_file:
        (quantised / "hf_quant_config.json").write_text(json.dumps({"quantization": reference.config}))
    else:
        config = json.loads((quantised / "config.json").read_text())
        (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": reference.config}))
    return quantised, plain, count


@pytest.mark.aspect("formats")
@pytest.mark.parametrize(("release", "format"), CASES)
def test_quantised_network_equals_the_reference(
    release: str,
    format: str,
    network_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ops, "KERNELS", {})
    monkeypatch.setattr(unpacking, "free_bytes", lambda: 0)
    quantised, plain, count = pair(
        network_folder(release), format, tmp_path, split=release == "gemma4" or "qwen3_5" in release
    )
    found = []
    for folder in (quantised, plain):
        subject = engines.engine(folder)
        logits = engines.record_logits(subject)
        engines.drain(subject, engines.request(folder, [5, ((96, 64), 1), 9], max_tokens=4))
        found.append(torch.stack(logits["a"]))
        if folder == quantised:
            layers = [*engines.module(subject).modules()]
            kept = [isinstance(layer.packed, QuantisedLinear) for layer in layers if isinstance(layer, Linear)]
            experts = [len(layer.quantised) for layer in layers if isinstance(layer, Experts)]
    torch.testing.assert_close(*found, atol=1e-5, rtol=0)
    assert count > 1
    assert any(kept)
    # Of formats without a layout for all experts in one tensor, such experts stay plain.
    joined = release == "qwen3_vl_moe" and format != "fp8"
    assert set(experts) <= ({0} if joined else {num_quantised(plain, format)})


def num_quantised(folder: Path, format: str) -> int:
    """How many of the two weights of an expert have columns that *format* can have."""
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    columns = (text["hidden_size"], text.get("moe_intermediate_size", 0))
    return sum(size % COLUMNS.get(format, 1) == 0 for size in columns)
