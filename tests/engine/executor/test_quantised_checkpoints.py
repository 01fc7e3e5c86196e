"""Whole checkpoints in the forms that tools write: which modules are quantised, and how, as config.json says."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import config_of, load
from references.formats import COMPRESSED, FLOAT, GPTQ, GROUP, REFERENCES, ROWS, Tensors
from safetensors.torch import load_file, save_file
from tables import table

from saccade.errors import StartupError
from saccade.nn.layers import Linear

LAYER = "model.language_model.layers."
Chosen = Callable[[str], str | None]
"""The name of a weight's format by the weight's name, None for a plain one."""


def written(folder: Path, into: Path, section: Mapping[str, Any], chosen: Chosen) -> tuple[Path, Tensors]:
    """A copy with the formats that *chosen* gives, and *section* in config.json; and what its weights stand for."""
    copy = shutil.copytree(folder, into / "model")
    stored: Tensors = {}
    values: Tensors = {}
    for name, tensor in load_file(copy / "model.safetensors").items():
        format = chosen(name) if name.startswith(LAYER) and name.endswith("_proj.weight") else None
        if format is None:
            stored[name] = values[name] = tensor
            continue
        fields = REFERENCES[format].write(tensor)
        stored |= {name.removesuffix("weight") + end: field for end, field in fields.items()}
        values[name] = torch.from_numpy(REFERENCES[format].read(fields)).contiguous()
    save_file(stored, copy / "model.safetensors")
    (copy / "config.json").write_text(json.dumps({**config_of(copy), "quantization_config": section}))
    return copy, values


def check(folder: Path, values: Tensors) -> None:
    """Every linear layer of the loaded network has the values."""
    network = load(folder)
    layers = {name: module for name, module in network.named_modules() if isinstance(module, Linear)}
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for name, value in values.items():
        target = network.locate(name)
        parts.setdefault(target.parameter, {})[target.partition or 0] = value
    count = 0
    for name, own in parts.items():
        if (
            name.startswith("language_model.layers.")
            and (layer := layers.get(name.removesuffix(".weight"))) is not None
        ):
            count += 1
            assert torch.equal(layer.dequantised(), torch.cat([own[part] for part in sorted(own)])), name
    assert count == 16


def mlps(format: str | None, others: str | None = None, last: str | None = None) -> Chosen:
    """*format* in MLPs, *last* in their last matrix if it has another, *others* elsewhere."""
    return lambda name: (last if last and "down_proj" in name else format) if ".mlp." in name else others


CHANNEL = {**GROUP, "num_bits": 8, "strategy": "channel", "group_size": None}
TWO_GROUPS = {
    **COMPRESSED,
    "config_groups": {
        "group_0": {"targets": ["re:.*down_proj"], "weights": CHANNEL},
        "group_1": {"targets": ["Linear"], "weights": GROUP},
    },
}


@table(
    ("section", "chosen"),
    [
        ({**GPTQ, "dynamic": {"-:.*self_attn.*": {}, "-:model\\.visual\\..*": False}}, mlps("gptq")),
        ({**GPTQ, "desc_act": True, "static_groups": True}, mlps("gptq")),
        ({**GPTQ, "dynamic": {"down_proj": {"desc_act": True}}}, mlps("gptq", "gptq")),
        (
            {**GPTQ, "dynamic": {"lm_head": {}}, "modules_in_block_to_quantize": [["mlp.up_proj"], ["mlp"]]},
            mlps("gptq"),
        ),
        (
            {**GPTQ, "dynamic": {"+:.*down_proj": {"bits": 8, "checkpoint_format": "gptq_v2"}}},
            mlps("gptq", "gptq", "gptq int8"),
        ),
        (
            {
                **GPTQ,
                "quant_method": "auto-round",
                "packing_format": "auto_round:auto_gptq",
                "extra_config": {f"{LAYER}{layer}.self_attn": {"bits": 16} for layer in range(4)},
            },
            mlps("gptq"),
        ),
        (TWO_GROUPS, mlps("int4", "int4", "int8 rows")),
        ({**TWO_GROUPS, "ignore": ["re:.*self_attn.*", "lm_head"]}, mlps("int4", None, "int8 rows")),
        (
            {
                **FLOAT,
                "format": "mixed-precision",
                "config_groups": {
                    "group_0": {"targets": ["Linear"], "weights": ROWS, "format": "float-quantized"},
                    "group_1": {"targets": ["re:.*mlp.*"], "weights": GROUP, "format": "pack-quantized"},
                },
            },
            mlps("int4", "fp8 rows"),
        ),
    ],
)
def test_modules_with_formats_of_their_own(
    tiny_qwen3_vl: Path, tmp_path: Path, section: Mapping[str, Any], chosen: Chosen
) -> None:
    check(*written(tiny_qwen3_vl, tmp_path, section, chosen))


@table(
    ("settings", "module"),
    [
        ({"dynamic": {"-:.*down_proj": {}}}, "down_proj"),
        ({"dynamic": {"-:.*down_proj": False}}, "down_proj"),
        ({"dynamic": {".*down_proj": False}}, "down_proj"),
        ({"modules_to_not_convert": ["mlp.down_proj"]}, "down_proj"),
        ({"ignore": ["re:.*down_proj"]}, "down_proj"),
        ({"modules_in_block_to_quantize": [["mlp.gate_proj", "mlp.up_proj"]]}, "down_proj"),
    ],
)
def test_a_map_that_the_tensors_contradict(
    tiny_qwen3_vl: Path, tmp_path: Path, settings: Mapping[str, Any], module: str
) -> None:
    folder, _ = written(tiny_qwen3_vl, tmp_path, {**GPTQ, **settings}, mlps("gptq"))
    words = (
        rf"has 16 tensors of quantised weights in modules .* leaves plain: .*{module}\.(qweight|scales|qzeros|g_idx)"
    )
    with pytest.raises(StartupError, match=words):
        load(folder)


@table(("ignored", "module", "count"), [("re:.*down_proj", "down_proj", 12), ("re:.*gate_proj", "gate_proj", 12)])
def test_an_ignored_module_of_two_groups_must_be_plain(
    tiny_qwen3_vl: Path, tmp_path: Path, ignored: str, module: str, count: int
) -> None:
    """Whether a group names the module or its class."""
    section = {**TWO_GROUPS, "ignore": [ignored]}
    folder, _ = written(tiny_qwen3_vl, tmp_path, section, mlps("int4", "int4", "int8 rows"))
    with pytest.raises(StartupError, match=rf"has {count} tensors of quantised weights .* leaves plain: .*{module}\."):
        load(folder)


def test_other_bits_than_the_tensors_have(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    section = {**GPTQ, "dynamic": {"+:.*down_proj": {"bits": 8}}}
    folder, _ = written(tiny_qwen3_vl, tmp_path, section, mlps("gptq"))
    with pytest.raises(
        StartupError, match=r"down_proj\.qweight .* has shape \[32, 128\] instead of \[64, 128\].* and its `dynamic`"
    ):
        load(folder)
