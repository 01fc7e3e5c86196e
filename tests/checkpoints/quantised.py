"""Copies of a whole checkpoint with quantised weights, and with the values that those stand for."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from references.formats import REFERENCES
from safetensors.torch import load_file, save_file


def quantise(
    folder: Path, name: str, is_quantised: Callable[[str], bool], into: Path, ignore: Sequence[str] = ()
) -> tuple[Path, Path]:
    """Write two copies of *folder*: quantised, and with the values that the first one stands for.

    *name* is that of the format. *is_quantised* tells which weights are, *ignore* is what the configuration says of it.
    """
    reference = REFERENCES[name]
    quantised, plain = (shutil.copytree(folder, into / kind) for kind in ("quantised", "plain"))
    tensors = load_file(folder / "model.safetensors")
    values = dict(tensors)
    for weight in [key for key in tensors if key.endswith(".weight") and is_quantised(key)]:
        fields = reference.write(tensors.pop(weight))
        values[weight] = torch.from_numpy(reference.read(fields)).contiguous()
        tensors |= {weight.removesuffix("weight") + end: field for end, field in fields.items()}
    save_file(tensors, quantised / "model.safetensors")
    save_file(values, plain / "model.safetensors")
    section = {**reference.config, reference.ignore: list(ignore)}
    if reference.in_own_file:
        (quantised / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    else:
        config = json.loads((quantised / "config.json").read_text())
        (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    return quantised, plain
