"""Tensors that the network or a format computes itself: they must have those values."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints.quantised import quantise
from networks import config_of, load
from safetensors.torch import load_file, save_file
from tables import table

from saccade.errors import StartupError

Tensors = dict[str, torch.Tensor]
Change = Callable[[torch.Tensor], torch.Tensor]


def rewrite(folder: Path, **added: torch.Tensor) -> Path:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, **added}, folder / "model.safetensors")
    return folder


def frequencies(theta: float, pairs: int, *, stretched: float = 1.0) -> torch.Tensor:
    return torch.tensor([theta ** (-pair / pairs) / stretched for pair in range(pairs)])


LLAVA, GEMMA = "language_model.model.layers.1.self_attn", "model.language_model.layers.{}.self_attn"
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}


def llava(folder: Path, into: Path, rope: object = None) -> Path:
    """A copy of LLaVA, whose heads have 24 channels; *rope* are its rope_parameters."""
    copy = shutil.copytree(folder, into / "model")
    config = config_of(copy)
    text = config["text_config"]
    text.update({"rope_parameters": rope} if rope else {})
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@table(
    ("rope", "values"),
    [
        (None, frequencies(10_000.0, 12)),
        (None, frequencies(10_000.0, 12).half()),
        (None, frequencies(10_000.0, 12).bfloat16()),
        (LINEAR, frequencies(10_000.0, 12)),
        (LINEAR, frequencies(10_000.0, 12, stretched=4.0)),
    ],
)
def test_rotary_frequencies_of_old_releases(
    network_folder: Callable[[str], Path], tmp_path: Path, rope: object, values: torch.Tensor
) -> None:
    load(rewrite(llava(network_folder("llava"), tmp_path, rope), **{f"{LLAVA}.rotary_emb.inv_freq": values}))


@table(
    ("name", "values"),
    [
        (f"{LLAVA}.rotary_emb.inv_freq", frequencies(500_000.0, 12)),
        (f"{LLAVA}.rotary_emb.inv_freq", frequencies(10_000.0, 12, stretched=4.0)),
        (f"{LLAVA}.rotary_emb.inv_freq", frequencies(10_000.0, 12)[:6]),
        (f"{LLAVA}.rotary_emb.inv_freq", torch.arange(12)),
        ("language_model.model.layers.99.self_attn.rotary_emb.inv_freq", frequencies(10_000.0, 12)),
        ("vision_tower.vision_model.rotary_emb.inv_freq", frequencies(10_000.0, 12)),
    ],
)
def test_other_rotary_frequencies_are_refused_by_name(
    network_folder: Callable[[str], Path], tmp_path: Path, name: str, values: torch.Tensor
) -> None:
    with pytest.raises(StartupError, match=rf"has 1 tensors .*{name} \(model\.safetensors"):
        load(rewrite(llava(network_folder("llava"), tmp_path), **{name: values}))


def test_rotary_frequencies_belong_to_a_kind_of_layers(network_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Gemma 4 has others in layers with a window."""
    folder = shutil.copytree(network_folder("gemma4"), tmp_path / "model")
    text = load(folder).spec.text
    kinds = {kind.window is None: layer for layer, kind in enumerate(text.kinds)}
    values = {
        layer: torch.tensor(
            [1 / (divisor * rope.theta ** (pair / len(rope.divisors))) for pair, divisor in enumerate(rope.divisors)]
        )
        for layer in kinds.values()
        for rope in [text.rope_of(layer)]
    }
    own = {f"{GEMMA.format(layer)}.rotary_emb.inv_freq": one for layer, one in values.items()}
    load(rewrite(folder, **own))
    swapped = dict(zip(own, reversed(own.values()), strict=True))
    with pytest.raises(
        StartupError, match=r"has 2 tensors with other values .*not the rotary positions of config\.json"
    ):
        load(rewrite(folder, **swapped))


DOWN = "model.language_model.layers.1.mlp.down_proj."


def packed(folder: Path, format: str, into: Path) -> Path:
    return quantise(folder, format, lambda name: ".mlp." in name and "language_model" in name, into)[0]


@table(
    ("format", "end", "change", "words"),
    [
        ("gptq", "g_idx", lambda groups: groups.flip(0), "column // group_size"),
        ("gptq", "g_idx", torch.zeros_like, "column // group_size"),
        ("gptq", "g_idx", lambda groups: groups[:-1].clone(), "column // group_size"),
        ("gptq", "g_idx", lambda groups: groups.float(), "column // group_size"),
        ("gptq int8", "g_idx", lambda groups: groups.flip(0), "column // group_size"),
        ("int4", "weight_shape", lambda shape: shape + 1, "the shape of the weight"),
        ("int4 zeros", "weight_shape", lambda shape: shape.flip(0), "the shape of the weight"),
    ],
)
def test_tensors_that_follow_from_a_quantised_weight(
    tiny_qwen3_vl: Path, tmp_path: Path, format: str, end: str, change: Change, words: str
) -> None:
    folder = packed(tiny_qwen3_vl, format, tmp_path)
    load(folder)
    value = load_file(folder / "model.safetensors")[DOWN + end]
    with pytest.raises(StartupError, match=rf"has 1 tensors with other values .*{DOWN}{end} \(model.*{words}"):
        load(rewrite(folder, **{DOWN + end: change(value)}))


def by_activations(folder: Path, end: str, groups: Change) -> Path:
    """The quantised checkpoint, whose config.json says that groups may have any columns; *groups* changes those."""
    config = config_of(folder)
    section = config["quantization_config"]
    own = section["config_groups"]["group_0"]["weights"] if "config_groups" in section else section
    own.update({"actorder": "group"} if "config_groups" in section else {"desc_act": True})
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    modules = [name.rpartition(".")[0] for name in tensors if name.endswith(("weight_packed", "qweight"))]
    columns = {one: 256 if "down_proj" in one else 128 for one in modules}
    return rewrite(folder, **{f"{one}.{end}": groups(torch.arange(count) // 32) for one, count in columns.items()})


ORDERED_BY_CONFIG = [("gptq", "g_idx"), ("gptq int8", "g_idx"), ("int4", "weight_g_idx")]


@table(("format", "end"), ORDERED_BY_CONFIG)
def test_groups_by_activations_are_served_if_their_columns_are_successive(
    tiny_qwen3_vl: Path, tmp_path: Path, format: str, end: str
) -> None:
    folders = [packed(tiny_qwen3_vl, format, tmp_path / name) for name in ("ordered", "unordered")]
    by_activations(folders[0], end, lambda groups: groups.int())
    layers = [load(folder).language_model.layers[1].mlp.down_proj for folder in folders]
    assert torch.equal(*(layer.dequantised() for layer in layers))


@table(("format", "end"), ORDERED_BY_CONFIG)
def test_other_groups_by_activations_are_refused_by_name(
    tiny_qwen3_vl: Path, tmp_path: Path, format: str, end: str
) -> None:
    folder = packed(tiny_qwen3_vl, format, tmp_path)
    mixed = by_activations(folder, end, lambda groups: groups.int().flip(0))
    with pytest.raises(StartupError, match=rf"other values .*{end} .*in the order of activations are not served"):
        load(mixed)


@table(("format", "end"), ORDERED_BY_CONFIG)
def test_groups_by_activations_must_be_stored(tiny_qwen3_vl: Path, tmp_path: Path, format: str, end: str) -> None:
    folder = by_activations(packed(tiny_qwen3_vl, format, tmp_path), end, lambda groups: groups.int())
    tensors = load_file(folder / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if name != DOWN + end}, folder / "model.safetensors")
    with pytest.raises(StartupError, match=rf"lacks 1 tensors: {DOWN}{end} \(I32 or I64\)"):
        load(folder)


@table(("format", "end"), [("gptq", "g_idx"), ("int4", "weight_shape")])
def test_a_tensor_that_follows_from_no_weight(tiny_qwen3_vl: Path, tmp_path: Path, format: str, end: str) -> None:
    folder = packed(tiny_qwen3_vl, format, tmp_path)
    lone = {f"model.language_model.layers.1.self_attn.q_proj.{end}": torch.tensor([128, 128])}
    with pytest.raises(StartupError, match="q_proj"):
        load(rewrite(folder, **lone))


def test_the_same_plain_tensor_under_two_names(
    network_folder: Callable[[str], Path], tmp_path: Path
) -> None:  # Phi-3-vision's embedding is a part of two modules
    folder = shutil.copytree(network_folder("phi3_v"), tmp_path / "model")
    values = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    again = "model.vision_embed_tokens.wte.weight"
    network: Any = load(rewrite(folder, **{again: values.clone()}))
    assert torch.equal(network.language_model.embedding_VE, values)
    with pytest.raises(StartupError, match="are the same weight"):
        load(rewrite(folder, **{again: values + 1}))
