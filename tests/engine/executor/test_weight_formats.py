"""Which format a checkpoint's configuration names, and which modules are on its ignore list."""

import json
from pathlib import Path
from typing import Any

import pytest
from references.formats import AWQ, BYTES, COMPRESSED, FLOAT, FP8, GPTQ, GROUP, NVFP4_PACKED, ROWS, W8A8
from tables import table

from saccade.engine.executor.quantisation import ModuleList, Quantisation
from saccade.engine.executor.weight_formats import read_quantisation
from saccade.errors import StartupError
from saccade.nn.formats.quantised import WHOLE_ROW

NVFP4 = {"quant_algo": "NVFP4", "group_size": 16}


def read(folder: Path, config: dict[str, Any], own_file: object = None) -> Quantisation | None:
    if own_file is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(own_file))
    return read_quantisation(config, folder)


def test_a_checkpoint_without_formats(tmp_path: Path) -> None:
    assert read(tmp_path, {}) is None
    assert read(tmp_path, {"quantization_config": None, "text_config": {}}) is None


@table(
    ("config", "own_file", "name", "ignored"),
    [
        ({"quantization_config": {**COMPRESSED, "ignore": ["lm_head"]}}, None, "compressed-tensors", "lm_head"),
        (
            {"text_config": {"quantization_config": {**COMPRESSED, "ignore": ["re:.*gate"]}}},
            None,
            "compressed",
            "a.gate",
        ),
        ({"quantization_config": {**FP8, "modules_to_not_convert": ["a.b"]}}, None, "fp8", "a.b"),
        ({"quantization_config": FP8}, None, "fp8", None),
        ({}, {"quantization": {**NVFP4, "exclude_modules": ["a.b*"]}}, "NVFP4", "a.bc"),
        ({"quantization_config": {**NVFP4, "quant_method": "modelopt", "ignore": ["a"]}}, None, "NVFP4", "a.b"),
        ({"quantization_config": {**NVFP4, "ignore": ["a"]}}, None, "NVFP4", "a.b"),
        ({"quantization_config": FP8}, {"quantization": NVFP4}, "fp8", None),
        ({}, {"quantization": {"quant_algo": "FP8", "exclude_modules": ["a.b*"]}}, "scale for each tensor", "a.bc"),
        ({"quantization_config": {**FLOAT, "ignore": ["lm_head"]}}, None, "scale for each row", "lm_head"),
        ({"quantization_config": {**W8A8, "ignore": ["lm_head"]}}, None, "int-quantized", "lm_head"),
        ({"quantization_config": NVFP4_PACKED}, None, "nvfp4-pack-quantized", None),
        ({"quantization_config": {**AWQ, "modules_to_not_convert": ["visual"]}}, None, "AWQ", "visual.blocks.0"),
        ({"quantization_config": {**GPTQ, "bits": 8, "group_size": -1, "dynamic": None}}, None, "GPTQ, 8 bits", None),
        ({"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}, None, "each tensor", None),
        ({"quantization_config": {**FP8, "activation_scheme": "static"}}, None, "each block", None),
        ({"quantization_config": {**FP8, "scale_fmt": "ue8m0", "ignored_layers": ["a"]}}, None, "each block", "a"),
        ({"quantization_config": {**GPTQ, "quant_method": "gptq_marlin"}}, None, "GPTQ, 4 bits", None),
        ({"quantization_config": {**GPTQ, "ignore": ["re:a.*"], "dynamic": {}}}, None, "GPTQ, 4 bits", "a.b"),
        ({"quantization_config": {**AWQ, "quant_method": "awq_marlin", "version": "GEMM"}}, None, "AWQ", None),
        ({"quantization_config": {"quant_method": "awq", "w_bit": 4, "q_group_size": 32}}, None, "AWQ", None),
        (
            {
                "quantization_config": {
                    **COMPRESSED,
                    "config_groups": {
                        "a": {"targets": ["re:.*q_proj"], "weights": GROUP},
                        "b": {"targets": ["Linear"], "weights": {**GROUP, "observer": "mse"}},
                        "c": {"targets": ["Attention"], "weights": None, "output_activations": {"num_bits": 8}},
                    },
                }
            },
            None,
            "compressed-tensors pack-quantized, 4 bits",
            None,
        ),
    ],
)
def test_formats_are_read_from_every_place(
    tmp_path: Path, config: dict[str, Any], own_file: object, name: str, ignored: str | None
) -> None:
    found = read(tmp_path, config, own_file)
    assert found is not None
    assert name in found.formats
    assert ignored is None or ignored in found.ignored
    assert "model.other" not in found.ignored


def without(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "config_groups": {"g": {"weights": {**GROUP, **changes}}},
        **{k: v for k, v in config.items() if k != "config_groups"},
    }


def rows(**changes: Any) -> dict[str, Any]:
    return {**FLOAT, "config_groups": {"g": {"weights": {**ROWS, **changes}}}}


def mixed(layers: dict[str, Any]) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


@table(
    ("changes", "words"),
    [
        ({"actorder": "weight"}, ["4 bits"]),
        ({"actorder": "static", "symmetric": False}, ["4 bits, asymmetric"]),
        ({"num_bits": 8, "strategy": "channel", "group_size": None}, ["8 bits"]),
        ({"group_size": -1}, ["4 bits"]),
    ],
)
def test_forms_of_packed_ints(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    found = read(tmp_path, {"quantization_config": without(COMPRESSED, **changes)})
    assert found is not None
    assert all(word in found.formats for word in words)


@pytest.mark.parametrize(
    ("changes", "cell"),
    [
        ({"strategy": "tensor"}, None),
        ({"strategy": "channel"}, (1, WHOLE_ROW)),
        ({"strategy": "block", "block_structure": [64, 128]}, (64, 128)),
    ],
)
def test_strategies_of_floats(tmp_path: Path, changes: dict[str, Any], cell: object) -> None:
    found = read(tmp_path, {"quantization_config": rows(**changes)})
    assert found is not None
    assert found.format is not None
    assert found.format.fields["weight_scale"].cell == cell


MODULES = ("model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj", "lm_head")


def bits_of(found: Quantisation | None) -> list[int | None]:
    """The bits of MODULES, None if a module must be plain."""
    assert found is not None
    return [getattr(found.format_of(module), "bits", None) for module in MODULES]


@table(
    ("settings", "bits"),
    [
        ({}, [4, 4, 4, 4]),
        ({"dynamic": None}, [4, 4, 4, 4]),
        *(({"dynamic": {"-:.*self_attn.*": value}}, [4, 4, None, 4]) for value in ({}, False, None, {"bits": 8})),
        *(({"dynamic": {"lm_head": value}}, [4, 4, 4, 4]) for value in ({}, None)),
        ({"dynamic": {"lm_head": False}}, [4, 4, 4, None]),
        ({"dynamic": {"+:.*mlp.*": {"bits": 4, "group_size": 32, "sym": False, "desc_act": False}}}, [4, 4, 4, 4]),
        ({"dynamic": {"+:.*down_proj": {"bits": 8}}}, [8, 4, 4, 4]),
        ({"dynamic": {".*down_proj": {"bits": 8, "group_size": 64}}}, [8, 4, 4, 4]),
        ({"dynamic": {"-:.*mlp.*": {}, "+:.*down_proj": {"bits": 8}}}, [None, None, 4, 4]),
        ({"dynamic": {"+:.*down_proj": {"bits": 8}, "-:.*mlp.*": {}}}, [8, None, 4, 4]),
        ({"dynamic": {"down_proj": {"bits": 8}}}, [4, 4, 4, 4]),
        ({"modules_in_block_to_quantize": [["mlp.up_proj"], ["mlp.down_proj"]]}, [4, 4, None, None]),
        ({"modules_in_block_to_quantize": ["mlp.up_proj"], "lm_head": True}, [None, 4, None, 4]),
        ({"modules_to_not_convert": ["self_attn"], "ignore": ["lm_head"]}, [4, 4, None, None]),
        ({"exclude_modules": ["*mlp*"]}, [None, None, 4, 4]),
    ],
)
def test_settings_of_modules_in_gptq(tmp_path: Path, settings: dict[str, Any], bits: list[int | None]) -> None:
    """The first pattern that matches a name from its start decides, as in GPTQModel."""
    assert bits_of(read(tmp_path, {"quantization_config": {**GPTQ, **settings}})) == bits


ROUND = {
    "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32, "sym": True,
    "data_type": "int",
}  # fmt: skip


@table(
    ("settings", "bits", "name"),
    [
        ({}, [4, 4, 4, 4], "GPTQ, 4 bits"),
        ({"packing_format": "auto_round:auto_awq", "sym": False}, [4, 4, 4, 4], "AWQ, 4 bits"),
        ({"bits": 8}, [8, 8, 8, 8], "GPTQ, 8 bits"),
        ({"extra_config": {"model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 64}}}, [8, 4, 4, 4], "8 bits"),
        ({"extra_config": {"layers.0.mlp": {"bits": 16, "data_type": "fp"}}}, [None, None, 4, 4], "GPTQ, 4 bits"),
    ],
)
def test_packings_of_auto_round(tmp_path: Path, settings: dict[str, Any], bits: list[int | None], name: str) -> None:
    found = read(tmp_path, {"quantization_config": {**ROUND, **settings}})
    assert bits_of(found) == bits
    assert found is not None
    assert name in found.formats


@table(
    ("settings", "words"),
    [
        ({"packing_format": "auto_round"}, ["packing_format 'auto_round'", "auto_round:auto_gptq"]),
        ({"packing_format": "auto_round:auto_awq", "bits": 8}, ["bits 8"]),
        ({"data_type": "mx_fp"}, ["data_type 'mx_fp'", "int"]),
        ({"bits": 2}, ["bits 2"]),
        ({"extra_config": {"a": {"bits": 3}}}, ["extra_config 'a'", "bits 3"]),
        ({"extra_config": ["a"]}, ["`extra_config`", "['a']"]),
    ],
)
def test_other_packings_of_auto_round_are_refused(tmp_path: Path, settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(StartupError) as error:
        read(tmp_path, {"quantization_config": {**ROUND, **settings}})
    assert all(word in error.value.message for word in words), error.value.message


EIGHT = {**GROUP, "num_bits": 8}


@table(
    ("groups", "bits"),
    [
        ({"a": (["re:.*down_proj"], EIGHT), "b": (["Linear"], GROUP)}, [8, 4, 4, 4]),
        ({"b": (["Linear"], GROUP), "a": (["re:.*down_proj"], EIGHT)}, [8, 4, 4, 4]),
        ({"a": (["re:.*down_proj"], EIGHT), "b": (["re:.*mlp.*"], GROUP)}, [8, 4, None, None]),
        ({"a": (["re:.*mlp.*"], GROUP), "b": (["model.layers.0.mlp.up_proj", "re:lm_head"], EIGHT)}, [4, 8, None, 8]),
        ({"a": (["Linear"], GROUP), "b": (["model.layers.0.mlp.up_proj"], EIGHT)}, [4, 8, 4, 4]),
    ],
)
def test_groups_with_other_settings(
    tmp_path: Path, groups: dict[str, tuple[list[str], dict[str, Any]]], bits: list[int | None]
) -> None:
    """A name comes before an expression, and that before a class of modules, as in compressed-tensors."""
    stated = {name: {"targets": targets, "weights": weights} for name, (targets, weights) in groups.items()}
    assert bits_of(read(tmp_path, {"quantization_config": {**COMPRESSED, "config_groups": stated}})) == bits


def test_groups_have_formats_of_their_own(tmp_path: Path) -> None:
    groups = {
        "group_0": {"targets": ["re:.*self_attn.*"], "format": "float-quantized", "weights": ROWS},
        "group_1": {"targets": ["Linear"], "format": "pack-quantized", "weights": GROUP},
    }
    section = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    found = read(tmp_path, {"quantization_config": section})
    assert found is not None
    assert found.formats == "compressed-tensors pack-quantized, 4 bits, fp8 (e4m3 with a scale for each row)"
    assert [one.name.split()[0] for module in MODULES if (one := found.format_of(module))] == [
        "compressed-tensors",
        "compressed-tensors",
        "fp8",
        "compressed-tensors",
    ]


def test_layers_have_formats_of_their_own(tmp_path: Path) -> None:
    """By their names, by those of what contains them, with or without the first parts."""
    layers = {"model.layers.0.self_attn": {"quant_algo": "FP8"}, "layers.0.mlp.up_proj": {"quant_algo": "NVFP4"}}
    found = read(tmp_path, {"quantization_config": {**mixed(layers), "ignore": ["lm_head"]}})
    assert found is not None
    names = [
        f"model.layers.{name}" for name in ("0.self_attn.q_proj", "0.mlp.up_proj", "0.mlp.down_proj", "1.mlp.up_proj")
    ]
    kinds = [None if (form := found.format_of(name)) is None else form.name for name in names]
    assert kinds == ["fp8 (e4m3 with a scale for each tensor)", "modelopt NVFP4", None, None]
    assert found.formats == "fp8 (e4m3 with a scale for each tensor), modelopt NVFP4"


@table(
    ("found", "words"),
    [
        (
            {"quant_method": "bitsandbytes"},
            ["'bitsandbytes'", "auto-round, awq, awq_marlin, compressed-tensors, fp8, gptq"],
        ),
        ({**AWQ, "version": "gemv"}, ["version 'gemv'", "gemm"]),
        ({**AWQ, "zero_point": False}, ["zero_point False"]),
        ({**AWQ, "bits": 8}, ["bits 8", "4"]),
        ({**AWQ, "group_size": 12}, ["group_size", "12"]),
        ({**GPTQ, "desc_act": "yes"}, ["desc_act 'yes'", "False, True"]),
        ({**GPTQ, "bits": 3}, ["bits 3", "4, 8"]),
        ({**GPTQ, "dynamic": {"+:.*down": {"bits": 3}}}, ["dynamic '+:.*down'", "bits 3", "4, 8"]),
        ({**GPTQ, "dynamic": {".*down": {"desc_act": 2}}}, ["dynamic '.*down'", "desc_act 2"]),
        ({**GPTQ, "dynamic": {".*down": {"group_size": 12}}}, ["dynamic '.*down'", "group_size", "12"]),
        ({**GPTQ, "dynamic": {".*down": {"method": "awq"}}}, ["dynamic '.*down'", "'awq'", "gptq"]),
        ({**GPTQ, "dynamic": {".*down": {"method": ["gptq"]}}}, ["dynamic '.*down'", "['gptq']"]),
        ({**GPTQ, "dynamic": {".*down": 4}}, ["dynamic '.*down'", "not 4"]),
        ({**GPTQ, "dynamic": {"-:((": {}}}, ["`dynamic`", "regular expression"]),
        ({**GPTQ, "dynamic": ["a"]}, ["`dynamic`", "['a']"]),
        ({**GPTQ, "pack_dtype": "int64"}, ["pack_dtype 'int64'", "int32"]),
        ({**GPTQ, "modules_in_block_to_quantize": "mlp"}, ["`modules_in_block_to_quantize`"]),
        ({**GPTQ, "modules_in_block_to_quantize": [["mlp", 3]]}, ["`modules_in_block_to_quantize`"]),
        ({**GPTQ, "ignore": ["re:(("]}, ["`ignore`", "regular expression"]),
        ({**AWQ, "w_bit": 3, "bits": None}, ["bits 3"]),
        ({**GPTQ, "checkpoint_format": "marlin"}, ["'marlin'", "gptq, gptq_v2"]),
        ({}, ["None is not known"]),
        ({**COMPRESSED, "format": "marlin-24"}, ["'marlin-24'", "pack-quantized"]),
        ({**W8A8, "config_groups": {"a": {"weights": {**BYTES, "symmetric": False}}}}, ["weights.symmetric False"]),
        ({**COMPRESSED, "format": "nvfp4-pack-quantized"}, ["weights.type 'int'", "'float'"]),
        (without(COMPRESSED, num_bits=3), ["num_bits 3", "4, 8"]),
        (without(COMPRESSED, strategy="tensor"), ["strategy 'tensor'", "'group', 'channel'"]),
        (without(COMPRESSED, actorder="other"), ["actorder 'other'", "'weight', 'static', 'group', 'dynamic'"]),
        (without(COMPRESSED, group_size=12), ["group_size", "12"]),
        ({**COMPRESSED, "config_groups": {}}, ["config_groups"]),
        (without(COMPRESSED, group_size=[32]), ["group_size", "[32]"]),
        ({"quant_method": ["fp8"]}, ["['fp8'] is not known"]),
        ({**COMPRESSED, "format": {}}, ["format {}"]),
        ({"quant_method": "modelopt", "quant_algo": ["FP8"]}, ["quant_algo ['FP8']"]),
        ({**COMPRESSED, "ignore": "lm_head"}, ["`ignore` must be a list"]),
        ({**COMPRESSED, "ignore": ["re:(("]}, ["'((' ", "regular expression"]),
        ({**FP8, "weight_block_size": [128]}, ["weight_block_size [128]"]),
        ({**FP8, "fmt": "e5m2"}, ["fmt 'e5m2'"]),
        ({**FP8, "scale_fmt": "int"}, ["scale_fmt 'int'", "float, ue8m0"]),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
            ["quant_algo 'W4A16_AWQ'", "NVFP4, W4A16_NVFP4, FP8, MIXED_PRECISION"],
        ),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, ["`quantized_layers`"]),
        (mixed({"a": {"quant_algo": "FP8"}, "b.c": {"quant_algo": "W4A8_AWQ"}}), ["b.c", "quant_algo 'W4A8_AWQ'"]),
        (mixed({"a": {"quant_algo": "NVFP4", "group_size": 32}}), ["a: group_size 32"]),
        (rows(strategy="group"), ["weights.strategy 'group'", "tensor, channel, block"]),
        (rows(strategy="block"), ["weights.block_structure None"]),
        (rows(num_bits=4), ["num_bits 4"]),
        (rows(symmetric=False), ["symmetric False"]),
        (
            {**FLOAT, "config_groups": {"a": {"weights": ROWS}, "b": {"weights": {**ROWS, "strategy": "tensor"}}}},
            ["the same class of modules"],
        ),
        ({"quant_method": "modelopt", **NVFP4, "group_size": 32}, ["group_size 32"]),
    ],
)
def test_unknown_formats_are_refused_by_name(tmp_path: Path, found: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(StartupError) as error:
        read(tmp_path, {"quantization_config": found})
    assert "config.json: quantization_config" in error.value.message
    assert all(word.strip() in error.value.message for word in words), error.value.message


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"quantization": 3}'])
def test_damaged_own_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "hf_quant_config.json").write_text(content)
    with pytest.raises(StartupError, match=r"hf_quant_config\.json"):
        read(tmp_path, {})


def test_ignore_lists() -> None:
    """Names as the releases write them: of modules, of what contains them, with wildcards, as regular expressions."""
    names = ModuleList.of(
        ["lm_head", "model.visual", "layers.0.mlp.gate", "model.layers.*.self_attn*", "re:.*mlp\\.(up|down)_proj.*"]
    )
    ignored = ["lm_head", "language_model.lm_head", "model.visual", "model.visual.blocks.3.attn.qkv",
               "model.layers.0.mlp.gate", "model.layers.7.self_attn.q_proj", "a.mlp.up_proj", "mlp.down_proj"]  # fmt: skip
    kept = ["model.lm_heads", "model.visuals.blocks", "model.layers.0.mlp.gate_proj", "model.layers.10.mlp.gate",
            "model.layers.7.linear_attn.out_proj", "a.mlp.experts.0.up_proj"]  # fmt: skip
    assert [name for name in (*ignored, *kept) if name in names] == ignored
    assert "anything" not in ModuleList()
